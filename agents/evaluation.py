"""A policy in evaluation: its responses with common random numbers, and how far it is from the reference.

The two estimators of KL(policy || reference) of whole responses, in nats: `sequence_kl` is the column `kl` of tables,
`exact_response_kl` the column `kl_exact`.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..oracles.reward_model import tokens_at_once
from .language_model import LanguageModel
from .loop import keyed_generator
from .losses import exact_kl
from .rollouts import Rollouts, micro_batches, segment_sum


def answer(
    policy: LanguageModel,
    instructions: Sequence[str],
    *,
    seed: int,
    split: str,
    temperature: float,
    batch_size: int | None = None,
    rows: slice = slice(None),
) -> Rollouts:
    """Samples one response to each instruction of `rows`, with the policy's own length limit.

    The random numbers are keyed on (seed, split) and not on the step: every evaluation of a seed sees the same draws
    (common random numbers), so that differences between steps are due to the policy. They are drawn for all
    instructions, so that a response does not depend on `rows`. At most `batch_size` are sampled at once.
    """
    width = policy.max_response_tokens
    uniforms = torch.rand(len(instructions), width, generator=keyed_generator(seed, "evaluation", split))
    return policy.generate(instructions[rows], generator=uniforms[rows], temperature=temperature, batch_size=batch_size)


@torch.no_grad()
def sequence_kl(
    policy: LanguageModel, rollouts: Rollouts, temperature: float, *, max_tokens: int | None = None
) -> Tensor:
    """[B] log p(response) - log p_ref(response) in nats, both at the temperature the responses were sampled at.

    Of a sharded run within `PPO.whole`, like the other one.

    The k1 estimator: its mean is an unbiased estimate of KL(policy || reference), at that temperature alone.
    Source: Schulman 2020, "Approximating KL divergence".
    """
    kl = torch.zeros(len(rollouts))
    for rows in _parts(rollouts, max_tokens or tokens_at_once(policy.device)):
        part = rollouts[rows]
        ours = part.logprobs if policy.samples_exactly else policy.logprobs(part, temperature=temperature)
        difference = ours - policy.logprobs(part, role="reference", temperature=temperature)
        kl[rows] = segment_sum(difference, part.lengths).cpu()
    return kl


@torch.no_grad()
def exact_response_kl(
    policy: LanguageModel, rollouts: Rollouts, temperature: float, *, max_tokens: int | None = None
) -> NDArray[np.float64]:
    """[B] sum over a response's tokens of KL(policy || reference) at that place, over the whole vocabulary; nats, >= 0.

    Its mean over responses sampled from the policy is an unbiased estimate of the KL of the two distributions over
    responses (chain rule), with less variance than log p - log p_ref of the sampled tokens. Both at the temperature
    the responses were sampled at.
    """
    kl = torch.zeros(len(rollouts), dtype=torch.float64)
    # Of a large vocabulary few: several tables of it are alive at once.
    few = 2**28 // policy.model.config.get_text_config().vocab_size
    for rows in _parts(rollouts, max_tokens or min(8192, few, tokens_at_once(policy.device))):
        part = rollouts[rows]
        ours, theirs = (policy.logits(part, role=role, temperature=temperature) for role in ("policy", "reference"))
        kl[rows] = segment_sum(exact_kl(ours, theirs), part.lengths).double().cpu()
    nats: NDArray[np.float64] = kl.numpy()
    return nats


def _parts(rollouts: Rollouts, max_tokens: int) -> list[Tensor]:
    longest = int(rollouts.total_lengths.max()) if len(rollouts) else 0
    return micro_batches(rollouts.total_lengths, max(max_tokens, longest))
