"""Supervised fine-tuning (SFT): maximise log π(response, EOS | prompt) of demonstrations.

Source: Ouyang et al. 2022 (arXiv:2203.02155), sec. 3.5; numbers from AlpacaFarm (Dubois et al. 2023, arXiv:2305.14387),
released code. Deviations from that code:

1. The loss is a sum over response tokens divided by their number in the whole batch. AlpacaFarm averages per
   micro-batch, so there a short response weighs more when it shares a micro-batch with short ones.
2. A demonstration whose prompt is longer than the policy's limit is left out, a response is cut to the policy's limit,
   both with a warning; AlpacaFarm cuts both together at 512 tokens.
3. The last, smaller batch of an epoch is trained on too.
"""

import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from ..instructions import Demonstration
from .checkpoints import fingerprint
from .fitting import check_budget, fitting
from .language_model import LanguageModel
from .loop import Resume, Schedule, epoch_batch
from .losses import nll_loss
from .policy_agent import PolicyAgent, PolicyConfig
from .rollouts import Rollouts, micro_batches


@dataclass(frozen=True, kw_only=True)
class SFTConfig(PolicyConfig):
    """Settings of SFT; the defaults are AlpacaFarm's for LLaMA 7B (10k demonstrations, about 234 updates)."""

    epochs: int = 3
    """Passes over the demonstrations."""
    batch_size: int = 128
    """Demonstrations in an update, all processes together."""
    learning_rate: float = 2e-5
    """Peak learning rate of AdamW."""
    schedule: Schedule = "cosine"
    """How the rate goes from its peak to 0."""
    warmup_steps: float = 0.03
    """Steps of linear warm-up; below 1, a share of all steps."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(self.epochs >= 1, "epochs", "1 or more")
        self.require(self.batch_size >= 1, "batch_size", "1 or more")

    @classmethod
    def paper(cls) -> Self:
        """AlpacaFarm's settings for LLaMA 7B."""
        return cls()

    @classmethod
    def sandbox(cls) -> Self:
        """Settings for the sandbox's small model, trained from scratch on two CPU cores."""
        return cls(
            epochs=9,
            batch_size=32,
            learning_rate=3e-3,
            schedule="linear",
            weight_decay=0.01,
            micro_batch_tokens=1024,
            save_every=500,
        )


@dataclass(frozen=True, kw_only=True)
class FineTuningConfig(SFTConfig):
    """Settings of SFT that goes on from an SFT policy; AlpacaFarm's are those of SFT itself."""

    @classmethod
    def sandbox(cls) -> Self:
        """Settings for the sandbox's small policy on two CPU cores; twice PPO's learning rate, as in the paper."""
        return cls(batch_size=32, learning_rate=4e-4, schedule="linear", micro_batch_tokens=1024, save_every=100)


class SFT(PolicyAgent):
    """Fine-tunes a policy on demonstrations; a step is one update.

    Args:
        policy: The model to train, in place, or a folder or hub name to load it from.
        demonstrations: What to imitate; those whose prompts are too long for the policy are left out, with a warning.
        config: Settings.
        seed: Decides the order of the demonstrations.
        out: Folder for metrics.jsonl, timing.jsonl and checkpoints; None keeps nothing.
        resume: "auto" continues the newest checkpoint of `out`, "never" refuses a folder that has one.

    Raises:
        ValueError: If there is no demonstration, or the prompts of all are too long.
    """

    label: ClassVar[str] = "SFT"

    def __init__(
        self,
        policy: LanguageModel | str | Path,
        demonstrations: Sequence[Demonstration],
        *,
        config: SFTConfig | None = None,
        seed: int = 0,
        out: str | Path | None = None,
        resume: Resume = "auto",
    ) -> None:
        if not demonstrations:
            raise ValueError("SFT needs at least one demonstration, got none.")
        self.config = config or SFTConfig()
        super().__init__(policy, self.config, seed=seed)
        asked = [demonstration.instruction for demonstration in demonstrations]
        kept = [demonstrations[number] for number in fitting(self.policy, asked, who=self.label)]
        self.num_left_out = len(demonstrations) - len(kept)
        self._data = self._training_data(self._teacher_forced(kept))
        check_budget(self.config.micro_batch_tokens, int(self._data.total_lengths.max()), who=self.label)
        self._loop = self._start(
            self.config,
            total=self.config.epochs * math.ceil(len(kept) / self.config.batch_size),
            inputs=lambda: data_identity("demonstrations", self._data),
            out=out,
            resume=resume,
        )

    def updates(self) -> Iterator[dict[str, float]]:
        """Train, one update at a time; yields step, loss (nats a token), grad_norm, learning_rate."""
        return super().updates()

    @torch.no_grad()
    def evaluate(self, demonstrations: Sequence[Demonstration]) -> float:
        """Mean negative log-likelihood of the demonstrations' response tokens, in nats; 0 or more."""
        data = self._teacher_forced(demonstrations)
        losses = [self._sums(data[rows])["loss"] for rows in self._cut(data)]
        return float(torch.stack(losses).sum()) / len(data.tokens)

    def _step(self, step: int) -> dict[str, float]:
        batch = epoch_batch(step, num_items=len(self._data), batch_size=self.config.batch_size, seed=self.seed)
        data = self._data[self._loop.processes.share(batch)]
        return self._loop.update(self._cut(data), lambda rows: self._sums(data[rows]), count=len(data.tokens))

    def _sums(self, data: Rollouts) -> dict[str, Tensor]:
        return {"loss": nll_loss(self.policy.logprobs(data)).sum()}

    def _cut(self, data: Rollouts) -> list[Tensor]:
        return micro_batches(data.total_lengths, self.config.micro_batch_tokens)

    def _training_data(self, data: Rollouts) -> Rollouts:
        """What is trained on, made of the demonstrations before the loop starts; for subclasses to change."""
        return data

    def _teacher_forced(self, demonstrations: Sequence[Demonstration]) -> Rollouts:
        instructions = [demonstration.instruction for demonstration in demonstrations]
        data = self.policy.as_rollouts(instructions, [demonstration.response for demonstration in demonstrations])
        if num_cut := len(data) - int(data.finished.sum()):
            limit = self.policy.max_response_tokens
            warnings.warn(f"{num_cut} of {len(data)} responses are cut to max_response_tokens={limit}.", stacklevel=3)
        return data


def data_identity(name: str, data: Rollouts) -> dict[str, Any]:
    """How many rows (as `name`), how many response tokens and which: what resumed runs and processes compare."""
    columns = ("prompt_tokens", "prompt_lengths", "tokens", "lengths")
    found = fingerprint((column, getattr(data, column)) for column in columns)
    return {name: len(data), "tokens": len(data.tokens), "data_sha256": found}
