"""A policy answers instructions, by random numbers that are the same at every evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ...agents import PPO, LanguageModel, Rollouts


def answer(
    agent: PPO,
    instructions: Sequence[str],
    *,
    seed: int,
    split: str,
    temperature: float,
    rows: slice = slice(None),
) -> Rollouts:
    """Samples one response to each instruction of `rows`, with the length limit of training.

    The random numbers are keyed on (seed, split) and not on the step: every evaluation of a seed sees the same draws
    (common random numbers), so that differences between steps are due to the policy. They are drawn for all
    instructions, so that a response does not depend on `rows`.
    """
    import torch

    from ...agents.loop import keyed_generator

    limit = agent.config.max_response_tokens or agent.policy.max_response_tokens
    uniforms = torch.rand(len(instructions), limit, generator=keyed_generator(seed, "evaluation", split))
    return agent.policy.generate(
        instructions[rows], generator=uniforms[rows], temperature=temperature, max_new_tokens=limit
    )


def sequence_kl(policy: LanguageModel, rollouts: Rollouts, temperature: float, *, max_tokens: int = 16384) -> Any:
    """[B] log p(response) - log p_ref(response) in nats, both at the temperature the responses were sampled at.

    The k1 estimator: its mean is an unbiased estimate of KL(policy || reference) of the two distributions that are
    compared, those the evaluated responses come from. (At another temperature than the samples' it would be biased.)
    Source: Schulman 2020, "Approximating KL divergence".
    """
    import torch

    from ...agents.rollouts import micro_batches, segment_sum

    kl = torch.zeros(len(rollouts))
    with torch.no_grad():
        for rows in micro_batches(rollouts.total_lengths, max_tokens):
            part = rollouts[rows]
            difference = part.logprobs - policy.logprobs(part, role="reference", temperature=temperature)
            kl[rows] = segment_sum(difference, part.lengths).cpu()
    return kl
