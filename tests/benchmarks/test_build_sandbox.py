"""Rebuilding the sandbox: its texts equal the shipped ones, folders are kept, an install replaces all."""

import json

import pytest

from alpacafarm_env.benchmarks import build_sandbox
from alpacafarm_env.benchmarks.build_sandbox import hashes, main
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


def test_the_command_compares_and_installs(tmp_path, stages, monkeypatch, capsys):
    monkeypatch.setattr(dataset, "ASSETS", tmp_path / "shipped")
    write_model(tmp_path / "shipped" / "old")
    assert main(["--out", str(tmp_path / "one")]) == 1
    printed = capsys.readouterr().out
    assert all(name in printed for name in ("old/model.safetensors", "policy/model.safetensors", "eval.jsonl.gz"))
    assert stages == ["texts", "policy", "pairs", "reward_model", "reward_model"]
    assert main(["--out", str(tmp_path / "two"), "--install"]) == 0
    assert hashes(tmp_path / "shipped") == hashes(tmp_path / "two" / "assets")
    assert main(["--out", str(tmp_path / "three")]) == 0
    assert "0 files differ" in capsys.readouterr().out
