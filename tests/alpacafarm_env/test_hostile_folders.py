"""Model folders that would take all memory or all time, or whose parts do not fit: refused before anything is built."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_reward_model import make_tiny_reward_model

from alpacafarm_env import pretrained
from alpacafarm_env.errors import CheckpointError, NotEnoughMemoryError
from alpacafarm_env.oracles import RewardModel
from alpacafarm_env.pretrained import load_model, load_tokenizer

KIND = "AutoModelForSequenceClassification"


@pytest.fixture
def folder(tmp_path):
    return make_tiny_reward_model(tmp_path / "reward")


def edit(file: Path, **changes) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize("size", [{"num_hidden_layers": 10**6}, {"hidden_size": 10**6, "head_dim": 8}])
def test_a_config_of_more_than_the_weights_can_be_is_refused(folder, size):
    edit(folder / "config.json", **size)
    with pytest.raises(CheckpointError, match=f"{folder}.*1,000,000"):
        load_model(KIND, folder)


def test_weights_beyond_the_free_memory_are_refused(folder, monkeypatch):
    size = 4 * sum(weight.numel() for weight in load_file(folder / "model.safetensors").values())
    monkeypatch.setattr(pretrained, "free_host_memory", lambda: size)
    with pytest.raises(NotEnoughMemoryError, match="reward"):
        load_model(KIND, folder, dtype=torch.float32)
    load_model(KIND, folder, dtype=torch.bfloat16)


def test_layers_that_the_config_does_not_count_are_refused(folder):
    edit(folder / "config.json", num_hidden_layers=1)
    with pytest.raises(CheckpointError, match=r"reward.*model\.layers\.1\."):
        RewardModel(folder).score(["Hi"], ["Yes"])


def test_what_stands_beside_the_layers_may_be_left_over(folder):
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


def test_an_adapter_of_more_layers_than_its_base_is_refused(folder, tmp_path):
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
def test_a_normalizer_that_explodes_is_refused_and_others_are_not(folder, pattern):
    step = {"type": "Replace", "pattern": pattern, "content": "aa"}
    nested = {"type": "Sequence", "normalizers": [step] * 60}
    edit(folder / "tokenizer.json", normalizer={"type": "Sequence", "normalizers": [nested]})
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        load_tokenizer(folder)
    common = [{"type": "Prepend", "prepend": "_"}, {"type": "Replace", "pattern": {"String": " "}, "content": "_"}]
    common += [{"type": "NFKC"}, {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "}]
    edit(folder / "tokenizer.json", normalizer={"type": "Sequence", "normalizers": common})
    load_tokenizer(folder)
