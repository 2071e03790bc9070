"""Folders: claims end with their owner, hashes are of what decides, and models that take all memory are refused."""

import gc
import json
import os
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hub_models import make_tiny_reward_model
from safetensors.torch import load_file, save_file

from alpacafarm_env import pretrained, sandbox
from alpacafarm_env.errors import CheckpointError, DataError, NotEnoughMemoryError
from alpacafarm_env.folders import LOCK, Claim, check_model, hash_folder, hash_model, refuse_claimed
from alpacafarm_env.oracles import RewardModel
from alpacafarm_env.pretrained import load_model, load_tokenizer


def test_second_claims_wait_for_the_first(tmp_path):
    folder = tmp_path / "new" / "out"
    with Claim(folder, "first") as held:
        with pytest.raises(CheckpointError, match=r"first.*process \d+"):
            Claim(folder, "second")
        with pytest.raises(CheckpointError, match="first"):  # by another name of the same folder
            Claim(folder / ".." / "out", "second")
        Claim(tmp_path / "other", "second").release()
    assert list(folder.iterdir()) == []
    again = Claim(folder, "second")
    held.release()  # its own end is past: the later claim stays
    shutil.rmtree(folder)
    with Claim(folder, "third"):
        again.release()  # nor does it end a later one in a folder made anew
        with pytest.raises(CheckpointError, match="third"):
            Claim(folder, "fourth")
    forgotten = Claim(folder, "fifth")
    del forgotten
    gc.collect()
    Claim(folder, "sixth").release()


HOLD = """
import os, signal, subprocess, sys, time
from alpacafarm_env.errors import CheckpointError
from alpacafarm_env.folders import Claim
held = Claim(sys.argv[1], "a long study")
process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], close_fds=False)
child = os.fork()
if child == 0:
    signal.alarm(60)
    time.sleep(60)
    os._exit(0)
time.sleep(0.3)
try:
    Claim(sys.argv[1], "second")
except CheckpointError:  # children do not take it away
    print("held", process.pid, child, flush=True)
time.sleep(60)
"""


def test_claims_end_with_their_own_process(tmp_path):
    with subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True) as process:
        told, *children = process.stdout.readline().split()
        assert told == "held"
        with pytest.raises(CheckpointError, match=f"a long study.*process {process.pid}"):
            Claim(tmp_path, "second")
        process.kill()
        process.wait()
    with Claim(tmp_path, "second"):
        assert f"process {os.getpid()}" in (tmp_path / LOCK).read_text()
    for child in children:
        os.kill(int(child), signal.SIGKILL)


def test_of_many_claims_at_once_one_is_held(tmp_path):
    holders = []

    def work(_):
        try:
            with Claim(tmp_path, "worker"):
                holders.append(1)
                most = len(holders)
                holders.pop()
                return most
        except CheckpointError:
            return 0

    with ThreadPoolExecutor(4) as threads:
        assert max(threads.map(work, range(800))) == 1


def test_a_place_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("mine")
    for place in (tmp_path / "file", "/proc/self/nothing"):
        with pytest.raises(CheckpointError, match=str(place)):
            Claim(place, "first")


def test_a_model_is_what_its_files_say(tmp_path):
    before = hash_model(sandbox.POLICY)
    moved = shutil.copytree(sandbox.POLICY, tmp_path / "elsewhere")
    (moved / "README.md").write_text("notes")
    (moved / "checkpoint-1").mkdir()
    for name in ("model.safetensors", "config.json", "tokenizer.json", "prompt_template.json"):
        (moved / name).touch()
        assert hash_model(moved) == before
        content = (moved / name).read_bytes()
        (moved / name).write_bytes(content[:-2] + bytes([content[-2] ^ 1]) + content[-1:])
        after = hash_model(str(moved))
        assert {file for file in before if before[file] != after[file]} == {name}
        (moved / name).unlink()
        assert before.keys() - hash_model(moved).keys() == {name}
        (moved / name).write_bytes(content)


def test_an_adapter_is_its_base_model_too(tmp_path):
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    shutil.copytree(sandbox.POLICY, base)
    adapter.mkdir()

    def settings(**values):
        content = {"r": 8, "base_model_name_or_path": str(base), **values}
        (adapter / "adapter_config.json").write_text(json.dumps(content))

    settings()
    before = hash_model(adapter)
    assert "base/model.safetensors" in before
    settings(base_model_name_or_path=str(sandbox.POLICY))
    assert hash_model(adapter) == before
    settings(r=4)
    assert hash_model(adapter) != before
    settings()
    (base / "model.safetensors").write_bytes(b"others")
    assert hash_model(adapter) != before


def test_data_is_what_its_files_say(tmp_path):
    first, second = tmp_path / "a", tmp_path / "b"
    (first / "outputs").mkdir(parents=True)
    (first / "eval.jsonl").write_text('{"instruction": "a"}\n')
    (first / "outputs" / "outputs_x.json").write_text("[]")
    shutil.copytree(first, second)
    (second / "LICENSE").write_text("theirs")
    (second / "results").mkdir()
    (second / "results" / "settings.json").write_text("{}")  # a run may write into the folder of its data
    assert list(hash_folder(first)) == ["eval.jsonl", "outputs/outputs_x.json"]
    assert hash_folder(first) == hash_folder(second)
    (second / "eval.jsonl").write_text('{"instruction": "b"}\n')
    assert hash_folder(first) != hash_folder(second)


def test_what_is_not_there_has_no_content(tmp_path):
    for read, folder in ((hash_folder, tmp_path / "none"), (hash_model, tmp_path / "none"), (hash_model, tmp_path)):
        with pytest.raises(DataError if read is hash_folder else CheckpointError, match=str(folder)):
            read(folder)


def test_missing_paths_are_no_hub_names(tmp_path, monkeypatch):
    for folder in ("runs", "model"):
        (tmp_path / folder).mkdir()
    (tmp_path / "model/config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    for name in ("runs/polcy", "./policy", "~/policy", "/no/policy", "a/b/c", Path("policy"), "runs"):
        with pytest.raises(CheckpointError, match=str(name)):
            check_model(name)
    for name in ("gpt2", "tatsu-lab/alpaca-farm", "model", tmp_path / "model"):
        check_model(name)


def test_a_claim_is_seen_without_making_anything(tmp_path):
    refuse_claimed(tmp_path / "new")
    assert not (tmp_path / "new").exists()
    with Claim(tmp_path, "first"):
        with pytest.raises(CheckpointError, match="first"):
            refuse_claimed(tmp_path)
        content = (tmp_path / LOCK).read_text()
        with pytest.raises(CheckpointError, match="first"):
            Claim(tmp_path, "second")
        assert (tmp_path / LOCK).read_text() == content
    (tmp_path / LOCK).touch()  # left behind by a process that was killed
    refuse_claimed(tmp_path)


KIND = "AutoModelForSequenceClassification"


@pytest.fixture
def folder(tmp_path):
    return make_tiny_reward_model(tmp_path / "reward")


def edit(file: Path, **changes) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize("size", [{"num_hidden_layers": 10**6}, {"hidden_size": 10**6, "head_dim": 8}])
def test_configs_larger_than_their_weights_are_refused(folder, size):
    edit(folder / "config.json", **size)
    with pytest.raises(CheckpointError, match=f"{folder}.*1,000,000"):
        load_model(KIND, folder)


def test_weights_beyond_the_free_memory_are_refused(folder, monkeypatch):
    size = 4 * sum(weight.numel() for weight in load_file(folder / "model.safetensors").values())
    monkeypatch.setattr(pretrained, "free_host_memory", lambda: size)
    with pytest.raises(NotEnoughMemoryError, match="reward"):
        load_model(KIND, folder, dtype=torch.float32)
    load_model(KIND, folder, dtype=torch.bfloat16)


def test_uncounted_layers_are_refused(folder):
    edit(folder / "config.json", num_hidden_layers=1)
    with pytest.raises(CheckpointError, match=r"reward.*model\.layers\.1\."):
        RewardModel(folder).score(["Hi"], ["Yes"])


def test_weights_beside_the_layers_may_remain(folder):
    weights = load_file(folder / "model.safetensors")
    expected = RewardModel(folder).score(["Hi"], ["Yes"])
    names = ("lm_head.weight", "vision.layers.0.q_proj.weight", "model.layers.0.self_attn.rotary_emb.inv_freq")
    save_file(
        weights | {name: weights["score.weight"].clone() for name in names},
        folder / "model.safetensors",
        {"format": "pt"},
    )
    assert RewardModel(folder).score(["Hi"], ["Yes"]) == expected
    named = {"model.layers.0.self_attn.q_proj.bias": weights["score.weight"].clone()}
    save_file(weights | named, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"q_proj\.bias"):
        RewardModel(folder).score(["Hi"], ["Yes"])


def test_adapters_deeper_than_their_base_are_refused(folder, tmp_path):
    import peft
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(folder)
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="SEQ_CLS")
    peft.get_peft_model(model, config).save_pretrained(tmp_path / "adapter")
    for name in ("tokenizer.json", "tokenizer_config.json", "prompt_template.json"):
        (tmp_path / "adapter" / name).write_bytes((folder / name).read_bytes())
    RewardModel(tmp_path / "adapter").score(["Hi"], ["Yes"])
    weights = {
        name: value for name, value in load_file(folder / "model.safetensors").items() if ".layers.1." not in name
    }
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    edit(folder / "config.json", num_hidden_layers=1)
    with pytest.raises(CheckpointError, match=r"adapter.*layers\.1\."):
        RewardModel(tmp_path / "adapter").score(["Hi"], ["Yes"])


@pytest.mark.parametrize("pattern", [{"String": "a"}, {"Regex": ""}])
def test_exploding_normalizers_are_refused(folder, pattern):
    step = {"type": "Replace", "pattern": pattern, "content": "aa"}
    nested = {"type": "Sequence", "normalizers": [step] * 60}
    edit(folder / "tokenizer.json", normalizer={"type": "Sequence", "normalizers": [nested]})
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        load_tokenizer(folder)
    common = [{"type": "Prepend", "prepend": "_"}, {"type": "Replace", "pattern": {"String": " "}, "content": "_"}]
    common += [{"type": "NFKC"}, {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "}]
    edit(folder / "tokenizer.json", normalizer={"type": "Sequence", "normalizers": common})
    load_tokenizer(folder)
