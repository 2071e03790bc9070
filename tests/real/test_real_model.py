"""SmolLM2-135M-Instruct as we load it and as commands train it, against plain transformers and TRL."""

import json

import numpy as np
import peft
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from alpacafarm_env.agents import DPO, DPOConfig, LanguageModel
from alpacafarm_env.instructions import Instruction, Preference
from alpacafarm_env.oracles import RewardModel

# Its padding token ends responses: another one is chosen, and that is told.
pytestmark = [pytest.mark.real, pytest.mark.filterwarnings("ignore:The tokenizer has:UserWarning")]


@pytest.fixture(scope="module")
def policy(smollm2):
    return LanguageModel.from_pretrained(smollm2)


@pytest.fixture(scope="module")
def plain(smollm2):
    return AutoModelForCausalLM.from_pretrained(smollm2), AutoTokenizer.from_pretrained(smollm2)


def prompt_ids(tokenizer, instruction):
    turns = [{"role": "user", "content": instruction}]
    return tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=True)["input_ids"]


def test_the_folder_is_as_published(plain):
    model, tokenizer = plain
    ids = {"<|endoftext|>": 0, "<|im_start|>": 1, "<|im_end|>": 2}
    assert tokenizer.convert_tokens_to_ids(list(ids)) == list(ids.values())
    assert tokenizer.eos_token_id == model.generation_config.eos_token_id == model.config.eos_token_id == 2
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    for number in ("2026", "a   12"):  # digits one by one, however many spaces come before
        assert [tokenizer.decode(i) for i in tokenizer(number)["input_ids"]][-2:] == list(number[-2:])
    assert len(tokenizer("a   12")["input_ids"]) == 4  # and the spaces are one token
    text = tokenizer.decode(prompt_ids(tokenizer, "Hi"))
    assert text.startswith("<|im_start|>system\n")
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


def test_prompts_are_those_of_the_chat_template(policy, plain, rows):
    instructions = [row["instruction"] for row in rows]
    assert policy.encode_prompts(instructions) == [prompt_ids(plain[1], text) for text in instructions]


def test_greedy_text_is_that_of_generate(policy, plain, rows):
    model, tokenizer = plain
    instructions, num = [row["instruction"] for row in rows[:4]], 32
    ours = policy.generate(instructions, generator=torch.Generator(), temperature=0, max_new_tokens=num)
    for text, instruction in zip(ours.texts, instructions, strict=True):
        ids = torch.tensor([prompt_ids(tokenizer, instruction)])
        answer = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=num, do_sample=False)
        assert text == tokenizer.decode(answer[0, ids.shape[1] :], skip_special_tokens=True)


def test_log_probabilities_are_those_of_a_plain_forward_pass(policy, plain, rows):
    (model, tokenizer), rows = plain, rows[:12]
    rollouts = policy.as_rollouts([row["instruction"] for row in rows], [row["output"] for row in rows])
    expected = []
    with torch.no_grad():
        ours = policy.logprobs(rollouts)
        for row in rows:
            prompt = prompt_ids(tokenizer, row["instruction"])
            response = [*tokenizer(row["output"], add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
            logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
            expected.append(logits.log_softmax(-1).gather(1, torch.tensor(response)[:, None])[:, 0])
    torch.testing.assert_close(ours, torch.cat(expected), atol=1e-4, rtol=0)


POLICIES = ("sft", pytest.param("dpo", marks=pytest.mark.slow), "ppo")


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


@pytest.mark.filterwarnings("default")  # of other libraries'
def test_dpo_goes_on_in_trl_as_with_us(moved, rows, tmp_path):
    trl = pytest.importorskip("trl", reason="TRL is not installed")
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    folder = moved("dpo")
    pairs = [Preference(Instruction(row["instruction"]), (row["output"], row["worse"]), 1) for row in rows[:4]]
    config = DPOConfig(batch_size=4, max_grad_norm=1e9, precision="float32")
    policy = LanguageModel.from_pretrained(folder)
    ours = next(DPO(policy, pairs, config=config).updates())
    # Text by the chat template up to the answer: in messages TRL would have it end with the template's line break too.
    prompts = [policy.tokenizer.decode(ids) for ids in policy.encode_prompts([str(pair.instruction) for pair in pairs])]
    columns = {"prompt": prompts, "chosen": [row["output"] for row in rows[:4]]}
    data = datasets.Dataset.from_dict({**columns, "rejected": [row["worse"] for row in rows[:4]]})
    step = {
        "max_steps": 2,
        "logging_steps": 1,
        "per_device_train_batch_size": 4,
        "max_grad_norm": 1e9,
        "beta": config.beta,
    }
    numbers = {"bf16": False, "use_cpu": True, "max_length": None, "learning_rate": 1e-4}
    quiet = {"report_to": "none", "save_strategy": "no", "disable_tqdm": True, "output_dir": str(tmp_path / "trl")}
    trainer = trl.DPOTrainer(str(folder), args=trl.DPOConfig(**step, **numbers, **quiet), train_dataset=data)
    trainer.train()
    first, second = trainer.state.log_history[:2]
    assert first["loss"] == pytest.approx(ours["loss"], abs=1e-5)
    assert first["grad_norm"] == pytest.approx(ours["grad_norm"], rel=1e-3)
    assert second["loss"] < first["loss"]
