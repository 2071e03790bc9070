"""Instruct models as a hub has them, used without an edit; what is saved answers and scores alike in transformers."""

import numpy as np
import pytest
import torch
from chat_tokenizers import FAMILIES
from hub_models import build_hub_folder
from tiny_worlds import DEMONSTRATIONS, TEXTS, TinyDataset, make_env, small_ppo
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    pipeline,
)

from alpacafarm_env.agents import PPO, SFT, LanguageModel, RewardModeling, RewardModelingConfig
from alpacafarm_env.agents.sft import SFTConfig
from alpacafarm_env.oracles import RewardModel

pytestmark = pytest.mark.filterwarnings("ignore:The tokenizer has:UserWarning")
PREFERENCES = TinyDataset().preferences()
ANSWERS = ("The robin", " the wren \n", "", "No.", "What is it? [INST]")


def messages(ask, *answer):
    return [{"role": "user", "content": ask}, *({"role": "assistant", "content": text} for text in answer)]


def resave(kind, folder, target):
    """What TRL's `save_model` leaves of a folder: `save_pretrained` of the model and of the tokenizer."""
    kind.from_pretrained(folder).save_pretrained(target)
    AutoTokenizer.from_pretrained(folder).save_pretrained(target)
    return target


def pipeline_answers(folder, asks, width):
    """Greedy answers of plain transformers, of which some versions begin with a space that others leave out."""
    answer = pipeline("text-generation", model=str(folder))
    options = {"do_sample": False, "max_new_tokens": width, "return_full_text": False}
    return [answer(messages(ask), **options)[0]["generated_text"].lstrip(" ") for ask in asks]


def pipeline_scores(folder, asks, answers):
    """Scores of plain transformers, which tokenizes the conversation it has rendered as any other text."""
    score = pipeline("text-classification", model=str(folder), function_to_apply="none")
    tokenizer = score.tokenizer
    rendered = [
        tokenizer.apply_chat_template(messages(*pair), tokenize=False) for pair in zip(asks, answers, strict=True)
    ]
    whole = [
        tokenizer.apply_chat_template(messages(*pair), return_dict=False) for pair in zip(asks, answers, strict=True)
    ]
    assert [tokenizer(text)["input_ids"] for text in rendered] == whole  # one BOS, not two
    return [score(text)[0]["score"] for text in rendered]


def train(folder, out):
    """A policy and a reward model of an instruct model, as a user makes them."""
    sft = SFT(
        LanguageModel.from_pretrained(folder, max_response_tokens=12), DEMONSTRATIONS, config=SFTConfig(batch_size=5)
    )
    sft.learn()
    sft.save(out / "sft")
    reward = RewardModeling(out / "sft", PREFERENCES, config=RewardModelingConfig(batch_size=5, learning_rate=1e-3))
    reward.learn()
    reward.save(out / "reward")
    policy = LanguageModel.from_pretrained(out / "sft", max_response_tokens=12)
    env = make_env(oracle=RewardModel(out / "reward"))
    ppo = PPO(env, policy, value_init=out / "reward", config=small_ppo(total_steps=1))
    ppo.learn()
    ppo.save(out / "ppo")
    return ppo, reward


@pytest.mark.parametrize("family", FAMILIES)
def test_an_instruct_folder_is_trained_and_answers_and_scores_alike_in_transformers(family, tmp_path):
    ppo, reward = train(build_hub_folder(family, tmp_path / "hub"), tmp_path)
    greedy = ppo.policy.generate(TEXTS, generator=torch.Generator(), temperature=0)
    assert len(set(greedy.texts)) > 1
    for folder in (tmp_path / "ppo", resave(AutoModelForCausalLM, tmp_path / "ppo", tmp_path / "other policy")):
        assert pipeline_answers(folder, TEXTS, 12) == [text.lstrip(" ") for text in greedy.texts]
        again = LanguageModel.from_pretrained(folder)
        assert again.encode_prompts(TEXTS) == ppo.policy.encode_prompts(TEXTS)
        assert again.eos_token_ids == ppo.policy.eos_token_ids
    scores = pytest.approx(reward.score(TEXTS, ANSWERS).tolist(), abs=1e-5)
    other = resave(AutoModelForSequenceClassification, tmp_path / "reward", tmp_path / "other reward")
    for folder in (tmp_path / "reward", other):
        assert pipeline_scores(folder, TEXTS, ANSWERS) == scores
        assert RewardModel(folder).score(TEXTS, ANSWERS).tolist() == scores


def plain_scores(folder, asks, answers):
    """Scores as cards of reward models tell to compute them: one conversation after the other, no batch."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    scores = []
    with torch.no_grad():
        for pair in zip(asks, answers, strict=True):
            ids = tokenizer.apply_chat_template(messages(*pair), tokenize=True, return_tensors="pt", return_dict=True)
            scores.append(model(**ids).logits[0][0].item())
    return scores


@pytest.mark.parametrize(
    ("family", "pad"), [("qwen", "<|endoftext|>"), ("llama-3", None), ("llama-3", "<|eot_id|>"), ("mistral", "</s>")]
)
def test_a_reward_model_of_a_hub_scores_as_its_card_computes_it(family, pad, tmp_path):
    """Without a padding token, with one, and with one that hides the conversation's last token."""
    folder = build_hub_folder(family, tmp_path / "reward", reward=True)
    tokenizer, config = AutoTokenizer.from_pretrained(folder), AutoConfig.from_pretrained(folder)
    config.pad_token_id = tokenizer.convert_tokens_to_ids(pad) if pad else None
    config.save_pretrained(folder)
    expected = plain_scores(folder, TEXTS, ANSWERS)
    assert np.std(expected) > 0.1
    assert RewardModel(folder).score(TEXTS, ANSWERS).tolist() == pytest.approx(expected, abs=1e-5)
