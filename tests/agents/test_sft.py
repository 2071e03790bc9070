from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_worlds import DEMONSTRATIONS, load_policy

from alpacafarm_env.agents.language_model import LanguageModel
from alpacafarm_env.agents.sft import SFT, BinaryFeedME, BinaryFeedMEConfig, SFTConfig
from alpacafarm_env.instructions import Preference

OVERFIT = SFTConfig(epochs=60, batch_size=4, learning_rate=1e-2, act_temperature=0)


def test_it_overfits_four_examples_on_both_architectures(language_model: LanguageModel) -> None:
    sft = SFT(language_model, DEMONSTRATIONS[:4], config=OVERFIT)
    metrics = sft.learn()
    assert metrics["step"] == 60
    assert metrics["loss"] < 0.02
    assert sft.act([d.instruction for d in DEMONSTRATIONS[:4]]) == tuple(d.response for d in DEMONSTRATIONS[:4])


def test_only_response_tokens_and_eos_are_learned(llama: LanguageModel) -> None:
    """The loss is the cross-entropy of exactly the tokens after the prompt, computed here by a plain forward pass."""
    sft = SFT(llama, DEMONSTRATIONS[:1])
    prompt = llama.encode_prompts([DEMONSTRATIONS[0].instruction])[0]
    response = [*llama.encode_responses([DEMONSTRATIONS[0].response], eos=False)[0], llama.tokenizer.eos_token_id]
    with torch.no_grad():
        logits = llama.model(input_ids=torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
    expected = torch.nn.functional.cross_entropy(logits, torch.tensor(response))
    assert sft._data.tokens.tolist() == response
    assert sft.evaluate(DEMONSTRATIONS[:1]) == pytest.approx(float(expected), abs=1e-5)


def test_the_mean_is_over_tokens_not_over_examples(llama: LanguageModel) -> None:
    sft = SFT(llama, DEMONSTRATIONS)
    lengths = sft._data.lengths.tolist()
    each = [sft.evaluate([demonstration]) for demonstration in DEMONSTRATIONS]
    weighted = sum(loss * length for loss, length in zip(each, lengths, strict=True)) / sum(lengths)
    assert len(set(lengths)) > 1
    assert sft.evaluate(DEMONSTRATIONS) == pytest.approx(weighted, abs=1e-5)


def test_steps_are_epochs_of_batches_and_the_last_may_be_small(llama: LanguageModel) -> None:
    updates = list(SFT(llama, DEMONSTRATIONS, config=SFTConfig(epochs=2, batch_size=2)).updates())
    assert [metrics["step"] for metrics in updates] == [1, 2, 3, 4, 5, 6]


def test_responses_that_are_too_long_are_counted(policy_folder: Path) -> None:
    policy = load_policy(policy_folder, max_response_tokens=9)  # "answer 0" and EOS
    with pytest.warns(UserWarning, match="4 of 5 .*max_response_tokens=9") as warned:
        SFT(policy, DEMONSTRATIONS)
    assert warned[0].filename == __file__  # where the user made it


def test_binary_feedme_is_sft_on_the_chosen_responses(llama: LanguageModel, policy_folder: Path) -> None:
    preferences = [
        Preference(d.instruction, (d.response, "no!")[:: 1 if i % 2 else -1], 1 + (i + 1) % 2)
        for i, d in enumerate(DEMONSTRATIONS)
    ]
    settings: dict[str, Any] = {"epochs": 2, "batch_size": 2, "learning_rate": 1e-3}
    feedme = BinaryFeedME(llama, preferences, config=BinaryFeedMEConfig(**settings), seed=4)
    sft = SFT(load_policy(policy_folder, max_response_tokens=16), DEMONSTRATIONS, config=SFTConfig(**settings), seed=4)
    assert list(feedme.updates()) == list(sft.updates())
    for ours, theirs in zip(feedme.policy.model.parameters(), sft.policy.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
