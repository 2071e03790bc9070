"""SmolLM2-135M-Instruct as we load it, against plain transformers."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from alpacafarm_env.agents import LanguageModel

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
