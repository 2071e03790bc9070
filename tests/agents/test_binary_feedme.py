from __future__ import annotations

from dataclasses import replace
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


def test_it_trains_on_the_chosen_texts_only(llama: LanguageModel) -> None:
    agent = BinaryFeedME(llama, PREFERENCES)
    assert agent._data.texts == CHOSEN
    assert agent._data.instructions == TEXTS
    assert agent._data.tokens.tolist() == [token for row in llama.encode_responses(CHOSEN) for token in row]


def test_it_is_sft_on_them(llama: LanguageModel, policy_folder: Path) -> None:
    demonstrations = [Demonstration(p.instruction, text) for p, text in zip(PREFERENCES, CHOSEN, strict=True)]
    feedme = BinaryFeedME(llama, PREFERENCES, config=SMALL, seed=4)
    config = SFTConfig(epochs=2, batch_size=2, learning_rate=1e-3, save_every=2)
    sft = SFT(load_policy(policy_folder, max_response_tokens=16), demonstrations, config=config, seed=4)
    assert list(feedme.updates()) == list(sft.updates())
    for ours, theirs in zip(feedme.policy.model.parameters(), sft.policy.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_the_rejected_texts_change_nothing(llama: LanguageModel, policy_folder: Path) -> None:
    def without_rejected(p: Preference) -> Preference:
        responses = (p.chosen, "other") if p.preference == 1 else ("other", p.chosen)
        return replace(p, responses=responses)

    first = BinaryFeedME(llama, PREFERENCES, config=SMALL).learn()
    policy = load_policy(policy_folder, max_response_tokens=16)
    assert BinaryFeedME(policy, [without_rejected(p) for p in PREFERENCES], config=SMALL).learn() == first


def test_it_learns_to_give_the_chosen_responses(language_model: LanguageModel) -> None:
    config = BinaryFeedMEConfig(epochs=60, batch_size=5, learning_rate=1e-2, act_temperature=0)
    agent = BinaryFeedME(language_model, PREFERENCES, config=config)
    agent.learn()
    assert agent.act([p.instruction for p in PREFERENCES]) == CHOSEN


def test_no_preferences_is_an_error(llama: LanguageModel) -> None:
    with pytest.raises(ValueError, match="BinaryFeedME needs at least one preference, got none"):
        BinaryFeedME(llama, [])


def test_presets() -> None:
    paper, sft = BinaryFeedMEConfig.paper(), SFTConfig.paper()
    assert isinstance(paper, BinaryFeedMEConfig)
    assert (paper.epochs, paper.batch_size, paper.learning_rate) == (sft.epochs, sft.batch_size, sft.learning_rate)
    assert isinstance(BinaryFeedMEConfig.sandbox(), BinaryFeedMEConfig)
