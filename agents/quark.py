"""Quark: fine-tune on the best of the policy's own responses, held to the model it starts from by an exact KL.

Source: Lu et al. 2022 (arXiv:2205.13636); as simplified by AlpacaFarm (Dubois et al. 2023, arXiv:2305.14387), sec. 4
and appendix B, whose numbers are `QuarkConfig.paper()`. One step:

1. sample responses to instructions of the environment, and let it score them; they alone are the pool of the step;
2. cut the pool, sorted by score, into K quantiles;
3. epochs of minibatches of the best quantile: −log π + β · KL(π ‖ ref) a response token, the KL summed over the whole
   vocabulary.

`best_quantile_only=False` is Lu et al.'s own form: all quantiles are trained on, each behind a control token
`<reward_k>` in front of the prompt (0 is the best), and the policy samples and answers behind `<reward_0>`. The
reference reads no such token, and the KL is over the vocabulary without them.

Deviations from AlpacaFarm's released code:

1. EOS is a target. There responses are tokenized again from their text, without EOS, so no update teaches to stop;
   `train_eos=False` brings that back.
2. No pad stands between prompt and response. There responses are padded on the left, so that the first token's
   log-probability and KL are read behind a pad (measured: −5.5 nats where the truth is −9.2).
3. The loss is a sum over response tokens divided by their number. Theirs is divided by the pads, too.
4. Quantiles are over the responses of all processes. There each process takes the best of its own.
5. An epoch is one pass, in updates of at most minibatch_size responses; two epochs over the best 128 of 512 are two
   updates. There one update sees those 128 twice, which is the gradient of seeing them once.
6. No entropy bonus (the paper found that it hurts), no older responses in the pool (as the paper trains), no dropout.
7. As PPO's 5 and 6.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import torch
from gymnasium.vector import VectorEnv
from numpy.typing import NDArray
from torch import Tensor, nn

from .collecting import CollectingAgent, OnlineConfig, columns, drift, update_in_epochs
from .language_model import LanguageModel
from .loop import Resume, Sums, keyed_generator
from .losses import exact_kl, nll_loss
from .ppo import sandbox_sizes
from .prompts import conditioned, unconditioned
from .rollouts import Rollouts
from .settings import Count, NonNegative, Positive


@dataclass(frozen=True, kw_only=True)
class QuarkConfig(OnlineConfig):
    """Settings of Quark; the defaults are AlpacaFarm's for LLaMA 7B."""

    num_quantiles: Count = 4
    """K, how many parts of equal size the responses of a step are sorted into; what is left over joins the worst."""
    best_quantile_only: bool = True
    """Train on the best quantile alone, without control tokens; False: on all, each behind its own token."""
    train_eos: bool = True
    """Whether the end of a response is learned. False, AlpacaFarm's released code, is for experiments only."""
    learning_rate: Positive = 3e-6
    warmup_steps: NonNegative = 5
    kl_coef: NonNegative = 0.05
    """β, the weight of the KL against the negative log-likelihood."""

    def __post_init__(self) -> None:
        super().__post_init__()
        most = self.rollout_batch_size
        self.require(self.num_quantiles <= most, "num_quantiles", f"at most rollout_batch_size={most}")

    @classmethod
    def paper(cls) -> Self:
        """AlpacaFarm's appendix B, and its released script where that is silent (warm-up)."""
        return cls(max_response_tokens=300)

    @classmethod
    def sandbox(cls) -> Self:
        """Settings for the sandbox's small policy on two CPU cores: PPO's, with the paper's ratio of learning rates."""
        return cls(**sandbox_sizes(learning_rate=6e-5, micro_batch_tokens=2048))


def quantile_labels(scores: Tensor, num_quantiles: int) -> Tensor:
    """The quantile of each of n scores (no NaN), 0 for the best: [n] int64.

    Sorted from high to low, equal scores by position, the scores are cut into K parts of ⌊n / K⌋; the remainder joins
    the last part. Fewer scores than parts are one part each.
    """
    if scores.ndim != 1 or scores.isnan().any():
        raise ValueError(
            f"quantile_labels: expected a vector of scores without NaN, got shape {tuple(scores.shape)} with "
            f"{int(scores.isnan().sum())} NaN; leave unscored responses out first"
        )
    order = torch.argsort(scores, descending=True, stable=True)
    places = torch.arange(len(scores), device=scores.device)
    size = max(1, len(scores) // num_quantiles)
    return torch.empty_like(places).index_copy(0, order, (places // size).clamp(max=num_quantiles - 1))


@dataclass(frozen=True)
class DataPool:
    """This process's scored responses of a step, and what all processes train on."""

    read: Rollouts
    """B rows as the policy reads them, behind the control token of their quantile if there are any."""
    plain: Rollouts
    """The same rows as the reference reads them."""
    trained: NDArray[np.int64]
    """Rows to train on, of all processes and the same on all, by their numbers in the step."""
    numbers: NDArray[np.int64]
    """Those of this process's rows [B], ascending."""


def quark_sums(policy: LanguageModel, pool: DataPool, rows: Tensor, config: QuarkConfig) -> dict[str, Tensor]:
    """Sums over response tokens of some rows: "loss" = "loss/nll" + β · "loss/kl", in nats."""
    read = pool.read[rows]
    logits = policy.logits(read, temperature=config.temperature)
    ref_logits = policy.logits(pool.plain[rows], role="reference", temperature=config.temperature)
    nll = nll_loss(-nn.functional.cross_entropy(logits, read.tokens, reduction="none")).sum()
    kl = exact_kl(logits, ref_logits).sum()
    return {"loss": nll + config.kl_coef * kl, "loss/nll": nll, "loss/kl": kl}


class Quark(CollectingAgent):
    """Trains a policy on the best of its own responses. The environment is as for `PPO`, other arguments too.

    With `best_quantile_only=False` the policy gets the control tokens <reward_0> to <reward_K-1>, whose embeddings the
    seed decides too.

    Raises:
        ValueError: The environment resets by itself or its size does not divide the rollout batch; or control tokens
            are needed and the policy has others already.
    """

    label: ClassVar[str] = "Quark"
    config: QuarkConfig

    def __init__(
        self,
        env: VectorEnv[Any, Any, Any],
        policy: LanguageModel | str | Path,
        *,
        config: QuarkConfig | None = None,
        seed: int = 0,
        out: str | Path | None = None,
        resume: Resume = "auto",
    ) -> None:
        self.env, self.config = env, config or QuarkConfig()
        super().__init__(policy, self.config, seed=seed, max_act_tokens=self.config.max_response_tokens)
        self._tokens: tuple[int, ...] = ()
        if not self.config.best_quantile_only:
            names = [f"<reward_{k}>" for k in range(self.config.num_quantiles)]
            self._tokens = self.policy.add_control_tokens(names, keyed_generator(seed, "control tokens"))
        self._collect_from(env, out=out, resume=resume)

    def updates(self) -> Iterator[dict[str, float]]:
        """Train, one step at a time.

        Yields:
            What `PPO.updates` does, without the reward, value, advantage and clip metrics, kl/coef and kl/update; and
                score/best_quantile: the mean score of the best quantile;
                loss/kl: the KL that is penalised, in nats a token of the responses trained on (kl/k1 and kl/k3 are of
                all samples); averaged over the updates, as are loss and loss/nll (loss = loss/nll + β · loss/kl).
        """
        config, loop = self.config, self._loop
        for step in loop:
            rollouts, scores, numbers, metrics = self._collector.collect(loop, step)
            with loop.timed("prepare"), loop.whole():
                pool, prepared = self._prepare(step, rollouts, scores, numbers)
            means = update_in_epochs(
                loop,
                pool.read.total_lengths,
                partial(self._sums, pool),
                counts=pool.read.lengths,
                key=(step,),
                numbers=pool.numbers,
                trained=pool.trained,
                num_epochs=config.num_epochs,
                num_minibatches=math.ceil(len(pool.trained) / config.minibatch_size),
            )
            yield loop.log({**metrics, **prepared, **means})

    def _sums(self, pool: DataPool, rows: Tensor) -> dict[str, Tensor]:
        return quark_sums(self.policy, pool, rows, self.config)

    def _largest(self) -> tuple[list[int], Sums]:
        rollouts = self._collector.longest_rollouts()
        pool = DataPool(rollouts, rollouts, *(np.arange(len(rollouts)),) * 2)
        return rollouts.total_lengths.tolist(), partial(self._sums, pool)

    @torch.no_grad()
    def _prepare(
        self, step: int, rollouts: Rollouts, scores: Tensor, numbers: NDArray[np.int64]
    ) -> tuple[DataPool, dict[str, float]]:
        """The pool of a step, and metrics; ValueError if no response has a token to learn (train_eos=False)."""
        config = self.config
        plain = unconditioned(rollouts, self._tokens)
        targets = plain if config.train_eos else without_eos(plain)
        own = list(zip(numbers.tolist(), scores.tolist(), targets.lengths.tolist(), strict=True))
        table = np.array(sorted(chain.from_iterable(self._loop.processes.gather(own))))
        present, rewards = table[:, 0].astype(np.int64), torch.from_numpy(table[:, 1])
        labels = quantile_labels(rewards, config.num_quantiles)
        chosen = (table[:, 2] > 0) & ((labels.numpy() == 0) if config.best_quantile_only else True)
        if not chosen.any():
            raise ValueError(
                f"Step {step}: the responses to train on are empty, and train_eos=False leaves nothing to learn from "
                "them. Set train_eos=True."
            )
        read = targets
        if self._tokens:
            tokens = [self._tokens[label] for label in labels[np.isin(present, numbers)].tolist()]
            read = conditioned(targets, tokens, bos=self.policy.tokenizer.bos_token_id)
        pool = DataPool(read, targets, present[chosen], numbers)
        return pool, {"score/best_quantile": float(rewards[labels == 0].mean()), **self._drift(plain)}

    def _drift(self, rollouts: Rollouts) -> dict[str, float]:
        """Metrics of how far the samples are from the reference, which reads `rollouts`, and how varied they are."""
        scored = partial(self.policy.logprobs, temperature=self.config.temperature)
        ref = columns(self._loop, rollouts, partial(scored, role="reference"))
        return self._loop.processes.means(drift(self._sampled(rollouts, scored), ref, rollouts.lengths))


def without_eos(rollouts: Rollouts) -> Rollouts:
    """The rollouts without the end-of-sequence token of each response that has one; none is finished then."""
    last = rollouts.lengths.cumsum(0)[rollouts.finished] - 1
    kept = torch.ones_like(rollouts.tokens, dtype=torch.bool).index_fill(0, last, False)
    return replace(
        rollouts,
        tokens=rollouts.tokens[kept],
        logprobs=rollouts.logprobs[kept],
        lengths=rollouts.lengths - rollouts.finished.long(),
        finished=torch.zeros_like(rollouts.finished),
    )
