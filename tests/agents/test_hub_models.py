"""Instruct models as a hub has them, used without an edit; what is saved answers and scores alike in transformers."""

import numpy as np
import pytest
import torch
from hub_models import build_hub_folder
from tiny_worlds import TEXTS, TinyDataset
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

from alpacafarm_env.oracles import RewardModel

pytestmark = pytest.mark.filterwarnings("ignore:The tokenizer has:UserWarning")
PREFERENCES = TinyDataset().preferences()
ANSWERS = ("The robin", " the wren \n", "", "No.", "What is it? [INST]")


def plain_scores(folder, asks, answers):
    """Scores as cards of reward models tell to compute them: one conversation after the other, no batch."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    scores = []
    with torch.no_grad():
        for ask, answer in zip(asks, answers, strict=True):
            messages = [{"role": "user", "content": str(ask)}, {"role": "assistant", "content": answer}]
            ids = tokenizer.apply_chat_template(messages, tokenize=True, return_tensors="pt", return_dict=True)
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
