"""SFT and DPO: what they learn, from which tokens, and where it ends."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_worlds import DEMONSTRATIONS, TEXTS, load_policy
from torch import Tensor

from alpacafarm_env.agents.dpo import DPO, DPOConfig
from alpacafarm_env.agents.language_model import LanguageModel
from alpacafarm_env.agents.rollouts import segment_sum
from alpacafarm_env.agents.sft import SFT, BinaryFeedME, BinaryFeedMEConfig, SFTConfig
from alpacafarm_env.instructions import Instruction, Preference

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


PREFERENCES = tuple(
    Preference(Instruction(text, id=i, split="preference"), (f"yes {i}" + "!" * i, "no" * (5 - i)), 1 + i % 2)
    for i, text in enumerate(TEXTS)
)
LN2 = math.log(2)
SMALL = DPOConfig(epochs=2, batch_size=2, learning_rate=1e-3, save_every=2)


def gradients(agent: DPO, total: Tensor) -> dict[str, Tensor]:
    agent.policy.model.zero_grad()
    total.backward()  # type: ignore[no-untyped-call]
    return {name: p.grad.clone() for name, p in agent._loop.parameters.items() if p.grad is not None}


def test_the_first_gradient_is_half_beta_times_the_difference_of_gradients(language_model: LanguageModel) -> None:
    """−(β/2) (∇ log π(chosen) − ∇ log π(rejected)), each response read alone, without a pad or a neighbour."""
    agent = DPO(language_model, PREFERENCES, config=DPOConfig(beta=0.3))
    actual = gradients(agent, agent._sums(torch.arange(5), torch.arange(5))["loss"])
    total = torch.zeros(())
    for preference in PREFERENCES:
        for response, sign in ((preference.chosen, 1), (preference.rejected, -1)):
            prompt = language_model.encode_prompts([preference.instruction])[0]
            tokens = language_model.encode_responses([response])[0]
            logits = language_model.model(input_ids=torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
            total = total + sign * logits.log_softmax(-1)[range(len(tokens)), tokens].sum()
    expected = gradients(agent, -0.3 / 2 * total)
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(actual[name], gradient, atol=2e-5, rtol=1e-4)
    assert max(float(gradient.abs().max()) for gradient in expected.values()) > 0.1


def test_the_reference_is_the_policy_before_training(llama: LanguageModel) -> None:
    agent = DPO(llama, PREFERENCES, config=replace(SMALL, micro_batch_tokens=128))
    data = agent._data
    assert data.texts == tuple(p.chosen for p in PREFERENCES) + tuple(p.rejected for p in PREFERENCES)
    assert bool((data.tokens[data.lengths.cumsum(0) - 1] == llama.tokenizer.eos_token_id).all())
    with torch.no_grad():
        before = segment_sum(llama.logprobs(data), data.lengths)
    kept = torch.cat([agent._ref_chosen, agent._ref_rejected])
    torch.testing.assert_close(kept, before, atol=1e-4, rtol=0)
    agent.learn()
    assert torch.equal(torch.cat([agent._ref_chosen, agent._ref_rejected]), kept)
    assert not kept.requires_grad
    assert llama.reference is None  # no second model in memory


def test_training_raises_the_chosen_over_the_rejected(language_model: LanguageModel) -> None:
    """The sign: AlpacaFarm's first release had it the wrong way round. Labels are of both kinds, see PREFERENCES."""
    agent = DPO(language_model, PREFERENCES, config=DPOConfig(epochs=6, batch_size=5, learning_rate=1e-3))
    first, *_, last = agent.updates()
    assert [first["loss"], first["margin"]] == [pytest.approx(LN2, abs=1e-5), pytest.approx(0, abs=1e-5)]
    assert last["loss"] < first["loss"] - 0.1
    assert last["accuracy"] == 1
    assert last["margin"] == pytest.approx(last["reward/chosen"] - last["reward/rejected"], abs=1e-5)
    gap = (last["logprob/chosen"] - last["logprob/rejected"]) - (first["logprob/chosen"] - first["logprob/rejected"])
    assert gap == pytest.approx(last["margin"] / agent.config.beta, abs=1e-3)
    assert gap > 2


def test_a_bandit_reaches_its_closed_form(policy_folder: Path) -> None:
    """One token, one state, preferences in the exact proportions of Bradley-Terry: π ∝ π_ref · exp(r / β).

    Five answers are compared, i beating j in odds_i of odds_i + odds_j pairs. Preferences fix the ratios among the five
    and nothing else, so it is their shares of one another that must come within 0.01 of the optimum's, and the rewards
    recovered, up to a constant, within 0.05 of the true ones.
    """
    policy = load_policy(policy_folder, max_response_tokens=1)
    letters, odds = "abcde", (1, 2, 3, 4, 6)  # odds = exp(r)
    instruction = Instruction(TEXTS[0], id=0, split="preference")
    preferences = [
        Preference(instruction, (letters[i], letters[j]), winner)
        for i in range(5)
        for j in range(i)
        for winner, share in ((1, odds[i]), (2, odds[j]))
        for _ in range(share)
    ]
    tokens = [policy.encode_responses([letter], eos=False)[0][0] for letter in letters]
    prompt = torch.tensor(policy.encode_prompts([instruction]))

    def shares() -> Tensor:
        with torch.no_grad():
            return policy.model(input_ids=prompt).logits[0, -1, tokens].softmax(-1)

    size = len(preferences)
    config = DPOConfig(beta=0.5, epochs=30, batch_size=size, learning_rate=5e-3, schedule="cosine", max_grad_norm=None)
    reference, rewards = shares(), torch.tensor(odds).log()
    optimum = (reference.log() + rewards / config.beta).softmax(-1)
    assert float((reference - optimum).abs().max()) > 0.1
    with pytest.warns(UserWarning, match="max_response_tokens=1"):  # the one token is the letter
        agent = DPO(policy, preferences, config=config)
    agent.learn()
    torch.testing.assert_close(shares(), optimum, atol=0.01, rtol=0)
    recovered = config.beta * (shares().log() - reference.log())
    torch.testing.assert_close(recovered - recovered.mean(), rewards - rewards.mean(), atol=0.05, rtol=0)


def test_smoothed_labels_keep_the_margin_finite(llama: LanguageModel) -> None:
    """Where every label is held to be wrong with probability ε, the best margin is log((1 − ε) / ε)."""
    config = DPOConfig(epochs=60, batch_size=1, learning_rate=2e-3, label_smoothing=0.25, schedule="cosine", beta=1.0)
    metrics = DPO(llama, PREFERENCES[:1], config=config).learn()
    assert metrics["margin"] == pytest.approx(math.log(3), abs=0.05)
