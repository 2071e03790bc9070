"""Rebuilding the sandbox: its texts equal the shipped ones, folders are kept, an install replaces all."""

import json
import shutil

import pytest

from alpacafarm_env.benchmarks import build_sandbox
from alpacafarm_env.benchmarks.build_sandbox import compare, hashes, install, main
from alpacafarm_env.sandbox import dataset


def write_model(folder):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.safetensors").write_text(folder.name)
    (folder / "tokenizer_config.json").write_text("{}")


@pytest.fixture
def stages(monkeypatch):
    """Every stage replaced by one that writes its files at once; returns the list of those that ran."""
    ran = []

    def stage(name, work):
        monkeypatch.setattr(build_sandbox, f"build_{name}", lambda *args: (ran.append(name), work(*args)))

    stage("texts", lambda folder: [dataset.write_rows(folder / f"{split}.jsonl.gz", []) for split in dataset.SIZES])
    stage("policy", lambda data, folder, work: write_model(folder))
    stage("pairs", lambda data, policy, file: dataset.write_rows(file, []))
    stage("reward_model", lambda out, name: write_model(out / "assets" / name))
    return ran


def test_texts_equal_the_shipped_ones(tmp_path):
    build_sandbox.build_texts(tmp_path)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == sorted([*(f"{split}.jsonl.gz" for split in dataset.SIZES), "davinci003_stand_in.jsonl.gz"])
    for name in names:  # the rows: another zlib may pack them into other bytes
        assert dataset.read_rows(tmp_path / name) == dataset.read_rows(dataset.ASSETS / "data" / name)


def test_folders_with_assets_are_left_alone(tmp_path, stages, capsys):
    write_model(tmp_path / "assets" / "policy")
    assert main(["--out", str(tmp_path)]) == 2
    assert "assets" in capsys.readouterr().err
    assert (tmp_path / "assets" / "policy" / "model.safetensors").is_file()
    assert stages == []


def test_the_manifest_belongs_to_the_shipped_files():
    manifest = json.loads((dataset.ASSETS / "manifest.json").read_text())
    assert manifest["files"] == hashes(dataset.ASSETS)


def test_compare_names_what_differs(tmp_path):
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    for folder in (ours, theirs):
        write_model(folder / "policy")
    assert compare(ours, theirs) == []
    (ours / "policy" / "model.safetensors").write_text("other weights")
    (ours / "new.json").write_text("{}")
    (theirs / "policy" / "old.json").write_text("{}")
    (theirs / "manifest.json").write_text("{}")
    assert compare(ours, theirs) == ["new.json", "policy/model.safetensors", "policy/old.json"]


def test_install_replaces_everything(tmp_path):
    ours, shipped = tmp_path / "ours", tmp_path / "package" / "assets"
    for name in ("policy", "another"):  # nothing is there, then what was installed before
        write_model(ours / name)
        install(ours, shipped)
        assert hashes(shipped) == hashes(ours)
        shutil.rmtree(ours)


def test_the_command_compares_and_installs(tmp_path, stages, monkeypatch, capsys):
    monkeypatch.setattr(dataset, "ASSETS", tmp_path / "shipped")
    assert main(["--out", str(tmp_path / "one")]) == 1
    assert stages == ["texts", "policy", "pairs", "reward_model", "reward_model"]
    assert main(["--out", str(tmp_path / "two"), "--install"]) == 0
    assert main(["--out", str(tmp_path / "three")]) == 0
    assert "0 files differ" in capsys.readouterr().out
