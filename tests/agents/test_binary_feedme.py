from pathlib import Path

import pytest
import torch
from tiny_worlds import TEXTS, load_policy

from alpacafarm_env.agents.binary_feedme import BinaryFeedME, BinaryFeedMEConfig
from alpacafarm_env.agents.language_model import LanguageModel
from alpacafarm_env.agents.sft import SFT, SFTConfig
from alpacafarm_env.instructions import Demonstration, Instruction, Preference

PREFERENCES = tuple(
    Preference(Instruction(text, id=i, split="preference"), (f"yes {i}", "no!"), 1 if i % 2 else 2)
    for i, text in enumerate(TEXTS)
)
CHOSEN = ("no!", "yes 1", "no!", "yes 3", "no!")
SMALL = BinaryFeedMEConfig(epochs=2, batch_size=2, learning_rate=1e-3, save_every=2)


def test_it_is_sft_on_them(llama: LanguageModel, policy_folder: Path) -> None:
    demonstrations = [Demonstration(p.instruction, text) for p, text in zip(PREFERENCES, CHOSEN, strict=True)]
    feedme = BinaryFeedME(llama, PREFERENCES, config=SMALL, seed=4)
    config = SFTConfig(epochs=2, batch_size=2, learning_rate=1e-3, save_every=2)
    sft = SFT(load_policy(policy_folder, max_response_tokens=16), demonstrations, config=config, seed=4)
    assert feedme._data.texts == CHOSEN  # and the rejected ones nowhere
    assert list(feedme.updates()) == list(sft.updates())
    for ours, theirs in zip(feedme.policy.model.parameters(), sft.policy.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_it_learns_to_give_the_chosen_responses(language_model: LanguageModel) -> None:
    config = BinaryFeedMEConfig(epochs=60, batch_size=5, learning_rate=1e-2, act_temperature=0)
    agent = BinaryFeedME(language_model, PREFERENCES, config=config)
    agent.learn()
    assert agent.act([p.instruction for p in PREFERENCES]) == CHOSEN


def test_no_preferences_is_an_error(llama: LanguageModel) -> None:
    with pytest.raises(ValueError, match="got none"):
        BinaryFeedME(llama, [])
