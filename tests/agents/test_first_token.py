"""The first response token of every method is predicted by the prompt's last token, never by a pad.

Compared are the numbers that a method itself works with (log-probabilities of the sampler, losses, what the reference
says), each for the first tokens alone, with forward passes of one prompt each, in which nothing is padded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_worlds import ASCII, DEMONSTRATIONS, TEXTS, Share, load_policy, make_env, move, small_ppo
from torch import Tensor

from alpacafarm_env.agents.best_of_n import BestOfN, BestOfNConfig
from alpacafarm_env.agents.binary_feedme import BinaryFeedME
from alpacafarm_env.agents.control_tokens import control_tokens, silence
from alpacafarm_env.agents.dpo import DPO
from alpacafarm_env.agents.expert_iteration import ExpertIteration, ExpertIterationConfig
from alpacafarm_env.agents.language_model import LanguageModel
from alpacafarm_env.agents.losses import exact_kl
from alpacafarm_env.agents.ppo import PPO
from alpacafarm_env.agents.quark import Quark, QuarkConfig, quark_sums
from alpacafarm_env.agents.reward_conditioning import BinaryRewardConditioning
from alpacafarm_env.agents.rollouts import Rollouts, ragged_split
from alpacafarm_env.agents.sft import SFT, SFTConfig
from alpacafarm_env.instructions import Preference

PREFERENCES = tuple(Preference(d.instruction, (d.response, "no"), 1) for d in DEMONSTRATIONS)
INSTRUCTIONS = [demonstration.instruction for demonstration in DEMONSTRATIONS]


@pytest.fixture
def policy(policy_folder: Path) -> LanguageModel:
    return load_policy(policy_folder, max_response_tokens=16)


def unpadded(policy: LanguageModel, rollouts: Rollouts, model: torch.nn.Module | None = None) -> Tensor:
    """[B, V]: log-probabilities of the first response token after each prompt, read by itself."""
    assert len(set(rollouts.prompt_lengths.tolist())) > 1  # or nothing would be padded
    model = model or policy.model
    prompts = ragged_split(rollouts.prompt_tokens, rollouts.prompt_lengths)
    with torch.no_grad():
        logits = torch.cat([model(input_ids=prompt[None]).logits[:, -1] for prompt in prompts])
    return silence(logits, control_tokens(policy.model)).log_softmax(-1)


def firsts(rollouts: Rollouts) -> Rollouts:
    """The rows with one response token each."""
    assert (rollouts.lengths > 0).all()
    places = rollouts.lengths.cumsum(0) - rollouts.lengths
    return replace(
        rollouts,
        tokens=rollouts.tokens[places],
        logprobs=rollouts.logprobs[places],
        lengths=torch.ones_like(rollouts.lengths),
    )


def expected_logprobs(policy: LanguageModel, rollouts: Rollouts) -> Tensor:
    """[B], of each row's first token."""
    return unpadded(policy, rollouts).gather(1, firsts(rollouts).tokens[:, None])[:, 0]


def close(found: Tensor | float, expected: Tensor | float) -> None:
    torch.testing.assert_close(torch.as_tensor(found), torch.as_tensor(expected), atol=1e-4, rtol=1e-5)


# What imitates texts -------------------------------------------------------------------------------------------------


def expert_iteration(policy: LanguageModel) -> ExpertIteration:
    """One step of sampling, then training."""
    config = ExpertIterationConfig(num_samples=4, instructions_per_step=5, sample_batch_size=7, sft=SFTConfig())
    return ExpertIteration(policy, INSTRUCTIONS, Share(ASCII), config=config)


def its_fine_tuning(policy: LanguageModel) -> SFT:
    agent = expert_iteration(policy)
    updates = agent.updates()
    next(updates), next(updates)
    assert agent._sft is not None
    return agent._sft


@pytest.mark.parametrize(
    "make",
    [
        lambda policy: SFT(policy, DEMONSTRATIONS),
        lambda policy: BinaryFeedME(policy, PREFERENCES),
        lambda policy: BinaryRewardConditioning(policy, PREFERENCES),
        its_fine_tuning,
    ],
    ids=["sft", "feedme", "conditioning", "expert iteration"],
)
def test_of_imitation(make: Callable[[LanguageModel], SFT], policy: LanguageModel) -> None:
    agent = make(policy)
    close(agent._sums(firsts(agent._data))["loss"].detach(), -expected_logprobs(policy, agent._data).sum())


def test_of_dpo_and_its_reference(policy: LanguageModel) -> None:
    class Firsts(DPO):
        def _responses(self, preferences):
            return firsts(super()._responses(preferences))

    agent = Firsts(policy, PREFERENCES)
    reference = expected_logprobs(policy, agent._data)
    move(policy, 1.2)  # taking it for its reference would show
    close(torch.cat([agent._ref_chosen, agent._ref_rejected]), reference)
    chosen, rejected = expected_logprobs(policy, agent._data).view(2, -1)
    sums = agent._sums(torch.arange(len(PREFERENCES)))
    close(sums["logprob/chosen"], chosen.sum())
    close(sums["logprob/rejected"], rejected.sum())
    assert (reference[: len(chosen)] - chosen).abs().min() > 1e-3


# What samples --------------------------------------------------------------------------------------------------------


def test_of_ppo(policy: LanguageModel) -> None:
    agent = PPO(make_env(), policy, config=small_ppo(recompute_logprobs=False))
    rollouts, scores, *_ = agent._collector.collect(1)
    expected = expected_logprobs(policy, rollouts)
    close(firsts(rollouts).logprobs, expected)
    close(agent._prepare(rollouts, scores)[0].old_logprobs[:, 0], expected)
    agent.config = small_ppo(recompute_logprobs=True)
    rescored = agent._prepare(rollouts, scores)[0]
    close(rescored.old_logprobs[:, 0], expected)
    close(policy.logprobs(firsts(rescored.rollouts)).detach(), expected)


@pytest.mark.parametrize("best_quantile_only", [True, False])
def test_of_quark_and_its_reference(policy: LanguageModel, best_quantile_only: bool) -> None:
    config = QuarkConfig(rollout_batch_size=16, minibatch_size=8, best_quantile_only=best_quantile_only)
    agent = Quark(make_env(), policy, config=config)
    move(policy, 1.2)  # taking it for its reference would show
    rollouts, scores, numbers, _ = agent._collector.collect(1)
    close(firsts(rollouts).logprobs, expected_logprobs(policy, rollouts))
    pool, _ = agent._prepare(1, rollouts, scores, numbers)
    pool = replace(pool, read=firsts(pool.read), plain=firsts(pool.plain))
    trained = pool.own(pool.trained)
    assert len(trained) == (4 if best_quantile_only else 16)
    assert not set(pool.plain.prompt_tokens.tolist()) & set(control_tokens(policy.model))
    read, plain = pool.read[trained], pool.plain[trained]
    said, reference = unpadded(policy, read), unpadded(policy, plain, policy.reference)
    close(policy.logits(plain, role="reference").log_softmax(-1), reference)
    sums = quark_sums(policy, pool, trained, config)
    close(sums["loss/nll"].detach(), -said.gather(1, read.tokens[:, None]).sum())
    close(sums["loss/kl"].detach(), exact_kl(said, reference).sum())
    assert sums["loss/kl"] > 1e-2


def sampled_by(policy: LanguageModel, run: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> Rollouts:
    """All that the policy samples meanwhile."""
    parts: list[Rollouts] = []
    generate = policy.generate

    def recorded(*args, **kwargs):
        parts.append(generate(*args, **kwargs))
        return parts[-1]

    monkeypatch.setattr(policy, "generate", recorded)
    run()
    return Rollouts.cat(parts)


@pytest.mark.parametrize("batch_size", [1, 4, 7, 100])
def test_of_best_of_n(policy: LanguageModel, batch_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts are read once for the rows of all batches: batches that begin with a prompt read before, or end with one
    that goes on, and rows of prompts of different lengths side by side."""
    config = BestOfNConfig(num_samples=5, batch_size=batch_size, max_response_tokens=3)
    agent = BestOfN(policy, Share(ASCII), config=config)
    found = sampled_by(policy, lambda: agent.sample([*TEXTS, TEXTS[0]]), monkeypatch)
    assert len(found) == 6 * 5
    close(firsts(found).logprobs, expected_logprobs(policy, found))


def test_of_best_of_n_as_expert_iteration_samples_it(policy: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    updates = expert_iteration(policy).updates()
    found = sampled_by(policy, lambda: next(updates), monkeypatch)
    assert len(found) == 4 * len(INSTRUCTIONS)
    close(firsts(found).logprobs, expected_logprobs(policy, found))
