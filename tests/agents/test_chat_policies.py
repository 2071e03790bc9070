"""Policies and reward models whose tokenizer brings a chat template: what they read, what ends a response, what is
saved, and that no prompt is guessed."""

import pytest
import torch
from chat_tokenizers import FAMILIES, build_chat_tokenizer
from tiny_models import TEMPLATE, build_llama, generator
from transformers import AutoModelForSequenceClassification, LlamaForSequenceClassification

from alpacafarm_env.agents import RewardModeling, RewardModelingConfig
from alpacafarm_env.agents.language_model import LanguageModel
from alpacafarm_env.agents.rollouts import ragged_split
from alpacafarm_env.chat_templates import ChatTemplate
from alpacafarm_env.envs.token import TokenEnv
from alpacafarm_env.errors import DataError
from alpacafarm_env.instructions import Instruction, Preference
from alpacafarm_env.oracles import RewardModel, make_oracle
from alpacafarm_env.templates import ALPACA, FILE_NAME

ENDS = {"chatml": ["<|im_end|>", "<|endoftext|>"], "llama-3": ["<|eot_id|>", "<|end_of_text|>"], "llama-2": ["</s>"]}
"""What ends a response; first what ends a turn."""
ASKS = ("List two birds.", "What is it?", "Sing")


@pytest.fixture(params=FAMILIES)
def family(request) -> str:
    return request.param


@pytest.fixture
def folder(family, tmp_path):
    """A policy as another library saves it: model, generation config and tokenizer."""
    tokenizer = build_chat_tokenizer(family)
    tokenizer.pad_token = tokenizer.pad_token or "<unk>"
    model = build_llama(len(tokenizer))
    listed = ENDS[family][0] if len(ENDS[family]) == 1 else sorted(ENDS[family], reverse=True)
    model.generation_config.eos_token_id = tokenizer.convert_tokens_to_ids(listed)
    model.save_pretrained(tmp_path / "policy")
    tokenizer.save_pretrained(tmp_path / "policy")
    return tmp_path / "policy"


def scores_of(folder, rows) -> list[float]:
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    with torch.no_grad():
        return [model(torch.tensor([row])).logits.item() for row in rows]


def library_ids(tokenizer, ask, *answer, **options) -> list[int]:
    messages = [{"role": "user", "content": str(ask)}, *({"role": "assistant", "content": text} for text in answer)]
    return tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False, **options)


def test_a_policy_reads_the_librarys_prompts_and_scores_what_it_samples(folder):
    policy = LanguageModel.from_pretrained(folder, max_response_tokens=24)
    expected = [library_ids(policy.tokenizer, ask, add_generation_prompt=True) for ask in ASKS]
    assert policy.encode_prompts(ASKS) == expected
    samples = policy.generate(ASKS, generator=generator(), num_samples=8)
    assert [row.tolist() for row in ragged_split(samples.prompt_tokens, samples.prompt_lengths)][::8] == expected
    torch.testing.assert_close(policy.logprobs(samples), samples.logprobs, atol=1e-4, rtol=0)


def test_every_listed_end_ends_a_response_and_the_turns_end_is_trained(folder, family):
    policy = LanguageModel.from_pretrained(folder, max_response_tokens=60)
    ids = policy.tokenizer.convert_tokens_to_ids(ENDS[family])
    assert list(policy.eos_token_ids) == ids
    assert [row[-1] for row in policy.encode_responses(["The robin", "sings"])] == [ids[0]] * 2
    samples = policy.generate(ASKS, generator=generator(), num_samples=64)
    rows = [row.tolist() for row in ragged_split(samples.tokens, samples.lengths)]
    finished = samples.finished.tolist()
    assert {row[-1] for row, ended in zip(rows, finished, strict=True) if ended} == set(ids)
    assert not any(token in ids for row in rows for token in row[:-1])


def test_a_saved_policy_keeps_its_chat_template(folder, tmp_path):
    policy = LanguageModel.from_pretrained(folder)
    ALPACA.save(tmp_path / "again")  # of another model that was there
    policy.save(tmp_path / "again")
    again = LanguageModel.from_pretrained(tmp_path / "again")
    assert isinstance(again.template, ChatTemplate)
    assert again.encode_prompts(ASKS) == policy.encode_prompts(ASKS)
    named = LanguageModel.from_pretrained(folder, template="alpaca")
    named.save(tmp_path / "named")
    (tmp_path / "named" / FILE_NAME).unlink()  # as another library would leave it
    unnamed = LanguageModel.from_pretrained(tmp_path / "named")
    assert unnamed.encode_prompts(ASKS) == named.encode_prompts(ASKS) != policy.encode_prompts(ASKS)


def test_a_reward_model_reads_the_librarys_conversation(folder, tmp_path):
    pairs = [Preference(Instruction(ask), ("The robin", "the wren sings"), 1 + i % 2) for i, ask in enumerate(ASKS)]
    agent = RewardModeling(folder, pairs, config=RewardModelingConfig(batch_size=3))
    agent.learn()
    agent.save(tmp_path / "reward")
    asks, answers = [*ASKS, Instruction("Sum up.", "It sings.")], ["The robin", " the wren ", "No", "What?"]
    rows = [library_ids(agent.tokenizer, x, y) for x, y in zip(asks, answers, strict=True)]
    expected = pytest.approx(scores_of(tmp_path / "reward", rows), abs=1e-5)
    assert agent.score(asks, answers).tolist() == expected
    assert RewardModel(tmp_path / "reward").score(asks, answers).tolist() == expected


def test_the_token_environment_speaks_the_chat_template(folder, family):
    env = TokenEnv(tokenizer=folder, oracle="constant", max_response_tokens=4)
    observation, _ = env.reset(options={"instruction_id": env.instructions[0].id})
    length = int(observation["attention_mask"].sum())
    asked = library_ids(env.tokenizer, env.instructions[0], add_generation_prompt=True)
    assert observation["input_ids"][:length].tolist() == asked
    _, _, terminated, _, _ = env.step(env.tokenizer.convert_tokens_to_ids(ENDS[family][0]))
    assert terminated


def test_nothing_is_guessed_where_there_is_no_template(tokenizer, tmp_path):
    policy, reward = tmp_path / "policy", tmp_path / "reward"
    config = build_llama(len(tokenizer)).config
    config.num_labels = 1
    for folder, model in ((policy, build_llama(len(tokenizer))), (reward, LlamaForSequenceClassification(config))):
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    data = [Preference(Instruction("Hi"), ("a", "b"), 1)]
    for load in (
        lambda **named: LanguageModel.from_pretrained(policy, **named).template,
        lambda **named: RewardModeling(policy, data, **named).template,
        lambda **named: RewardModel(reward, **named)._template,
        lambda **named: TokenEnv(tokenizer=policy, **named).template,
        lambda **named: make_oracle({"reward_model": str(reward), **named}, dataset=None)._template,
    ):
        with pytest.raises(DataError, match="template="):
            load()
        assert load(template="alpaca") == ALPACA
        assert load(template=TEMPLATE) == TEMPLATE
