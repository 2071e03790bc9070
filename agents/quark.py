"""Quark: fine-tune on the best of the policy's own responses, held to the model it starts from by an exact KL.

Source: Lu et al. 2022 (arXiv:2205.13636); as simplified by AlpacaFarm (Dubois et al. 2023, arXiv:2305.14387), sec. 4
and appendix B, whose numbers are `QuarkConfig.paper()`. One step:

1. sample responses to instructions of the environment, and let it score them; they alone are the pool of the step;
2. cut the pool, sorted by score, into K quantiles;
3. epochs of minibatches of the best quantile: −log π + β · KL(π ‖ ref) a response token, the KL summed over the whole
   vocabulary.

`best_quantile_only=False` is Lu et al.'s own form: all quantiles are trained on, each behind a control token
<reward_k> in front of the prompt (0 is the best), and the policy samples and answers behind <reward_0>. The reference
is the model without these tokens: it reads none, and the KL is over the vocabulary without them.

Deviations from AlpacaFarm's released code:

1. EOS is a target. There responses are tokenized again from their text, without EOS, so that no update teaches to stop.
   `train_eos=False` brings that back, for experiments.
2. No pad stands between prompt and response. There responses are padded on the left, so that the first token's
   log-probability and KL are read behind a pad (measured: −5.5 nats where the truth is −9.2).
3. The loss is a sum over response tokens divided by their number. Theirs is divided by the pads, too.
4. Quantiles are over the responses of all processes. There each process takes the best of its own.
5. An epoch is one pass, in updates of at most minibatch_size responses; two epochs over the best 128 of 512 are two
   updates. There one update sees those 128 twice, which is the gradient of seeing them once.
6. No entropy bonus (the paper found that it hurts), no older responses in the pool (as the paper trains), dropout off.
7. As PPO: the first step's learning rate is not 0, checkpoint-k holds the policy after k steps, the last step is saved,
   and a response that the environment could not score is left out and counted (`score/unscored`).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import torch
from gymnasium.vector import VectorEnv
from numpy.typing import NDArray
from torch import Tensor, nn

from ..seeding import keyed_rng
from .collecting import DRAWS, Collector, describe, places
from .conditioning import add_control_tokens
from .control_tokens import conditioned, unconditioned
from .fitting import unreadable
from .language_model import LanguageModel
from .loop import Resume
from .losses import exact_kl, kl_estimate, nll_loss
from .policy_agent import PolicyAgent, PolicyConfig
from .rollouts import Rollouts, micro_batches, ragged_split, segment_sum


@dataclass(frozen=True, kw_only=True)
class QuarkConfig(PolicyConfig):
    """Settings of Quark; the defaults are AlpacaFarm's for LLaMA 7B."""

    total_steps: int = 390
    """Steps (AlpacaFarm: 10 passes over 20k instructions)."""
    rollout_batch_size: int = 512
    """Responses in a step, all processes together; a multiple of the environments' number."""
    minibatch_size: int = 256
    """Most responses in an update, all processes together."""
    num_epochs: int = 2
    """Passes over the responses that a step trains on."""
    num_quantiles: int = 4
    """K, how many parts of equal size the responses of a step are sorted into; what is left over joins the worst."""
    best_quantile_only: bool = True
    """Train on the best quantile alone, without control tokens; False: on all, each behind its own token."""
    train_eos: bool = True
    """Whether the end of a response is learned. False, AlpacaFarm's released code, is for experiments only."""
    temperature: float = 1.0
    """Of sampling, and of every log-probability."""
    max_response_tokens: int | None = None
    """Longest response; None: the policy's own limit (AlpacaFarm: 300)."""
    learning_rate: float = 3e-6
    """Peak learning rate of AdamW."""
    warmup_steps: float = 5
    """Steps of linear warm-up; below 1, a share of all steps."""
    adam_eps: float = 1e-5
    """AdamW's epsilon, added after the bias correction."""
    kl_coef: float = 0.05
    """β, the weight of the KL against the negative log-likelihood."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for field in ("total_steps", "rollout_batch_size", "minibatch_size", "num_epochs", "num_quantiles"):
            self.require(getattr(self, field) >= 1, field, "1 or more")
        most = self.rollout_batch_size
        self.require(self.num_quantiles <= most, "num_quantiles", f"at most rollout_batch_size={most}")
        self.require(self.kl_coef >= 0, "kl_coef", "0 or more")
        self.require(self.temperature > 0, "temperature", "above 0")
        limit = self.max_response_tokens
        self.require(limit is None or limit >= 1, "max_response_tokens", "1 or more, or None")
        for field in ("best_quantile_only", "train_eos"):
            self.require(isinstance(getattr(self, field), bool), field, "True or False")

    @classmethod
    def paper(cls) -> Self:
        """AlpacaFarm's appendix B, and its released script where that is silent (warm-up)."""
        return cls(max_response_tokens=300)

    @classmethod
    def sandbox(cls) -> Self:
        """Settings for the sandbox's small policy on two CPU cores: PPO's, with the paper's ratio of learning rates."""
        return cls(
            total_steps=30,
            rollout_batch_size=256,
            minibatch_size=128,
            learning_rate=6e-5,
            max_response_tokens=64,
            micro_batch_tokens=2048,
        )


def quantile_labels(scores: Tensor, num_quantiles: int) -> Tensor:
    """The quantile of each score, 0 for the best: [n] int64.

    Sorted from high to low, equal scores by position, the scores are cut into `num_quantiles` parts of ⌊n / K⌋; the
    remainder joins the last part. Fewer scores than parts are one part each.

    Args:
        scores: [n].
        num_quantiles: K, at least 1.

    Raises:
        ValueError: If a score is NaN (leave unscored responses out first) or K is below 1.
    """
    if scores.ndim != 1 or scores.isnan().any():
        raise ValueError(
            f"quantile_labels: expected a vector of scores without NaN, got shape {tuple(scores.shape)} with "
            f"{int(scores.isnan().sum())} NaN; leave unscored responses out first"
        )
    if num_quantiles < 1:
        raise ValueError(f"quantile_labels: expected at least 1 quantile, got {num_quantiles!r}")
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

    def own(self, numbers: NDArray[np.int64]) -> Tensor:
        """This process's rows among some of `trained`."""
        return places(self.numbers, numbers)


def quark_sums(policy: LanguageModel, pool: DataPool, rows: Tensor, config: QuarkConfig) -> dict[str, Tensor]:
    """Sums over response tokens of some rows: "loss" = "loss/nll" + β · "loss/kl", in nats."""
    read = pool.read[rows]
    logits = policy.logits(read, temperature=config.temperature)
    ref_logits = policy.logits(pool.plain[rows], role="reference", temperature=config.temperature)
    nll = nll_loss(-nn.functional.cross_entropy(logits, read.tokens, reduction="none")).sum()
    kl = exact_kl(logits, ref_logits).sum()
    return {"loss": nll + config.kl_coef * kl, "loss/nll": nll, "loss/kl": kl}


class Quark(PolicyAgent):
    """Trains a policy on the best of its own responses in a batched environment; a step is one batch of responses.

    Args:
        env: A vector environment of instructions with `autoreset_mode=AutoresetMode.DISABLED`; each process has its
            own. Instructions whose prompts are too long for the policy are not drawn for this agent, with a warning.
        policy: The model to train, in place, or a folder or hub name to load it from. As it is now, it is the
            reference. With `best_quantile_only=False` it gets the control tokens <reward_0> to <reward_K-1>.
        config: Settings.
        seed: Decides instructions, samples, minibatches and new embeddings; keyed by step, so that a resumed run makes
            the same draws.
        out: Folder for metrics.jsonl, timing.jsonl and checkpoints; None keeps nothing.
        resume: "auto" continues the newest checkpoint of `out`, "never" refuses a folder that has one.

    Raises:
        ValueError: If the environment resets by itself or its size does not divide the rollout batch; or control tokens
            are asked for and the policy has others already or trains a LoRA adapter, which has no place for them.
    """

    label: ClassVar[str] = "Quark"

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
            self._tokens = add_control_tokens(self.policy, names, seed=seed)
        width = self.config.max_response_tokens or self.policy.max_response_tokens
        budget = self.config.micro_batch_tokens
        left_out = unreadable(env, self.policy, who=self.label, width=width, micro_batch_tokens=budget)
        self.num_left_out = max((len(positions) for _, positions in left_out), default=0)
        self.policy.add_reference()
        self._loop = self._start(
            self.config,
            total=self.config.total_steps,
            inputs=lambda: {**describe(env), **DRAWS},
            out=out,
            resume=resume,
        )
        self._collector = Collector(
            env,
            self.policy,
            self._loop,
            batch_size=self.config.rollout_batch_size,
            temperature=self.config.temperature,
            max_response_tokens=self.config.max_response_tokens,
            left_out=left_out,
        )

    def updates(self) -> Iterator[dict[str, float]]:
        """Train, one step at a time.

        Yields:
            step, learning_rate, grad_norm (before clipping) and, over all processes:
            score/mean, score/std: the environment's rewards; score/best_quantile: their mean in the best quantile;
            score/unscored: share of responses left out;
            kl/k1, kl/k3: KL to the reference in nats a response, two unbiased estimates from all samples;
            loss/kl: the KL that is penalised, in nats a token of the responses trained on; averaged over the updates
            as are loss and loss/nll (loss = loss/nll + β · loss/kl);
            entropy: estimate in nats a token; tokens/mean: tokens a response; tokens: sampled in the step; finished:
            share that ended with EOS;
            info/<key>: the mean of each float that the environment reports, such as info/gold_reward.
        """
        return super().updates()

    # ----------------------------------------------------------------------------------------------------------- a step

    def _step(self, step: int) -> dict[str, float]:
        rollouts, scores, numbers, collected = self._collector.collect(step)
        with self._loop.timed("prepare"):
            pool, prepared = self._prepare(step, rollouts, scores, numbers)
        with self._loop.timed("update"):
            improved = self._improve(step, pool)
        return {**collected, **prepared, **improved}

    @torch.no_grad()
    def _prepare(
        self, step: int, rollouts: Rollouts, scores: Tensor, numbers: NDArray[np.int64]
    ) -> tuple[DataPool, dict[str, float]]:
        """The pool of a step, and metrics.

        Raises:
            ValueError: If no response to train on has a token to learn, which takes train_eos=False.
        """
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
        ref_logprobs = torch.zeros_like(rollouts.logprobs)
        places = ragged_split(torch.arange(len(rollouts.tokens), device=self.policy.device), rollouts.lengths)
        for rows in micro_batches(rollouts.total_lengths, self.config.micro_batch_tokens):
            part = rollouts[rows.to(self.policy.device)]
            with self._loop.processes.autocast():
                found = self.policy.logprobs(part, role="reference", temperature=self.config.temperature)
            ref_logprobs[torch.cat([places[row] for row in rows.tolist()])] = found
        kinds = {f"kl/{kind}": kl_estimate(rollouts.logprobs, ref_logprobs, kind) for kind in ("k1", "k3")}
        columns = {name: segment_sum(kl, rollouts.lengths) for name, kl in kinds.items()}
        return self._loop.processes.means({**columns, "entropy": -rollouts.logprobs})

    def _improve(self, step: int, pool: DataPool) -> dict[str, float]:
        """Epochs of minibatch updates; their mean metrics."""
        config = self.config
        lengths, total_lengths = pool.read.lengths.cpu(), pool.read.total_lengths.cpu()
        num_minibatches = math.ceil(len(pool.trained) / config.minibatch_size)
        updates = []
        for epoch in range(config.num_epochs):
            # The same order on all processes: a minibatch is one of all, of which each works on the rows it has.
            order = keyed_rng(self.seed, "minibatches", step, epoch).permutation(pool.trained)
            for rows in map(pool.own, np.array_split(order, num_minibatches)):
                cut = micro_batches(total_lengths[rows], config.micro_batch_tokens)
                updates.append(
                    self._loop.update(
                        [rows[part].to(self.policy.device) for part in cut],
                        lambda part: quark_sums(self.policy, pool, part, config),
                        count=int(lengths[rows].sum()),
                    )
                )
        return {name: math.fsum(update[name] for update in updates) / len(updates) for name in updates[0]}


# ------------------------------------------------------------------------------------------------------------- details


def without_eos(rollouts: Rollouts) -> Rollouts:
    """The rollouts with the end-of-sequence token taken off each response that has one; none is finished then."""
    last = rollouts.lengths.cumsum(0)[rollouts.finished] - 1
    kept = torch.ones_like(rollouts.tokens, dtype=torch.bool).index_fill(0, last, False)
    return replace(
        rollouts,
        tokens=rollouts.tokens[kept],
        logprobs=rollouts.logprobs[kept],
        lengths=rollouts.lengths - rollouts.finished.long(),
        finished=torch.zeros_like(rollouts.finished),
    )
