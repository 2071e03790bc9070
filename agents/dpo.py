"""Direct preference optimization (DPO): fit preferences with the policy itself, without a reward model.

Source: Rafailov et al. 2023 (arXiv:2305.18290); numbers from AlpacaFarm (Dubois et al. 2023, arXiv:2305.14387), where
it notes DPO. The policy's implicit reward is β (log π − log π_ref), and the loss of a pair is the reward model's with
that reward: −log σ(β [(log π − log π_ref)(chosen) − (log π − log π_ref)(rejected)]). At its optimum under Bradley-Terry
preferences π ∝ π_ref · exp(r / β), as for PPO with a KL penalty.

A log-probability is the sum over a response's tokens, EOS included, not normalised by length, as in AlpacaFarm.
Deviations from AlpacaFarm's released code:

1. Epochs, learning rate and schedule are the paper's (1, 1e-5, linear to 0). The released script has 2, 1e-6, cosine.
2. The reference reads every response once, before the first step, and two numbers a pair are kept. Theirs holds a
   second model and asks it at every step; the numbers are the same.
3. Chosen and rejected responses go through the model together, and the loss is a sum over pairs divided by the pairs of
   the whole batch.
4. Prompts, responses and the last batch of an epoch are treated as in `sft`.
5. Accuracy, margin, implicit rewards and log-probabilities are reported; theirs reports the loss.
6. `label_smoothing` for labels known to be flipped at some rate; theirs has none. 0, the default, is the paper's.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self, cast

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from ..instructions import Instruction, Preference
from ..terminal import make_bar
from .attention import packs
from .language_model import LanguageModel
from .loop import Resume, Sums, epoch_batch
from .losses import dpo_loss, implicit_rewards
from .memory import first_tried
from .policy_agent import PolicyAgent, PolicyConfig
from .precision import Precision
from .processes import Processes, float32_matmuls, settled
from .prompts import check_budget
from .rollouts import micro_batches, segment_sum
from .settings import Count, NonNegative, Positive
from .sft import data_identity, teacher_forced


@dataclass(frozen=True, kw_only=True)
class OfflineConfig(PolicyConfig):
    """Settings that DPO and KTO share; the defaults are AlpacaFarm's of DPO for LLaMA 7B."""

    beta: Positive = 0.1
    """β, reward units per nat: the smaller, the further from the reference the same labels lead."""
    epochs: Count = 1
    """Passes over the data."""
    batch_size: Count = 64
    """Pairs of DPO, or responses of KTO, in an update, all processes together."""
    warmup_steps: NonNegative = 0.03

    @classmethod
    def sandbox(cls) -> Self:
        """Settings for the sandbox's small policy on two CPU cores; the learning rate is PPO's, as in the paper."""
        return cls(learning_rate=2e-4, precision="float32", micro_batch_tokens=2048, save_every=50)


@dataclass(frozen=True, kw_only=True)
class DPOConfig(OfflineConfig):
    """Settings of DPO; the defaults are AlpacaFarm's for LLaMA 7B (10k pairs, about 152 updates)."""

    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """The share of labels held to be flipped, below 0.5: "conservative DPO", whose margins stay finite."""


def pair_sums(
    chosen: Tensor,
    rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    *,
    beta: float,
    label_smoothing: float = 0.0,
) -> dict[str, Tensor]:
    """Sums over pairs, of log-probabilities [B] of their responses: the loss, and the metrics of `DPO.updates`."""
    targets = torch.full_like(chosen, 1 - label_smoothing) if label_smoothing else None
    losses = dpo_loss(chosen, rejected, ref_chosen, ref_rejected, beta=beta, targets=targets)
    chosen, rejected = chosen.detach(), rejected.detach()
    reward_chosen = implicit_rewards(chosen, ref_chosen, beta=beta)
    reward_rejected = implicit_rewards(rejected, ref_rejected, beta=beta)
    margins = reward_chosen - reward_rejected
    return {
        "loss": losses.sum(),
        "accuracy": (margins > 0).float().sum() + (margins == 0).float().sum() / 2,
        "margin": margins.sum(),
        "reward/chosen": reward_chosen.sum(),
        "reward/rejected": reward_rejected.sum(),
        "logprob/chosen": chosen.sum(),
        "logprob/rejected": rejected.sum(),
    }


class OfflineAgent(PolicyAgent):
    """Trains on rows of two responses each; the reference reads each response once, before the first step."""

    config: OfflineConfig

    def _begin(
        self,
        instructions: Sequence[Instruction],
        sides: tuple[Sequence[str], Sequence[str]],
        *,
        out: str | Path | None,
        resume: Resume,
        **inputs: Any,
    ) -> None:
        """Reads rows [N], an instruction with a response on either side, and begins the run; `inputs` decide it too."""
        self.config = settled(self.config, self.policy.model)
        self._num_rows = len(instructions)
        # The first sides, then the second ones in the same order.
        self._data = teacher_forced(self.policy, [*instructions] * 2, [*sides[0], *sides[1]])
        self._lengths = self._data.total_lengths.view(2, -1).cpu()
        check_budget(self.config.micro_batch_tokens, int(self._sizes.max()), who=self.label)
        identity = {**data_identity("responses", self._data), **inputs}
        # Or the processes' shares of the reference would not fit together.
        Processes(self.policy.device).agree(identity)
        # Before the loop, which puts a resumed run's weights in place of the reference's.
        self._ref_logprobs = self._reference_logprobs()
        self._loop = self._start(
            self.config,
            total=self.config.epochs * math.ceil(self._num_rows / self.config.batch_size),
            inputs=lambda: identity,
            out=out,
            resume=resume,
        )

    def _batch(self, step: int) -> NDArray[np.int64]:
        """The rows of a step, of all processes."""
        return epoch_batch(step, num_items=self._num_rows, batch_size=self.config.batch_size, seed=self.seed)

    @property
    def _sizes(self) -> Tensor:
        """Tokens of the rows in a micro-batch, [N]: padded, a row takes twice its longer text."""
        return self._lengths.sum(0) if packs(self.policy.model) else 2 * self._lengths.amax(0)

    def _largest(self) -> tuple[list[int], Sums]:
        rows = self._longest_rows(sizes := self._sizes, self.config.batch_size)
        return sizes[rows].tolist(), partial(self._sums, rows)

    def _sums(self, numbers: Tensor, rows: Tensor) -> dict[str, Tensor]:
        """Sums over some rows of a batch, given by their numbers."""
        raise NotImplementedError

    def _logprobs(self, rows: Tensor) -> Tensor:
        """Log-probabilities of whole responses on both sides of some rows, [2, b]."""
        rollouts = self._data[torch.cat([rows, rows + self._num_rows])]
        return segment_sum(self.policy.logprobs(rollouts), rollouts.lengths).view(2, len(rows))

    @torch.no_grad()
    def _reference_logprobs(self) -> Tensor:
        """Those of all rows by the policy as it is now, [2, N]; each process reads its share."""
        processes = Processes(self.policy.device, precision=cast(Precision, self.config.precision))
        table = torch.zeros(2, self._num_rows, device=self.policy.device)
        mine = processes.share(np.arange(self._num_rows))
        # Not tried for memory, so few on any device.
        tokens = self.config.micro_batch_tokens or min(4096, first_tried(self.policy.device))
        parts = micro_batches(self._sizes[mine], tokens, packed=packs(self.policy.model))
        with make_bar(len(parts), f"{self.label} reference", show=processes.is_main, unit="batch") as bar:
            for rows in parts:
                with processes.autocast(), float32_matmuls(self.policy.device, tf32=self.config.tf32):
                    table[:, mine[rows]] = self._logprobs(mine[rows])
                bar.update()
        return processes.reduce(table)


class DPO(OfflineAgent):
    """Trains a policy on preferences; a step is one update. Other arguments as of `PolicyAgent`.

    Args:
        preferences: Settled comparisons; at least one.
        seed: Decides the order of the pairs.
    """

    label: ClassVar[str] = "DPO"
    config: DPOConfig

    def __init__(
        self,
        policy: LanguageModel | str | Path,
        preferences: Sequence[Preference],
        *,
        config: DPOConfig | None = None,
        seed: int = 0,
        out: str | Path | None = None,
        resume: Resume = "auto",
    ) -> None:
        self.config = config or DPOConfig()
        super().__init__(policy, self.config, seed=seed)
        kept = self._fitting(preferences)
        sides = [pair.chosen for pair in kept], [pair.rejected for pair in kept]
        self._begin([pair.instruction for pair in kept], sides, out=out, resume=resume)

    def updates(self) -> Iterator[dict[str, float]]:
        """Train, one update at a time.

        Yields:
            step, learning_rate, grad_norm (before clipping) and means over the pairs of the batch before its update:
                loss (nats); accuracy: share with the chosen response's implicit reward higher, ties half; margin: the
                difference of implicit rewards, β times nats; reward/chosen, reward/rejected; logprob/chosen,
                logprob/rejected: nats a response.
        """
        for step in self._loop:
            pairs = self._loop.processes.share(self._batch(step))
            micro = self._loop.cut(self._sizes[pairs])
            means = self._loop.update(micro, partial(self._sums, pairs), count=len(pairs))
            yield self._loop.log(means)

    def _sums(self, numbers: Tensor, rows: Tensor) -> dict[str, Tensor]:
        pairs = numbers[rows]
        smoothing, ref = self.config.label_smoothing, self._ref_logprobs[:, pairs]
        return pair_sums(*self._logprobs(pairs), *ref, beta=self.config.beta, label_smoothing=smoothing)
