"""Model folders: the same bytes wherever and however the model was loaded, readable by others."""

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from alpacafarm_env.agents.language_model import LanguageModel
from alpacafarm_env.agents.saving import LOADING_STATE
from alpacafarm_env.sandbox import ASSETS
from alpacafarm_env.templates import PromptTemplate

ROOT = Path(__file__).resolve().parents[2]
SAVE = (
    "import sys; from alpacafarm_env.agents import LanguageModel as L; L.from_pretrained(sys.argv[1]).save(sys.argv[2])"
)


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_saving_a_loaded_model_gives_the_same_bytes(policy_folder, tmp_path):
    LanguageModel.from_pretrained(policy_folder).save(tmp_path / "again")
    assert contents(tmp_path / "again") == contents(policy_folder)


@pytest.mark.parametrize("offline", ["0", "1"])
def test_the_hub_setting_leaves_no_trace(policy_folder, tmp_path, offline):
    """transformers reads HF_HUB_OFFLINE once, at import: it takes a process of its own."""
    command = [sys.executable, "-c", SAVE, str(policy_folder), str(tmp_path / "saved")]
    subprocess.run(command, cwd=ROOT, env={**os.environ, "HF_HUB_OFFLINE": offline}, check=True, capture_output=True)
    assert contents(tmp_path / "saved") == contents(policy_folder)


@pytest.mark.parametrize("name", ["policy", "reward_model", "reward_model_clean"])
def test_the_shipped_tokenizers_hold_no_loading_state(name):
    config = json.loads((ASSETS / name / "tokenizer_config.json").read_text())
    assert config.keys().isdisjoint(LOADING_STATE)
    assert config["eos_token"] == "</s>"


@pytest.mark.skipif(os.name != "posix", reason="file modes are POSIX")
@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o000, 0o644), (0o027, 0o640), (0o077, 0o600)])
def test_files_are_as_readable_as_the_umask_permits(llama, tmp_path, umask, mode):
    before = os.umask(umask)
    try:
        llama.save(tmp_path / "saved")
    finally:
        os.umask(before)
    files = list((tmp_path / "saved").iterdir())
    assert "model.safetensors" in [path.name for path in files]
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {mode}


def test_no_older_chat_template_stays_beside_a_model_that_has_none(llama, tmp_path):
    llama.save(tmp_path / "saved")
    (tmp_path / "saved" / "chat_template.jinja").write_text("another model's")
    llama.template = PromptTemplate("</s>{instruction}{input}", "</s>{instruction}")  # no Jinja gives its letters
    llama.save(tmp_path / "saved")
    assert not (tmp_path / "saved" / "chat_template.jinja").exists()
