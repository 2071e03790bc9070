"""Policy gradients from groups of responses: GRPO, Dr. GRPO, DAPO, GSPO, RLOO and REINFORCE++ as settings of one agent.

There is no value model: what a response is worth is its reward beside those of other responses to the same instruction.
One step:

1. sample a group of responses to each instruction of the environment (its `num_generations`), and let it score them;
2. advantages: rewards less a baseline, divided by a scale;
3. epochs of minibatches of the clipped policy loss, in the ratio of a token's or a whole response's probability.

| method | advantage | ratio of | the loss is a mean over | source |
|---|---|---|---|---|
| GRPO | (r - mean) / sd of the group | a token | responses, of their tokens' means | 2402.03300 |
| Dr. GRPO | r - mean | a token | responses, of tokens' sums over the longest length | 2503.20783 |
| DAPO | GRPO's; groups of equal rewards are left out | a token, clipped less above 1 | tokens | 2503.14476 |
| GSPO | GRPO's | a response: the mean over its tokens | responses | 2507.18071 |
| RLOO | r - mean of the others, KL in r | a response | responses | 2402.14740 |
| REINFORCE++ | return to go with KL, whitened over the step | a token | tokens | 2501.03262 |

Deviations from their papers and usual code (TRL 1.16, verl):

1. Statistics of a step, and the loss's denominators, are over all processes.
2. A response that the environment could not score is left out, and its group is the smaller; one that is left alone
   teaches nothing where there is a group's baseline.
3. DAPO: where groups are left out the step is the smaller; the paper samples on until it is full. Its penalty of
   overlong responses is a wrapper's task here.
4. The KL to the reference is estimated in every step, for the metrics, also where `kl_coef` is 0.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import numpy as np
import torch
from gymnasium.vector import VectorEnv
from numpy.typing import NDArray
from torch import Tensor

from ..errors import did_you_mean
from .collecting import CollectingAgent, OnlineConfig, columns, drift, update_in_epochs
from .language_model import LanguageModel
from .loop import Resume, Sums
from .losses import (
    KL_ESTIMATORS,
    Reduce,
    equal_groups,
    kl_estimate,
    masked_moments,
    ppo_policy_loss,
    returns_to_go,
    shape_rewards,
    unbiased,
    zero_outside,
)
from .ppo import sandbox_sizes
from .rollouts import Groups, Rollouts, fullest, length_mask, segment_sum, unpad
from .settings import Count, NonNegative, Positive
from .shared_prompts import shares_prompts


@dataclass(frozen=True, kw_only=True)
class GroupPolicyConfig(OnlineConfig):
    """Settings of all six methods; each has a class of its own whose defaults are its paper's."""

    num_generations: Count = 8
    """G, responses to one instruction; a divisor of the environments' number."""
    baseline: Literal["group", "others", "none"] = "group"
    """What is taken off a reward: the mean of its group, of the others of its group, or nothing."""
    scale: Literal["group", "step", "none"] = "group"
    """What it is divided by: the standard deviation of its group or of all rewards of the step."""
    scale_eps: Positive = 1e-4
    """Added to that standard deviation (TRL; verl: 1e-6)."""
    to_go: bool = False
    """Whether a token's advantage is its return to go with the KL penalty, whitened over all tokens of the step."""
    ratio: Literal["token", "response_mean", "response"] = "token"
    """Of what probabilities the ratio to the sampler's is: a token's; a response's, to the power of one over its
    length; a response's."""
    clip: Positive | None = 0.2
    """How far below 1 the ratio counts, and above it without `clip_high`. None: however far."""
    clip_high: Positive | None = None
    """How far above 1 the ratio counts."""
    dual_clip: Positive | None = None
    """Most that the loss may be in units of a negative advantage's size (verl: 3). None: any."""
    loss_mean: Literal["response", "token", "longest"] = "response"
    """What the loss is a mean over: responses, of their tokens' means; tokens; or responses, of their tokens' sums
    divided by the most tokens that a response may have."""
    kl_coef: NonNegative = 0.0
    """β, the weight of the KL to the reference: in units of the loss or of the reward a nat."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Where the KL is penalised."""
    kl_estimator: str = "k3"
    """Its estimate of a token, a key of `losses.KL_ESTIMATORS`."""
    leave_out_equal: bool = False
    """Leave out groups whose rewards are all equal: they teach nothing, and weaken the mean."""
    learning_rate: Positive = 1e-6
    num_epochs: Count = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        divides = self.rollout_batch_size % self.minibatch_size == 0
        self.require(divides, "minibatch_size", f"a divisor of rollout_batch_size={self.rollout_batch_size}")
        whole = self.rollout_batch_size % self.num_generations == 0
        self.require(whole, "num_generations", f"a divisor of rollout_batch_size={self.rollout_batch_size}")
        grouped = self.num_generations > 1 or (self.baseline == "none" and self.scale != "group")
        self.require(grouped, "num_generations", "2 or more, as the baseline or the scale is a group's")
        self.require(not self.to_go or self.kl_in == "reward", "kl_in", "'reward' with to_go")
        if self.kl_estimator not in KL_ESTIMATORS:
            raise did_you_mean("KL estimator", self.kl_estimator, KL_ESTIMATORS)

    @classmethod
    def sandbox(cls, **changes: Any) -> Self:
        """Settings for the sandbox's small policy on two CPU cores: sizes and learning rate are PPO's."""
        return cls(**sandbox_sizes(**{"num_generations": 8, "kl_coef": 0.05, **changes}))


@dataclass(frozen=True, kw_only=True)
class GRPOConfig(GroupPolicyConfig):
    """Settings of GRPO; the defaults are those of Shao et al. 2024 (arXiv:2402.03300), sec. 4.2, for 7B."""

    num_generations: Count = 64
    rollout_batch_size: Count = 1024
    minibatch_size: Count = 1024
    kl_coef: NonNegative = 0.04


@dataclass(frozen=True, kw_only=True)
class DrGRPOConfig(GroupPolicyConfig):
    """Settings of Dr. GRPO: no standard deviation, no length in the denominator (Liu et al. 2025, arXiv:2503.20783)."""

    scale: Literal["group", "step", "none"] = "none"
    loss_mean: Literal["response", "token", "longest"] = "longest"
    rollout_batch_size: Count = 1024
    minibatch_size: Count = 128


@dataclass(frozen=True, kw_only=True)
class DAPOConfig(GroupPolicyConfig):
    """Settings of DAPO (Yu et al. 2025, arXiv:2503.14476, sec. 4.1)."""

    num_generations: Count = 16
    rollout_batch_size: Count = 8192
    minibatch_size: Count = 512
    clip_high: Positive | None = 0.28
    loss_mean: Literal["response", "token", "longest"] = "token"
    leave_out_equal: bool = True
    warmup_steps: NonNegative = 20
    weight_decay: float = 0.1


@dataclass(frozen=True, kw_only=True)
class GSPOConfig(GroupPolicyConfig):
    """Settings of GSPO (Zheng et al. 2025, arXiv:2507.18071, sec. 5.1); where it is silent, GRPO's."""

    num_generations: Count = 64
    rollout_batch_size: Count = 1024
    minibatch_size: Count = 256
    ratio: Literal["token", "response_mean", "response"] = "response_mean"
    clip: Positive | None = 3e-4
    clip_high: Positive | None = 4e-4

    @classmethod
    def sandbox(cls, **changes: Any) -> Self:
        """Clipped a hundred times wider: the rate is two hundred times the paper's, and most responses were clipped."""
        return super().sandbox(**{"clip": 0.03, "clip_high": 0.04, **changes})


@dataclass(frozen=True, kw_only=True)
class RLOOConfig(GroupPolicyConfig):
    """Settings of RLOO: REINFORCE with the others of a group as baseline (Ahmadian et al. 2024, arXiv:2402.14740)."""

    num_generations: Count = 4
    baseline: Literal["group", "others", "none"] = "others"
    scale: Literal["group", "step", "none"] = "none"
    ratio: Literal["token", "response_mean", "response"] = "response"
    kl_coef: NonNegative = 0.03
    kl_in: Literal["loss", "reward"] = "reward"
    kl_estimator: str = "k1"


@dataclass(frozen=True, kw_only=True)
class ReinforcePPConfig(GroupPolicyConfig):
    """Settings of REINFORCE++, PPO without a value (Hu 2025, arXiv:2501.03262)."""

    num_generations: Count = 1
    baseline: Literal["group", "others", "none"] = "none"
    scale: Literal["group", "step", "none"] = "none"
    to_go: bool = True
    loss_mean: Literal["response", "token", "longest"] = "token"
    rollout_batch_size: Count = 256
    minibatch_size: Count = 128
    learning_rate: Positive = 5e-7
    kl_coef: NonNegative = 0.01
    kl_in: Literal["loss", "reward"] = "reward"
    kl_estimator: str = "k1"

    @classmethod
    def sandbox(cls, **changes: Any) -> Self:
        """With one response to an instruction."""
        return super().sandbox(**{"num_generations": 1, **changes})


def group_advantages(
    rewards: Tensor, groups: Tensor, config: GroupPolicyConfig, *, reduce: Reduce | None = None
) -> Tensor:
    """Advantages [B] of rewards [B]; `groups` [B] says which group each is of, by any numbers.

    Standard deviations are unbiased. A group of one has advantage 0 by a group's baseline.
    """
    place, count = torch.unique(groups, return_inverse=True, return_counts=True)[1:]
    size: Tensor = count[place].to(rewards.dtype)

    def summed(values: Tensor) -> Tensor:
        totals: Tensor = values.new_zeros(len(count)).index_add(0, place, values)[place]
        return totals

    centred = rewards - summed(rewards) / size
    advantages = rewards if config.baseline == "none" else centred
    if config.baseline == "others":
        advantages = centred * size / (size - 1).clamp(min=1)
    if config.scale == "group":
        return advantages / ((summed(centred.square()) / (size - 1).clamp(min=1)).sqrt() + config.scale_eps)
    if config.scale == "step":
        deviation = unbiased(rewards, torch.ones_like(rewards, dtype=torch.bool), reduce)[1]
        return advantages / (deviation + config.scale_eps)
    return advantages


def group_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, lengths: Tensor, config: GroupPolicyConfig
) -> tuple[Tensor, Tensor]:
    """The clipped policy loss of each token [sum T], and where the clip decides; `lengths` [B] are the responses'."""
    log_ratio = logprobs - old_logprobs
    if config.ratio != "token":
        whole = segment_sum(log_ratio, lengths)
        whole = whole / lengths.clamp(min=1) if config.ratio == "response_mean" else whole
        log_ratio = whole.repeat_interleave(lengths)
    clip, even = config.clip or math.inf, torch.zeros_like(log_ratio)
    loss = ppo_policy_loss(log_ratio, even, advantages, clip=clip, clip_high=config.clip_high)
    if config.dual_clip is not None:
        loss = torch.where(advantages < 0, torch.minimum(loss, -advantages * config.dual_clip), loss)
    return loss, (loss != -advantages * log_ratio.exp()).detach()


def token_weights(lengths: Tensor, config: GroupPolicyConfig, longest: int, dtype: torch.dtype) -> Tensor:
    """What each token [sum T] counts in a mean over tokens or, else, responses."""
    each = {"token": torch.ones_like(lengths), "response": lengths, "longest": torch.full_like(lengths, longest)}
    return (1 / each[config.loss_mean].clamp(min=1).to(dtype)).repeat_interleave(lengths)


def group_sums(
    logprobs: Tensor,
    old_logprobs: Tensor,
    ref_logprobs: Tensor,
    advantages: Tensor,
    lengths: Tensor,
    config: GroupPolicyConfig,
    *,
    longest: int,
) -> dict[str, Tensor]:
    """Sums over the tokens [sum T] of responses of `lengths` [B], to be divided by the tokens or the responses.

    "loss" = "loss/policy" + β · "loss/kl" where the KL is penalised in the loss; `longest` is the most tokens that a
    response may have.
    """
    policy_loss, clipped = group_loss(logprobs, old_logprobs, advantages, lengths, config)
    kl = kl_estimate(logprobs, ref_logprobs, config.kl_estimator)
    weights = token_weights(lengths, config, longest, logprobs.dtype)
    means = {
        "loss/policy": policy_loss,
        "loss/kl": kl,
        "clip/policy": clipped,
        "kl/update": kl_estimate(old_logprobs, logprobs.detach(), "k3"),
    }
    sums = {name: (weights * values).sum() for name, values in means.items()}
    penalty = config.kl_coef * sums["loss/kl"] if config.kl_in == "loss" and config.kl_coef else 0.0
    return {"loss": sums["loss/policy"] + penalty, **sums}


Experience = tuple[Rollouts, Tensor, Tensor, Tensor]
"""Scored responses of a step, and by their tokens [B, T] the old and the reference's log-probabilities, advantages."""


class GroupPolicy(CollectingAgent):
    """Trains a policy by the method whose settings it is given. The environment is as for `PPO`, other arguments too.

    Raises:
        ValueError: The environment resets by itself, its size does not divide the rollout batch, or a group's size does
            not divide the environment's; or no prompt fits.
    """

    label: ClassVar[str] = "Group policy gradient"
    config: GroupPolicyConfig

    def __init__(
        self,
        env: VectorEnv[Any, Any, Any],
        policy: LanguageModel | str | Path,
        *,
        config: GroupPolicyConfig | None = None,
        seed: int = 0,
        out: str | Path | None = None,
        resume: Resume = "auto",
    ) -> None:
        self.env, self.config = env, config or GRPOConfig()
        super().__init__(policy, self.config, seed=seed, max_act_tokens=self.config.max_response_tokens)
        group = self.config.num_generations
        self._shares = group > 1 and shares_prompts(self.policy.model)
        self._logprobs = partial(self.policy.logprobs, temperature=self.config.temperature, share_prompts=self._shares)
        self._collect_from(env, num_generations=group, out=out, resume=resume)

    def updates(self) -> Iterator[dict[str, float]]:
        """Train, one step at a time.

        Yields:
            What `PPO.updates` does, without the value's metrics; and
                loss/kl: the KL penalised in the loss, in nats a token; groups/equal: share of the responses whose
                group has equal rewards. Means over tokens are as `loss_mean` has them.
        """
        config, loop = self.config, self._loop
        for step in loop:
            rollouts, scores, numbers, metrics = self._collector.collect(loop, step)
            groups = Groups(torch.from_numpy(numbers // config.num_generations), rollouts.prompt_lengths.cpu())
            with loop.timed("prepare"), loop.whole():
                experience, equal, prepared = self._prepare(rollouts, scores, groups)
            kept = numbers[~equal] if config.leave_out_equal else numbers
            trained = np.sort(np.fromiter(chain.from_iterable(loop.processes.gather(kept.tolist())), np.int64))
            if not len(trained):  # nothing to learn, and nothing is learned: all advantages are 0
                trained = np.sort(np.concatenate(loop.processes.gather(numbers)))
            means = update_in_epochs(
                loop,
                rollouts.total_lengths,
                partial(self._sums, experience),
                counts=rollouts.lengths if config.loss_mean == "token" else None,
                key=(step, 0),
                numbers=numbers,
                trained=trained,
                num_epochs=config.num_epochs,
                num_minibatches=min(config.rollout_batch_size // config.minibatch_size, len(trained)),
                group_size=config.num_generations,
                groups=groups if self._shares else None,
            )
            yield loop.log({**metrics, **prepared, "kl/coef": config.kl_coef, **means})

    def _sums(self, experience: Experience, rows: Tensor) -> dict[str, Tensor]:
        rollouts = experience[0][rows]
        old, ref, advantages = (unpad(column[rows], rollouts.lengths) for column in experience[1:])
        given = self._logprobs(rollouts), old, ref, advantages, rollouts.lengths, self.config
        return group_sums(*given, longest=self._collector.width)

    def _largest(self) -> tuple[list[int], Sums]:
        rollouts = self._collector.longest_rollouts()
        column = torch.zeros(length_mask(rollouts.lengths).shape, device=rollouts.lengths.device)
        sums = partial(self._sums, (rollouts, column, column, column))
        return rollouts.total_lengths.tolist(), (lambda rows: sums(fullest(rollouts, rows))) if self._shares else sums

    @torch.no_grad()
    def _prepare(
        self, rollouts: Rollouts, scores: Tensor, groups: Groups
    ) -> tuple[Experience, NDArray[np.bool_], dict[str, float]]:
        """What the loss needs, which rows are of a group of equal rewards, and metrics."""
        config, reduce = self.config, self._loop.processes.reduce
        mask, shared = length_mask(rollouts.lengths), groups if self._shares else None
        old = self._sampled(rollouts, self._logprobs, shared)
        ref = columns(self._loop, rollouts, partial(self._logprobs, role="reference"), shared)
        penalty = config.kl_coef if config.kl_in == "reward" else 0.0
        rewards, _ = shape_rewards(scores, old, ref, mask, kl_coef=penalty, kind=config.kl_estimator)
        place = groups.numbers.to(scores.device)
        if config.to_go:
            advantages = returns_to_go(rewards, mask, reduce=reduce)
        else:
            whole = rewards.double().sum(1) if penalty else scores
            own = group_advantages(whole, place, config, reduce=reduce)
            advantages = zero_outside(own[:, None].expand(mask.shape), mask).to(old.dtype)
        equal = equal_groups(scores, place).cpu().numpy() & (config.num_generations > 1)
        told = {"reward/mean": rewards.sum(1), "groups/equal": torch.from_numpy(equal.astype(np.float64))}
        metrics = self._loop.processes.means({**told, **drift(old, ref, rollouts.lengths)})
        metrics["advantage/std"] = masked_moments(advantages, mask, reduce=reduce)[1].sqrt().item()
        return (rollouts, old, ref, advantages), equal, metrics
