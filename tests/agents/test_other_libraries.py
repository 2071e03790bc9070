"""Models that other libraries read and pass on: the same scores in plain transformers, the same prompt without ours."""

import pytest
import torch
from tiny_models import TEMPLATE, generator
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from alpacafarm_env import sandbox
from alpacafarm_env.agents import LanguageModel, RewardModeling, RewardModelingConfig
from alpacafarm_env.instructions import Instruction, Preference
from alpacafarm_env.oracles import RewardModel
from alpacafarm_env.templates import FILE_NAME, PromptTemplate

VAL = sandbox.SANDBOX.instructions("val")[:24]
SHIPPED = [sandbox.REWARD_MODEL, sandbox.REWARD_MODEL_CLEAN]
PAIRS = [Preference(Instruction(ask), ("Yes.", "No, it is not."), 1 + len(ask) % 2) for ask in ("Hi", "What?", "Sing")]


@pytest.fixture(scope="module")
def answers() -> list[str]:
    policy = LanguageModel.from_pretrained(sandbox.POLICY, max_response_tokens=64)
    return list(policy.generate(VAL, generator=generator()).texts)


def plain_scores(folder, encode, rows) -> list[float]:
    """Scores of another library that knows nothing of ours but the calibration in config.json."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    mean = getattr(model.config, "alpacafarm_reward_mean", 0.0)
    std = getattr(model.config, "alpacafarm_reward_std", 1.0)
    with torch.no_grad():
        return [(model(**encode(tokenizer, *row)).logits.item() - mean) / std for row in rows]


def as_text(tokenizer, prompt, answer):
    return tokenizer(prompt + answer, return_tensors="pt")


def as_messages(tokenizer, ask, answer):
    messages = [{"role": "user", "content": str(ask)}, {"role": "assistant", "content": answer}]
    return tokenizer.apply_chat_template(messages, return_tensors="pt", return_dict=True)


def resave(kind, folder, target):
    """What another library leaves of a folder: `save_pretrained` of the model and of the tokenizer."""
    kind.from_pretrained(folder).save_pretrained(target)
    AutoTokenizer.from_pretrained(folder).save_pretrained(target)
    return target


@pytest.mark.parametrize("folder", SHIPPED, ids=lambda folder: folder.name)
def test_shipped_reward_models_score_alike_in_plain_transformers(folder, answers):
    expected = pytest.approx(RewardModel(folder).score(VAL, answers).tolist(), abs=1e-5)
    template = PromptTemplate.load(folder)
    rendered = [(template.render(ask), answer) for ask, answer in zip(VAL, answers, strict=True)]
    assert plain_scores(folder, as_text, rendered) == expected
    assert plain_scores(folder, as_messages, zip(VAL, answers, strict=True)) == expected


@pytest.mark.parametrize("eos", [True, False])
def test_trained_reward_models_score_alike_in_plain_transformers(policy_folder, tmp_path, eos):
    folder = tmp_path / "reward"
    agent = RewardModeling(policy_folder, PAIRS, config=RewardModelingConfig(end_with_eos=eos, batch_size=3))
    agent.learn()
    agent.save(folder)
    asks, answers = ["Hi", "</s> or <pad>", "Why?"], ["Yes.", "", " No\n"]
    scores = agent.score(asks, answers)
    assert RewardModel(folder).score(asks, answers).tolist() == pytest.approx(scores.tolist(), abs=1e-5)
    text = [(TEMPLATE.render(asks[row]), answers[row]) for row in (0, 2)]
    assert plain_scores(folder, as_text, text) == pytest.approx(scores[[0, 2]].tolist(), abs=1e-5)
    chat = [(asks[row], answers[row]) for row in (0, 2)]
    assert plain_scores(folder, as_messages, chat) == pytest.approx(scores[[0, 2]].tolist(), abs=1e-5)
    # The other way round, from a tokenizer that does the opposite.
    again = RewardModeling(folder, PAIRS, config=RewardModelingConfig(end_with_eos=not eos))
    eos_id, rows = again.tokenizer.eos_token_id, again._encode(["Hi"], ["Yes."])
    assert rows[0].count(eos_id) == (not eos)
    assert again.tokenizer("Hi")["input_ids"].count(eos_id) == (not eos)
    assert again.tokenizer("Hi")["input_ids"][0] == again.tokenizer.bos_token_id


def test_a_reward_model_of_a_folder_without_the_end_in_its_tokenizer_scores_as_before(reward_model_folder):
    tokenizer = AutoTokenizer.from_pretrained(reward_model_folder)
    assert tokenizer("Hi")["input_ids"][-1] != tokenizer.eos_token_id
    text = [(TEMPLATE.render("Hi"), f"Yes.{tokenizer.eos_token}")]
    expected = plain_scores(reward_model_folder, as_text, text)
    assert RewardModel(reward_model_folder).score(["Hi"], ["Yes."]).tolist() == pytest.approx(expected, abs=1e-5)


def test_a_policy_with_a_tokenizer_that_ends_texts_reads_the_same(policy_folder, tmp_path):
    RewardModeling(policy_folder, PAIRS, config=RewardModelingConfig(batch_size=3)).save(tmp_path / "reward")
    policy = LanguageModel.from_pretrained(policy_folder)
    ending = LanguageModel(policy.model, AutoTokenizer.from_pretrained(tmp_path / "reward"), policy.template)
    asks, answers = ["Hi", "What is it?"], ["Yes.", ""]
    assert ending.encode_prompts(asks) == policy.encode_prompts(asks)
    assert ending.encode_responses(answers) == policy.encode_responses(answers)


def test_the_shipped_policy_without_its_template_answers_the_same(tmp_path):
    resave(AutoModelForCausalLM, sandbox.POLICY, tmp_path / "policy")
    assert not (tmp_path / "policy" / FILE_NAME).exists()
    policies = [
        LanguageModel.from_pretrained(folder, max_response_tokens=64)
        for folder in (sandbox.POLICY, tmp_path / "policy")
    ]
    ours, theirs = (policy.generate(VAL, generator=generator(1)).texts for policy in policies)
    assert theirs == ours
    assert sandbox.gold_oracle().score(VAL, theirs).mean() > 4


def test_the_shipped_reward_model_without_its_template_scores_the_same(tmp_path, answers):
    folder = resave(AutoModelForSequenceClassification, sandbox.REWARD_MODEL, tmp_path / "reward")
    assert not (folder / FILE_NAME).exists()
    expected = RewardModel(sandbox.REWARD_MODEL).score(VAL, answers).tolist()
    assert RewardModel(folder).score(VAL, answers).tolist() == pytest.approx(expected, abs=1e-5)
