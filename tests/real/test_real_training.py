"""The commands of four methods on SmolLM2-135M-Instruct, by their defaults: memory, and what they save, elsewhere."""

import json

import numpy as np
import peft
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from alpacafarm_env.agents import LanguageModel
from alpacafarm_env.oracles import RewardModel

# Its padding token ends responses: another one is chosen, and that is told.
pytestmark = [pytest.mark.real, pytest.mark.filterwarnings("ignore:The tokenizer has:UserWarning")]
POLICIES = ("sft", "dpo", "ppo")


@pytest.mark.parametrize("method", [*POLICIES, "reward_modeling"])
def test_a_command_trains_within_8_gb(trained, method):
    run = trained(method)
    assert run.peak <= 8
    (file,) = run.out.rglob("metrics.jsonl")
    updates = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(updates) == (2 if method == "ppo" else 3)
    assert all(np.isfinite(value) for update in updates for value in update.values() if value is not None)


def load_plain(folder):
    """A language model as its folder's users load it, without our package; an adapter on its base in the same tree."""
    if not (folder / "adapter_config.json").is_file():
        return AutoModelForCausalLM.from_pretrained(folder)
    base = folder / json.loads((folder / "alpacafarm_base.json").read_text())["path"]
    return peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder)


@pytest.mark.parametrize("method", POLICIES)
def test_a_policy_answers_in_plain_transformers_after_a_move(moved, smollm2, rows, method):
    folder = moved(method)
    instructions = [row["instruction"] for row in rows[-2:]]
    policy = LanguageModel.from_pretrained(folder)
    ours = policy.generate(instructions, generator=torch.Generator(), temperature=0, max_new_tokens=24).texts
    model, tokenizer = load_plain(folder), AutoTokenizer.from_pretrained(folder)
    for text, instruction in zip(ours, instructions, strict=True):
        turns = [{"role": "user", "content": instruction}]
        ids = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=True, return_tensors="pt")
        answer = model.generate(**ids, max_new_tokens=24, do_sample=False)[0, ids["input_ids"].shape[1] :]
        assert text == tokenizer.decode(answer, skip_special_tokens=True)
    with torch.no_grad():  # what was trained is in it
        assert (model(**ids).logits - AutoModelForCausalLM.from_pretrained(smollm2)(**ids).logits).abs().max() > 1e-4


def test_a_reward_model_scores_in_plain_transformers_after_a_move(moved, rows):
    folder = moved("reward_modeling")
    instructions = [row["instruction"] for row in rows[-6:]] * 2
    responses = [row[name] for name in ("output", "worse") for row in rows[-6:]]
    ours = RewardModel(folder).score(instructions, responses)
    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    plain = []
    for instruction, response in zip(instructions, responses, strict=True):
        turns = [{"role": "user", "content": instruction}, {"role": "assistant", "content": response}]
        ids = tokenizer.apply_chat_template(turns, return_dict=True, return_tensors="pt")
        with torch.no_grad():
            plain.append(model(**ids).logits.item())
    np.testing.assert_allclose(ours, plain, atol=1e-5)
