"""Proximal policy optimization (PPO) from a reward, with a KL penalty towards the model it starts from.

Source: Schulman et al. 2017 (arXiv:1707.06347); as used for language models by Ziegler et al. 2019 (arXiv:1909.08593)
and AlpacaFarm (Dubois et al. 2023, arXiv:2305.14387), appendix B, whose numbers are `PPOConfig.paper()`. One step:

1. sample responses to instructions of the environment, and let it score them;
2. token rewards: −β (log π − log π_ref), plus the score at the last token;
3. advantages and returns by GAE; advantages normalised once over all real tokens of the step, on all processes;
4. epochs of minibatches: clipped policy loss + c · clipped value loss, one optimizer update each.

Deviations from AlpacaFarm's released code:

1. The KL is estimated by log π − log π_ref (k1). The released code clamps each token's at 0
   (`kl_estimator="clamped_k1"`), which is no KL, and too large.
2. Padding counts nowhere: not in advantages, losses, metrics or denominators. Theirs counts up to 300 slots a response.
3. Whitened rewards are only scaled (`whiten_rewards`): without pads, a shifted mean would reward or punish length.
4. Normalisation and metrics are over all processes instead of each one's share; draws do not depend on their number.
5. The first step's learning rate is not 0; checkpoint-k holds the policy after k steps; the last step is saved.
6. A response that the environment could not score is left out of the step and counted (`score/unscored`).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import torch
from gymnasium.vector import VectorEnv
from torch import Tensor

from ..errors import did_you_mean
from . import losses
from .adapters import has_lora
from .collecting import CollectingAgent, OnlineConfig, columns, drift, update_in_epochs
from .language_model import LanguageModel
from .loop import Resume, Sums
from .losses import KL_ESTIMATORS, kl_estimate, masked_moments
from .rollouts import Rollouts, length_mask, pad_rows, unpad
from .settings import NonNegative, Positive, UnitInterval
from .value_model import Kind, ValueModel, make_value_model


@dataclass(frozen=True, kw_only=True)
class PPOConfig(OnlineConfig):
    """Settings of PPO; the defaults are AlpacaFarm's for LLaMA 7B and simulated preferences.

    `minibatch_size` divides `rollout_batch_size`.
    """

    kl_coef: NonNegative = 0.002
    """β, reward units per nat. AlpacaFarm: 0.002 for simulated, 0.02 for human preferences."""
    kl_estimator: str = "k1"
    """Per-token KL estimate that is penalised, a key of `losses.KL_ESTIMATORS`."""
    target_kl: Positive | None = None
    """Adapts β towards this KL per response, in nats (Ziegler et al.: 6). None: β is fixed."""
    adaptive_kl_step: NonNegative = 0.1
    """β changes by at most 0.2 times this share in a step; only with target_kl."""
    gamma: UnitInterval = 1.0
    """Discount per token."""
    lam: UnitInterval = 1.0
    """λ of the generalized advantage estimate."""
    clip: Positive | None = 0.2
    """The probability ratio's distance from 1 beyond which the policy loss is flat. None: never."""
    value_clip: Positive | None = 0.2
    """How far the value may move from its old one in a step, in reward units. None: any distance."""
    value_coef: NonNegative = 0.1
    """c, the weight of the value loss."""
    whiten_rewards: bool = False
    """Divide token rewards by their standard deviation over the step."""
    missing_eos_score: float | None = None
    """The score of a response that did not end within the limit, instead of the environment's (Stiennon et al.: -1)."""
    value: Kind | None = None
    """The reader of the value: "model", a trunk of its own; "adapter", one of its own on a LoRA policy's trunk.
    None: "adapter" with LoRA, else "model". See `value_model`."""
    recompute_logprobs: bool | None = None
    """Score responses again for the old log-probabilities, instead of taking the sampler's. None: unless on a CPU in
    float32, where the two agree; always with a served sampler."""

    def __post_init__(self) -> None:
        super().__post_init__()
        divides = self.rollout_batch_size % self.minibatch_size == 0
        self.require(divides, "minibatch_size", f"a divisor of rollout_batch_size={self.rollout_batch_size}")
        if self.kl_estimator not in KL_ESTIMATORS:
            raise did_you_mean("KL estimator", self.kl_estimator, KL_ESTIMATORS)

    @classmethod
    def paper(cls, *, kl_coef: float = 0.002, kl_estimator: str = "k1") -> Self:
        """AlpacaFarm's appendix B, and its released script where that is silent (warm-up, reward whitening).

        Args:
            kl_coef: 0.002 for simulated preferences (the released script: 0.0067), 0.02 for human ones.
            kl_estimator: "clamped_k1" is what the released code penalises.
        """
        return cls(
            kl_coef=kl_coef, kl_estimator=kl_estimator, max_response_tokens=300, warmup_steps=5, whiten_rewards=True
        )

    @classmethod
    def sandbox(cls) -> Self:
        """Settings for the sandbox's small policy on two CPU cores."""
        return cls(
            total_steps=30,
            rollout_batch_size=256,
            minibatch_size=128,
            learning_rate=2e-4,
            kl_coef=0.05,
            max_response_tokens=64,
            precision="float32",
            micro_batch_tokens=1024,
        )


def sandbox_sizes(**changes: Any) -> dict[str, Any]:
    """Settings that other methods have in common with PPO in the sandbox, and `changes`."""
    names = ("total_steps", "rollout_batch_size", "minibatch_size", "num_epochs", "learning_rate")
    own = (*names, "max_response_tokens", "precision", "micro_batch_tokens")
    return {**{name: getattr(PPOConfig.sandbox(), name) for name in own}, **changes}


@dataclass(frozen=True)
class Experience:
    """Scored responses and all that the losses need; columns are [B, T], 0 beyond a row's length."""

    rollouts: Rollouts
    """B rows."""
    old_logprobs: Tensor
    """log π when sampled."""
    old_values: Tensor
    """V when sampled."""
    advantages: Tensor
    """Normalised over the whole step."""
    returns: Tensor
    """The targets of V, in reward units."""


def ppo_sums(
    policy: LanguageModel, value_model: ValueModel, experience: Experience, rows: Tensor, config: PPOConfig
) -> Iterator[dict[str, Tensor]]:
    """Sums over response tokens of some rows: first the policy's, then the value's ("loss": c times its loss).

    The policy's activations can so be freed before there are any of the value.
    """
    rollouts, clip, value_clip = experience.rollouts[rows], config.clip or math.inf, config.value_clip or math.inf
    stored = (experience.old_logprobs, experience.old_values, experience.advantages, experience.returns)
    old_logprobs, old_values, advantages, returns = (unpad(column[rows], rollouts.lengths) for column in stored)
    logprobs = policy.logprobs(rollouts, temperature=config.temperature)
    policy_loss = losses.ppo_policy_loss(logprobs, old_logprobs, advantages, clip=clip).sum()
    yield {
        "loss": policy_loss,
        "loss/policy": policy_loss,
        "clip/policy": losses.policy_clipped(logprobs, old_logprobs, advantages, clip=clip).sum(),
        "kl/update": kl_estimate(old_logprobs, logprobs.detach(), "k3").sum(),
    }
    del logprobs, policy_loss
    values = value_model.values(rollouts)
    value_loss = losses.ppo_value_loss(values, old_values, returns, clip=value_clip).sum()
    yield {
        "loss": config.value_coef * value_loss,
        "loss/value": value_loss,
        "clip/value": losses.value_clipped(values, old_values, returns, clip=value_clip).sum(),
    }


class PPO(CollectingAgent):
    """Trains a policy by PPO. The environment is that of a `Collector`; other arguments as of `PolicyAgent`.

    Args:
        value_init: Reward model that the value starts from (AlpacaFarm): its trunk, or with `value="adapter"` its LoRA
            adapter over the policy's base. None: the policy's trunk.

    Raises:
        ValueError: The environment resets by itself, its size does not divide the rollout batch, no prompt fits, or the
            policy has no LoRA adapter beside which that of the value could stand.
    """

    label: ClassVar[str] = "PPO"
    config: PPOConfig

    def __init__(
        self,
        env: VectorEnv[Any, Any, Any],
        policy: LanguageModel | str | Path,
        *,
        value_init: str | Path | None = None,
        config: PPOConfig | None = None,
        seed: int = 0,
        out: str | Path | None = None,
        resume: Resume = "auto",
    ) -> None:
        self.env, self.config = env, config or PPOConfig()
        super().__init__(policy, self.config, seed=seed, max_act_tokens=self.config.max_response_tokens)
        if self.policy.sampler is not None and self.config.recompute_logprobs is False:
            raise ValueError("A server's log-probabilities are not the policy's own: do recompute_logprobs")
        kind = self.config.value or ("adapter" if has_lora(self.policy.model) else "model")
        self.config = replace(self.config, value=kind)
        self.value_model = make_value_model(self.policy, kind, init=value_init, seed=seed)
        modules = {"policy": self.policy.model, "value": self.value_model}
        self._collect_from(env, modules=modules, out=out, resume=resume)
        self._loop.state.setdefault("kl_coef", self.config.kl_coef)

    def updates(self) -> Iterator[dict[str, float]]:
        """Train, one PPO step at a time.

        A step yields its metrics, over all processes. They are of the responses that it sampled at `temperature`, so of
        the policy before its updates; `act` answers with the policy after them:

        - `step`, `learning_rate`, `grad_norm` (before clipping);
        - `score/mean`, `score/std`: the environment's rewards; `score/unscored`: share of responses left out;
        - `reward/mean`: score (or the EOS penalty) minus the KL penalty, a response;
        - `kl/k1`, `kl/k3`: KL to the reference in nats a response, two unbiased estimates; `kl/coef`: β; `kl/update`:
          nats a token by which the step's updates have moved the policy, averaged over them;
        - `entropy`: estimate in nats a token; `tokens/mean`: tokens a response; `tokens`: sampled in the step;
        - `finished`: share that ended with EOS;
        - `loss`, `loss/policy`, `loss/value`, `clip/policy`, `clip/value`: a token, averaged over the updates;
        - `value/explained_variance` of the old values; `advantage/std` before normalisation;
        - `info/<key>`: the mean of each float that the environment reports, such as `info/gold_reward`.
        """
        config, loop = self.config, self._loop
        for step in loop:
            rollouts, scores, numbers, metrics = self._collector.collect(loop, step)
            with loop.timed("prepare"), loop.whole():
                experience, prepared = self._prepare(rollouts, scores)
            scored = np.sort(np.concatenate(loop.processes.gather(numbers)))
            means = update_in_epochs(
                loop,
                rollouts.total_lengths,
                partial(self._sums, experience),
                counts=rollouts.lengths,
                key=(step, 0),
                numbers=numbers,
                trained=scored,
                num_epochs=config.num_epochs,
                # Where few responses have a score, fewer minibatches: none may be empty.
                num_minibatches=min(config.rollout_batch_size // config.minibatch_size, len(scored)),
            )
            metrics |= {**prepared, "kl/coef": loop.state["kl_coef"], **means}
            if config.target_kl is not None:
                loop.state["kl_coef"] = losses.adaptive_kl_coef(
                    metrics["kl/coef"], metrics["kl/k1"], target=config.target_kl, step_size=config.adaptive_kl_step
                )
            yield loop.log(metrics)

    def _sums(self, experience: Experience, rows: Tensor) -> Iterator[dict[str, Tensor]]:
        return ppo_sums(self.policy, self.value_model, experience, rows, self.config)

    def _largest(self) -> tuple[list[int], Sums]:
        rollouts = self._collector.longest_rollouts()
        column = torch.zeros(length_mask(rollouts.lengths).shape, device=rollouts.lengths.device)
        experience = Experience(rollouts, column, column, column, column)
        return rollouts.total_lengths.tolist(), partial(self._sums, experience)

    @torch.no_grad()
    def _prepare(self, rollouts: Rollouts, scores: Tensor) -> tuple[Experience, dict[str, float]]:
        """Token rewards, advantages and returns, and metrics."""
        config, reduce = self.config, self._loop.processes.reduce
        mask, logprobs = length_mask(rollouts.lengths), partial(self.policy.logprobs, temperature=config.temperature)
        if self._recomputes():
            old_logprobs = columns(self._loop, rollouts, logprobs)
        else:
            old_logprobs = pad_rows(rollouts.logprobs, rollouts.lengths)
        ref_logprobs = columns(self._loop, rollouts, partial(logprobs, role="reference"))
        values = columns(self._loop, rollouts, self.value_model.values)
        if config.missing_eos_score is not None:
            scores = losses.missing_eos_penalty(scores, rollouts.finished, value=config.missing_eos_score)
        rewards, _ = losses.shape_rewards(
            scores, old_logprobs, ref_logprobs, mask, kl_coef=self._loop.state["kl_coef"], kind=config.kl_estimator
        )
        scaled = losses.scale_to_unit_std(rewards, mask, reduce=reduce) if config.whiten_rewards else rewards
        advantages, returns = losses.gae(scaled, values, mask, gamma=config.gamma, lam=config.lam)
        experience = Experience(rollouts, old_logprobs, values, losses.whiten(advantages, mask, reduce=reduce), returns)
        unexplained, spread = (masked_moments(x, mask, reduce=reduce)[1].item() for x in (returns - values, returns))
        moved = drift(old_logprobs, ref_logprobs, rollouts.lengths)
        metrics = self._loop.processes.means({"reward/mean": rewards.sum(1), **moved})
        metrics["advantage/std"] = masked_moments(advantages, mask, reduce=reduce)[1].sqrt().item()
        metrics["value/explained_variance"] = 1 - unexplained / spread if spread > 0 else math.nan
        return experience, metrics

    def _recomputes(self) -> bool:
        """Whether the old log-probabilities are computed by the code that computes the new ones."""
        if self.policy.sampler is not None:
            return True
        if self.config.recompute_logprobs is not None:
            return self.config.recompute_logprobs
        exact = self.policy.model.dtype == torch.float32 and self._loop.config.precision == "float32"
        return not (exact and self.policy.device.type == "cpu")

    def _write(self, folder: Path) -> None:
        super()._write(folder)
        self.value_model.save_weights(folder / "value.safetensors")

    def _read(self, folder: Path) -> None:
        super()._read(folder)
        self.value_model.load_weights(folder / "value.safetensors")
