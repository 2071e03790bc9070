"""KTO: learn from responses that are each called good or bad, without pairs.

Source: Ethayarajh et al. 2024 (arXiv:2402.01306), "KTO: Model alignment as prospect theoretic optimization". With the
implicit reward r = β (log π − log π_ref) of a response, its loss is λ_D (1 − σ(r − z)) if it is good and
λ_U (1 − σ(z − r)) if it is bad, where z = max(0, β KL) is held fixed. The KL is the mean of log π − log π_ref of
responses to other instructions than they were written for.

Deviations from the paper and TRL 1.16:

1. Whose response an instruction is given for the KL is drawn once, by the seed, so that the reference reads it once.
   They take the next one of the batch.
2. Optimizer, batches and epochs are AlpacaFarm's of DPO.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from ..instructions import Labelled, Preference
from ..seeding import keyed_rng
from .dpo import OfflineAgent, OfflineConfig
from .language_model import LanguageModel
from .loop import Resume, Sums
from .losses import check_shapes
from .rollouts import segment_sum
from .settings import NonNegative, Positive


@dataclass(frozen=True, kw_only=True)
class KTOConfig(OfflineConfig):
    """Settings of KTO; weights and learning rate are the paper's."""

    learning_rate: Positive = 5e-7
    good_weight: NonNegative = 1.0
    """λ_D, the weight of good responses."""
    bad_weight: NonNegative = 1.0
    """λ_U, that of bad ones. The paper holds λ_D times the good ones to 1 to 4/3 times λ_U times the bad ones."""


def kto_loss(log_ratios: Tensor, good: Tensor, kl: Tensor | float, config: KTOConfig) -> Tensor:
    """The loss of each response, [B], of log π − log π_ref [B] in nats; `kl` in nats is held fixed, at least 0."""
    check_shapes(log_ratios=log_ratios, good=good)
    sign, weight = 2 * good.to(log_ratios.dtype) - 1, torch.where(good, config.good_weight, config.bad_weight)
    return weight * (1 - torch.sigmoid(sign * config.beta * (log_ratios - kl)))


class KTO(OfflineAgent):
    """Trains a policy on labelled responses; a step is one update. Other arguments as of `PolicyAgent`.

    Args:
        examples: Labelled responses (`data.read_labels`), or preferences: the chosen response is good, the other bad.
        seed: Decides the order of the responses, and which one an instruction is given for the KL.

    Raises:
        ValueError: There are less than two responses.
    """

    label: ClassVar[str] = "KTO"
    config: KTOConfig

    def __init__(
        self,
        policy: LanguageModel | str | Path,
        examples: Sequence[Labelled] | Sequence[Preference],
        *,
        config: KTOConfig | None = None,
        seed: int = 0,
        out: str | Path | None = None,
        resume: Resume = "auto",
    ) -> None:
        self.config = config or KTOConfig()
        super().__init__(policy, self.config, seed=seed)
        kept = self._fitting([row for each in examples for row in labelled(each)])
        if len(kept) < 2:
            raise ValueError(f"{self.label} needs at least two responses, got {len(kept)}.")
        order = keyed_rng(seed, "unrelated responses").permutation(len(kept)).tolist()
        unrelated = dict(zip(order, order[1:] + order[:1], strict=True))
        sides = [each.response for each in kept], [kept[unrelated[row]].response for row in range(len(kept))]
        self._good = torch.tensor([each.label for each in kept], device=self.policy.device)
        labels = hashlib.sha256(bytes(each.label for each in kept)).hexdigest()
        self._kl, half = 0.0, torch.tensor(0.5, device=self.policy.device)
        self._shares = half, half
        self._begin([each.instruction for each in kept], sides, out=out, resume=resume, labels_sha256=labels)

    def updates(self) -> Iterator[dict[str, float]]:
        """Train, one update at a time.

        Yields:
            step, learning_rate, grad_norm (before clipping) and means over the responses of the batch before its
                update: loss; accuracy: share whose implicit reward is on its label's side of the KL; kl: z / β, nats;
                margin: the mean implicit reward of good responses less that of bad ones (each 0 where there are none).
        """
        for step in self._loop:
            batch = self._batch(step)
            rows = self._loop.processes.share(batch)
            micro = self._loop.cut(self._lengths[0][rows])
            with self._loop.timed("prepare"), self._loop.whole():
                self._kl = self._unrelated_kl(rows)
            good = self._good[torch.from_numpy(batch).to(self._good.device)].float()
            # The share that each label has in the batch, so that sums over responses become means over its own.
            self._shares = good.mean(), 1 - good.mean()
            means = self._loop.update(micro, partial(self._sums, rows), count=len(rows))
            yield self._loop.log({**means, "kl": self._kl})

    def _largest(self) -> tuple[list[int], Sums]:
        rows = self._longest_rows(self._lengths[0], self.config.batch_size)
        return self._lengths[0][rows].tolist(), partial(self._sums, rows)

    @torch.no_grad()
    def _unrelated_kl(self, rows: Tensor) -> float:
        """max(0, KL) of the batch, over all processes."""
        values = torch.zeros(len(rows), device=self.policy.device)
        for part in self._loop.cut(self._lengths[1][rows]):
            rollouts = self._data[rows[part] + self._num_rows]
            with self._loop.processes.autocast():
                logprobs = segment_sum(self.policy.logprobs(rollouts), rollouts.lengths)
            values[part] = logprobs - self._ref_logprobs[1, rows[part]]
        return max(0.0, self._loop.processes.means({"kl": values})["kl"])

    def _sums(self, numbers: Tensor, rows: Tensor) -> dict[str, Tensor]:
        chosen = numbers[rows]
        rollouts, good = self._data[chosen], self._good[chosen]
        log_ratios = segment_sum(self.policy.logprobs(rollouts), rollouts.lengths) - self._ref_logprobs[0, chosen]
        loss = kto_loss(log_ratios, good, self._kl, self.config)
        rewards = self.config.beta * log_ratios.detach()
        by_label = [
            (rewards * own).sum() / share.clamp(min=1e-9)
            for own, share in zip((good, ~good), self._shares, strict=True)
        ]
        right = (rewards > self.config.beta * self._kl) == good
        return {"loss": loss.sum(), "accuracy": right.float().sum(), "margin": by_label[0] - by_label[1]}


def labelled(example: Labelled | Preference) -> tuple[Labelled, ...]:
    """A preference as two labelled responses; one that is labelled already."""
    if isinstance(example, Labelled):
        return (example,)
    ask = example.instruction
    return Labelled(ask, example.chosen, label=True), Labelled(ask, example.rejected, label=False)
