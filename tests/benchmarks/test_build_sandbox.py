"""Rebuilding the sandbox: its texts equal the shipped ones, an interrupted build resumes, an install replaces all."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from alpacafarm_env.benchmarks import build_sandbox
from alpacafarm_env.benchmarks.build_sandbox import REWARD_MODELS, compare, hashes, install, main
from alpacafarm_env.errors import AlpacaFarmError
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
    stage("reward_models", lambda out: [write_model(out / "assets" / name) for name in REWARD_MODELS])
    return ran


def test_texts_equal_the_shipped_ones(tmp_path):
    build_sandbox.build_texts(tmp_path)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == sorted([*(f"{split}.jsonl.gz" for split in dataset.SIZES), "davinci003_stand_in.jsonl.gz"])
    for name in names:  # the rows: another zlib may pack them into other bytes
        assert dataset.read_rows(tmp_path / name) == dataset.read_rows(dataset.ASSETS / "data" / name)


def test_only_what_is_unfinished_is_built_again(tmp_path, stages):
    """Any model, also the first of the two reward models that train side by side."""
    build_sandbox.build(tmp_path)
    assert stages == ["texts", "policy", "pairs", "reward_models"]
    assets = build_sandbox.build(tmp_path)
    assert len(stages) == 4
    assert json.loads((assets / "manifest.json").read_text())["files"] == hashes(assets)
    for name in ("policy", *REWARD_MODELS):
        (assets / name / "tokenizer_config.json").unlink()
        build_sandbox.build(tmp_path)
    assert stages[4:] == ["policy", "reward_models", "reward_models"]


def test_another_stamp_is_refused_and_nothing_is_lost(tmp_path, stages, monkeypatch):
    assets = build_sandbox.build(tmp_path)
    monkeypatch.setitem(build_sandbox.ARCHITECTURE, "hidden_size", 128)
    with pytest.raises(AlpacaFarmError, match="expected no folder"):
        build_sandbox.build(tmp_path)
    assert (assets / "manifest.json").is_file()
    assert len(stages) == 4


def test_the_stamp_covers_settings_and_sources(tmp_path, monkeypatch):
    stamps = {build_sandbox.stamp()}
    changed = replace(build_sandbox.SFTConfig.sandbox(), epochs=77)
    for change in ((dataset, "SEED", 1), (build_sandbox.SFTConfig, "sandbox", lambda: changed)):
        with monkeypatch.context() as patch:
            patch.setattr(*change)
            stamps.add(build_sandbox.stamp())
    copy = tmp_path / "agents"
    shutil.copytree(Path(build_sandbox.agents.__file__).parent, copy)
    monkeypatch.setattr(build_sandbox.agents, "__file__", str(copy / "__init__.py"))
    assert build_sandbox.stamp() in stamps  # where the sources lie does not matter
    (copy / "__init__.py").write_text("# changed")
    assert len({*stamps, build_sandbox.stamp()}) == 4


def test_folders_of_somebody_else_are_left_alone(tmp_path, stages, capsys):
    write_model(tmp_path / "assets" / "policy")
    assert main(["--out", str(tmp_path)]) == 2
    assert "got another assets" in capsys.readouterr().err
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
    shipped.parent.mkdir()
    for name in ("policy", "another"):  # nothing is there, then what was installed before
        write_model(ours / name)
        install(ours, shipped)
        assert hashes(shipped) == hashes(ours)
        assert [path.name for path in shipped.parent.iterdir()] == ["assets"]
        shutil.rmtree(ours)


def test_the_command_says_whether_the_result_equals_the_shipped_one(tmp_path, stages, monkeypatch, capsys):
    monkeypatch.setattr(dataset, "ASSETS", tmp_path / "shipped")
    args = ["--out", str(tmp_path / "out")]
    assert main(args) == 1
    assert "files differ from the shipped sandbox" in capsys.readouterr().out
    assert main([*args, "--install"]) == 0
    assert main(args) == 0
    assert "0 files differ" in capsys.readouterr().out
