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
4. Normalisation and metrics are over all processes instead of each one's share; each samples with a stream of its own.
5. The first step's learning rate is not 0; checkpoint-k holds the policy after k steps; the last step is saved.
6. A response that the environment could not score is left out of the step and counted (`score/unscored`).
"""

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import peft
import torch
from gymnasium.vector import VectorEnv
from numpy.typing import NDArray
from safetensors.torch import load_model as load_tensors
from safetensors.torch import save_model as save_tensors
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..errors import did_you_mean
from ..folders import check_model
from ..pretrained import load_model, load_tokenizer, reading
from . import losses
from .collecting import OnlineAgent, OnlineConfig
from .language_model import LanguageModel, turn_off_dropout
from .loop import Resume
from .losses import KL_ESTIMATORS, kl_estimate, masked_moments
from .rollouts import Rollouts, length_mask, pad_rows, scoring_batch, unpad


@dataclass(frozen=True, kw_only=True)
class PPOConfig(OnlineConfig):
    """Settings of PPO; the defaults are AlpacaFarm's for LLaMA 7B and simulated preferences.

    `minibatch_size` divides `rollout_batch_size`.
    """

    kl_coef: float = 0.002
    """β, reward units per nat. AlpacaFarm: 0.002 for simulated, 0.02 for human preferences."""
    kl_estimator: str = "k1"
    """Per-token KL estimate that is penalised, a key of `losses.KL_ESTIMATORS`."""
    target_kl: float | None = None
    """Adapts β towards this KL per response, in nats (Ziegler et al.: 6). None: β is fixed."""
    adaptive_kl_step: float = 0.1
    """β changes by at most 0.2 times this share in a step; only with target_kl."""
    gamma: float = 1.0
    """Discount per token."""
    lam: float = 1.0
    """λ of the generalized advantage estimate."""
    clip: float | None = 0.2
    """The probability ratio's distance from 1 beyond which the policy loss is flat. None: never."""
    value_clip: float | None = 0.2
    """How far the value may move from its old one in a step, in reward units. None: any distance."""
    value_coef: float = 0.1
    """c, the weight of the value loss."""
    whiten_rewards: bool = False
    """Divide token rewards by their standard deviation over the step."""
    missing_eos_score: float | None = None
    """The score of a response that did not end within the limit, instead of the environment's (Stiennon et al.: -1)."""
    recompute_logprobs: bool | None = None
    """Score responses again for the old log-probabilities, instead of taking the sampler's. None: unless on a CPU in
    float32, where the two agree."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.at_least(0, "value_coef", "adaptive_kl_step")
        self.above_0("clip", "value_clip", "target_kl")
        for field in ("gamma", "lam"):
            self.require(0 <= getattr(self, field) <= 1, field, "in [0, 1]")
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
            micro_batch_tokens=2048,
        )


class ValueModel(nn.Module):
    """A trunk and a linear head that starts at zero, so that before training V = 0 everywhere.

    AlpacaFarm starts the trunk from the reward model (Dubois et al. 2023, Appendix B): `from_pretrained`. It is a
    causal decoder that returns `last_hidden_state` [B, L, d]; `fill_token_id` is any id that it embeds.
    """

    def __init__(self, trunk: nn.Module, head: nn.Linear, *, fill_token_id: int) -> None:
        super().__init__()
        self.trunk = turn_off_dropout(trunk)
        self.head = head
        self._fill_token_id = fill_token_id

    @classmethod
    def from_pretrained(cls, path: str | Path, *, policy: LanguageModel, dtype: torch.dtype = torch.float32) -> Self:
        """Takes the trunk of a sequence-classification folder (a reward model); its own head is dropped.

        Raises:
            CheckpointError: The folder is missing or damaged.
            ValueError: Its tokenizer is not the policy's: the same ids would mean other words.
        """
        check_model(path)
        check_same_vocabulary(policy.tokenizer, load_tokenizer(path), str(path))
        model, _ = load_model("AutoModelForSequenceClassification", path, new={"score.weight"}, dtype=dtype)
        return cls._with_zero_head(model, policy)

    @classmethod
    def from_policy(cls, policy: LanguageModel) -> Self:
        """Takes a copy of the policy's own trunk, LoRA adapters merged in; all of it trains."""
        model: Any = copy.deepcopy(policy.model)
        if isinstance(model, peft.PeftModel):
            model = model.merge_and_unload()
        return cls._with_zero_head(model, policy)

    @classmethod
    def _with_zero_head(cls, model: PreTrainedModel, policy: LanguageModel) -> Self:
        head = nn.Linear(model.config.get_text_config().hidden_size, 1, dtype=model.dtype)
        nn.init.zeros_(head.weight)
        nn.init.zeros_(head.bias)
        trunk = model.base_model.requires_grad_(True)
        return cls(trunk, head, fill_token_id=policy.tokenizer.eos_token_id).to(policy.device)

    def values(self, rollouts: Rollouts) -> Tensor:
        """V before every response token: flat [sum T] float32.

        V_t reads the hidden state of the position that predicts token t: it knows the prompt and the tokens before t.
        """
        ids, predicts = scoring_batch(rollouts.to(self.head.weight.device), fill_token_id=self._fill_token_id)
        hidden = self.trunk(input_ids=ids, use_cache=False).last_hidden_state
        values: Tensor = self.head(hidden[predicts])[:, 0].float()
        return values


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
    """What V should have been, in reward units."""


def ppo_sums(
    policy: LanguageModel, value_model: ValueModel, experience: Experience, rows: Tensor, config: PPOConfig
) -> dict[str, Tensor]:
    """Sums over response tokens of some rows: "loss" (policy loss + c · value loss), its two parts, diagnostics."""
    rollouts = experience.rollouts[rows]
    columns = (experience.old_logprobs, experience.old_values, experience.advantages, experience.returns)
    old_logprobs, old_values, advantages, returns = (unpad(column[rows], rollouts.lengths) for column in columns)
    clip, value_clip = config.clip or math.inf, config.value_clip or math.inf
    logprobs = policy.logprobs(rollouts, temperature=config.temperature)
    values = value_model.values(rollouts)
    policy_loss = losses.ppo_policy_loss(logprobs, old_logprobs, advantages, clip=clip).sum()
    value_loss = losses.ppo_value_loss(values, old_values, returns, clip=value_clip).sum()
    return {
        "loss": policy_loss + config.value_coef * value_loss,
        "loss/policy": policy_loss,
        "loss/value": value_loss,
        "clip/policy": losses.policy_clipped(logprobs, old_logprobs, advantages, clip=clip).sum(),
        "clip/value": losses.value_clipped(values, old_values, returns, clip=value_clip).sum(),
        "kl/update": kl_estimate(old_logprobs, logprobs.detach(), "k3").sum(),
    }


class PPO(OnlineAgent):
    """Trains a policy by PPO. Environment and other arguments as of `OnlineAgent` and `PolicyAgent`.

    Args:
        value_init: Folder of the reward model whose trunk the value model starts from (AlpacaFarm); None: the policy's.

    Raises:
        ValueError: The environment resets by itself, its size does not divide the rollout batch, or no prompt fits.
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
        if value_init is None:
            self.value_model = ValueModel.from_policy(self.policy)
        else:
            self.value_model = ValueModel.from_pretrained(value_init, policy=self.policy)
        modules = {"policy": self.policy.model, "value": self.value_model}
        self._start_online(env, out=out, resume=resume, modules=modules)
        self._loop.state.setdefault("kl_coef", self.config.kl_coef)

    def updates(self) -> Iterator[dict[str, float]]:
        """Train, one PPO step at a time.

        Yields:
            step, learning_rate, grad_norm (before clipping) and, over all processes:
            score/mean, score/std: the environment's rewards; score/unscored: share of responses left out;
            reward/mean: score (or the EOS penalty) minus the KL penalty, a response;
            kl/k1, kl/k3: KL to the reference in nats a response, two unbiased estimates; kl/coef: β; kl/update: nats a
            token by which the step's updates have moved the policy, averaged over them;
            entropy: estimate in nats a token; tokens/mean: tokens a response; tokens: sampled in the step;
            finished: share that ended with EOS;
            loss, loss/policy, loss/value, clip/policy, clip/value: a token, averaged over the updates;
            value/explained_variance of the old values; advantage/std before normalisation;
            info/<key>: the mean of each float that the environment reports, such as info/gold_reward.
        """
        return super().updates()

    # Control is inverted: who drives a step is not who defines it.
    #
    #   PPO.updates() -> Loop.run(self._step)      the loop asks for each step's metrics, logs and saves
    #     PPO._step(step)
    #       Collector.collect(step)                env.reset, policy.generate, env.step
    #       PPO._prepare(...)                      rewards, advantages: an `Experience`
    #       PPO._improve(...) -> _epochs(...)      orders, minibatches, micro-batches of row numbers
    #         Loop.update(micro_batches, sums)     for each micro-batch it calls back:
    #           ppo_sums(..., rows, config)        the losses as sums; the loop divides, adds up, clips and steps

    def _step(self, step: int) -> dict[str, float]:
        rollouts, scores, numbers, collected = self._collector.collect(step)
        with self._loop.timed("prepare"):
            experience, prepared = self._prepare(rollouts, scores)
        with self._loop.timed("update"):
            improved = self._improve(step, experience, numbers)
        metrics = {**collected, **prepared, "kl/coef": self._loop.state["kl_coef"], **improved}
        if self.config.target_kl is not None:
            self._loop.state["kl_coef"] = losses.adaptive_kl_coef(
                metrics["kl/coef"],
                metrics["kl/k1"],
                target=self.config.target_kl,
                step_size=self.config.adaptive_kl_step,
            )
        return metrics

    @torch.no_grad()
    def _prepare(self, rollouts: Rollouts, scores: Tensor) -> tuple[Experience, dict[str, float]]:
        """Token rewards, advantages and returns, and metrics."""
        config, reduce = self.config, self._loop.processes.reduce
        mask = length_mask(rollouts.lengths)
        if self._recomputes():
            old_logprobs = self._columns(rollouts, lambda r: self.policy.logprobs(r, temperature=config.temperature))
        else:
            old_logprobs = pad_rows(rollouts.logprobs, rollouts.lengths)
        ref_logprobs = self._columns(
            rollouts, lambda r: self.policy.logprobs(r, role="reference", temperature=config.temperature)
        )
        values = self._columns(rollouts, self.value_model.values)
        if config.missing_eos_score is not None:
            scores = losses.missing_eos_penalty(scores, rollouts.finished, value=config.missing_eos_score)
        rewards, _ = losses.shape_rewards(
            scores, old_logprobs, ref_logprobs, mask, kl_coef=self._loop.state["kl_coef"], kind=config.kl_estimator
        )
        scaled = losses.scale_to_unit_std(rewards, mask, reduce=reduce) if config.whiten_rewards else rewards
        advantages, returns = losses.gae(scaled, values, mask, gamma=config.gamma, lam=config.lam)
        experience = Experience(rollouts, old_logprobs, values, losses.whiten(advantages, mask, reduce=reduce), returns)
        unexplained, spread = (masked_moments(x, mask, reduce=reduce)[1].item() for x in (returns - values, returns))
        metrics = self._loop.processes.means(
            {
                "reward/mean": rewards.sum(1),
                "kl/k1": kl_estimate(old_logprobs, ref_logprobs, "k1").sum(1),
                "kl/k3": kl_estimate(old_logprobs, ref_logprobs, "k3").sum(1),
                "entropy": -old_logprobs[mask],
            }
        )
        metrics["advantage/std"] = masked_moments(advantages, mask, reduce=reduce)[1].sqrt().item()
        metrics["value/explained_variance"] = 1 - unexplained / spread if spread > 0 else math.nan
        return experience, metrics

    def _improve(self, step: int, experience: Experience, numbers: NDArray[np.int64]) -> dict[str, float]:
        config = self.config
        scored = np.sort(np.concatenate(self._loop.processes.gather(numbers)))
        return self._epochs(
            experience.rollouts,
            lambda rows: ppo_sums(self.policy, self.value_model, experience, rows, config),
            key=lambda epoch: (step, epoch, 0),
            numbers=numbers,
            trained=scored,
            # Where few responses have a score, fewer minibatches: none may be empty.
            num_minibatches=min(config.rollout_batch_size // config.minibatch_size, len(scored)),
        )

    def _recomputes(self) -> bool:
        """Whether the old log-probabilities are computed by the code that computes the new ones."""
        if self.config.recompute_logprobs is not None:
            return self.config.recompute_logprobs
        exact = self.policy.model.dtype == torch.float32 and self.config.mixed_precision == "no"
        return not (exact and self.policy.device.type == "cpu")

    def _write(self, folder: Path) -> None:
        super()._write(folder)
        save_tensors(self.value_model, str(folder / "value.safetensors"))

    def _read(self, folder: Path) -> None:
        super()._read(folder)
        with reading(folder, "the value model's weights"):
            load_tensors(self.value_model, folder / "value.safetensors", device=str(self.policy.device))


def check_same_vocabulary(policy: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase, name: str) -> None:
    """Raises ValueError unless two tokenizers map the same tokens to the same ids."""
    ours, theirs = policy.get_vocab(), other.get_vocab()
    if ours == theirs:
        return
    differing = sorted(token for token in ours.keys() | theirs.keys() if ours.get(token) != theirs.get(token))
    first = differing[0]
    raise ValueError(
        f"The value model in {name} must read the policy's tokens, but {len(differing)} tokens differ: {first!r} is id "
        f"{ours.get(first)} for the policy and {theirs.get(first)} there. Use a reward model with the policy's "
        "tokenizer, or start the value model from the policy"
    )
