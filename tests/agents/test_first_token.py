"""The first response token of every method is predicted by the prompt's last token, never by a pad.

Compared are the numbers that a method itself works with, each for the first tokens alone, with forward passes of one
prompt each, in which nothing is padded. What DPO, Quark, best-of-n and expert iteration's samples are is compared in
their own tests with rows that are read, or sampled, alone.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_worlds import ASCII, DEMONSTRATIONS, Share, load_policy, make_env, small_ppo
from torch import Tensor

from alpacafarm_env.agents import PPO, SFT, BinaryFeedME, BinaryRewardConditioning, ExpertIteration
from alpacafarm_env.agents.control_tokens import control_tokens, silence
from alpacafarm_env.agents.expert_iteration import ExpertIterationConfig
from alpacafarm_env.agents.language_model import LanguageModel
from alpacafarm_env.agents.rollouts import Rollouts, ragged_split
from alpacafarm_env.agents.sft import SFTConfig
from alpacafarm_env.instructions import Preference

PREFERENCES = tuple(Preference(d.instruction, (d.response, "no"), 1) for d in DEMONSTRATIONS)
INSTRUCTIONS = [demonstration.instruction for demonstration in DEMONSTRATIONS]


@pytest.fixture
def policy(policy_folder: Path) -> LanguageModel:
    return load_policy(policy_folder, max_response_tokens=16)


def firsts(rollouts: Rollouts) -> Rollouts:
    """The rows with one response token each."""
    assert (rollouts.lengths > 0).all()
    places = rollouts.lengths.cumsum(0) - rollouts.lengths
    columns = {"tokens": rollouts.tokens[places], "logprobs": rollouts.logprobs[places]}
    return replace(rollouts, **columns, lengths=torch.ones_like(rollouts.lengths))


@torch.no_grad()
def unpadded(policy: LanguageModel, rollouts: Rollouts) -> Tensor:
    """[B]: log-probabilities of each row's first token after its prompt, read by itself."""
    assert len(set(rollouts.prompt_lengths.tolist())) > 1  # or nothing would be padded
    prompts = ragged_split(rollouts.prompt_tokens, rollouts.prompt_lengths)
    logits = torch.cat([policy.model(input_ids=prompt[None]).logits[:, -1] for prompt in prompts])
    logprobs = silence(logits, control_tokens(policy.model)).log_softmax(-1)
    return logprobs.gather(1, firsts(rollouts).tokens[:, None])[:, 0]


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-5)


def its_fine_tuning(policy: LanguageModel) -> SFT:
    """One step of expert iteration's sampling, then training."""
    config = ExpertIterationConfig(num_samples=4, instructions_per_step=5, sample_batch_size=7, sft=SFTConfig())
    agent = ExpertIteration(policy, INSTRUCTIONS, Share(ASCII), config=config)
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
    close(agent._sums(firsts(agent._data))["loss"].detach(), -unpadded(policy, agent._data).sum())


def test_of_ppo(policy: LanguageModel) -> None:
    agent = PPO(make_env(), policy, config=small_ppo(recompute_logprobs=False))
    rollouts, scores, *_ = agent._collector.collect(1)
    expected = unpadded(policy, rollouts)
    close(firsts(rollouts).logprobs, expected)
    for recompute in (False, True):
        agent.config = small_ppo(recompute_logprobs=recompute)
        experience = agent._prepare(rollouts, scores)[0]
        close(experience.old_logprobs[:, 0], expected)
        close(policy.logprobs(firsts(experience.rollouts)).detach(), expected)
