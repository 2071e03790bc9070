"""Online DPO: direct preference optimization of pairs that the policy samples itself, judged as it learns.

Source: Guo et al. 2024 (arXiv:2402.04792), "Direct language model alignment from online AI feedback". One step:

1. sample two responses to each instruction of the environment;
2. which is better: by the environment's rewards, or by a judge of pairs; ties are left out;
3. epochs of minibatches of the pairs by DPO's loss, against the policy that training began with.

Deviations from the paper and TRL 1.16:

1. A pair is two responses of one step; the loss is a sum over pairs divided by the pairs of the minibatch, over all
   processes.
2. A response that does not end is judged as it is; TRL's `missing_eos_penalty` has no counterpart.
3. Optimizer and batch are AlpacaFarm's (AdamW, 256 pairs a step); theirs is Adafactor on 128 pairs.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import torch
from gymnasium.vector import VectorEnv
from numpy.typing import NDArray
from torch import Tensor

from ..errors import UnscoredError
from ..oracles.base import PreferenceOracle, compare
from .collecting import CollectingAgent, OnlineConfig, columns, drift, update_in_epochs
from .dpo import pair_sums
from .language_model import LanguageModel
from .loop import Resume, Sums
from .ppo import sandbox_sizes
from .rollouts import Rollouts, segment_sum
from .settings import Count, NonNegative, Positive


@dataclass(frozen=True, kw_only=True)
class OnlineDPOConfig(OnlineConfig):
    """Settings of online DPO; the defaults are the paper's where it gives them."""

    beta: Positive = 0.1
    """β, reward units per nat."""
    learning_rate: Positive = 5e-7
    warmup_steps: NonNegative = 150
    temperature: Positive = 0.9
    num_epochs: Count = 1
    rollout_batch_size: Count = 512
    """Responses in a step, all processes together: two for each pair."""

    def __post_init__(self) -> None:
        super().__post_init__()
        even = self.rollout_batch_size % 2 == 0
        self.require(even, "rollout_batch_size", "even, as responses come in pairs")
        divides = self.rollout_batch_size % self.minibatch_size == 0
        self.require(divides, "minibatch_size", f"a divisor of rollout_batch_size={self.rollout_batch_size}")

    @classmethod
    def sandbox(cls) -> Self:
        """Settings for the sandbox's small policy on two CPU cores: sizes and learning rate are PPO's."""
        return cls(**sandbox_sizes(warmup_steps=0, temperature=1.0))


@dataclass(frozen=True)
class Pairs:
    """This process's pairs of a step: rows of its rollouts, and whole responses' log-probabilities by the reference."""

    rollouts: Rollouts
    chosen: Tensor
    rejected: Tensor
    ref_logprobs: Tensor


class OnlineDPO(CollectingAgent):
    """Trains a policy on its own pairs. The environment is as for `PPO`, other arguments too.

    Args:
        judge: Says which of two responses is better (`oracles.make_judge`). None: the environment's rewards do.

    Raises:
        ValueError: The environment resets by itself, its size is odd or does not divide the rollout batch; or no prompt
            fits.
        TypeError: `judge` compares no pairs.
    """

    label: ClassVar[str] = "Online DPO"
    config: OnlineDPOConfig

    def __init__(
        self,
        env: VectorEnv[Any, Any, Any],
        policy: LanguageModel | str | Path,
        *,
        judge: PreferenceOracle | None = None,
        config: OnlineDPOConfig | None = None,
        seed: int = 0,
        out: str | Path | None = None,
        resume: Resume = "auto",
    ) -> None:
        if not (judge is None or hasattr(judge, "compare")):
            raise TypeError(f"judge: expected a judge of pairs, such as make_judge(...) gives, got {judge!r}.")
        self.env, self.config, self.judge = env, config or OnlineDPOConfig(), judge
        super().__init__(policy, self.config, seed=seed, max_act_tokens=self.config.max_response_tokens)
        self._collect_from(env, num_generations=2, inputs=self._describe, out=out, resume=resume)

    def _describe(self) -> dict[str, Any]:
        return {**self._collector.describe(), "judge": None if self.judge is None else self.judge.name}

    def updates(self) -> Iterator[dict[str, float]]:
        """Train, one step at a time.

        Yields:
            What `PPO.updates` does, without the reward, value, advantage and clip metrics; what `DPO.updates` yields of
                the pairs; and pairs/judged: share of the step's pairs that are trained on.

        Raises:
            UnscoredError: No pair of a step has a better response.
        """
        config, loop = self.config, self._loop
        for step in loop:
            rollouts, scores, numbers, metrics = self._collector.collect(loop, step)
            first, better = self._judged(rollouts, scores, numbers)
            with loop.timed("prepare"), loop.whole():
                pairs, prepared = self._prepare(rollouts, first, better)
            own = numbers[first.cpu().numpy()] // 2
            trained = np.sort(np.fromiter(chain.from_iterable(loop.processes.gather(own.tolist())), np.int64))
            if not len(trained):
                raise UnscoredError(f"Step {step}: no pair of responses has a better one to learn from.")
            means = update_in_epochs(
                loop,
                rollouts.total_lengths[pairs.chosen] + rollouts.total_lengths[pairs.rejected],
                partial(self._sums, pairs),
                key=(step, 0),
                numbers=own,
                trained=trained,
                num_epochs=config.num_epochs,
                num_minibatches=min(config.rollout_batch_size // config.minibatch_size, len(trained)),
            )
            judged = 2 * len(trained) / config.rollout_batch_size
            yield loop.log({**metrics, "pairs/judged": judged, **prepared, **means})

    def _judged(self, rollouts: Rollouts, scores: Tensor, numbers: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """The first rows of the pairs that are no tie, [P], and whether the second one is the better."""
        complete = np.flatnonzero(numbers[:-1] // 2 == numbers[1:] // 2)
        if self.judge is None:
            margins = scores.cpu()[complete + 1] - scores.cpu()[complete]
        else:
            judge = self.judge
            asked = [rollouts.instructions[row] for row in complete]
            sides = [[rollouts.texts[row + side] for row in complete] for side in (0, 1)]
            with self._loop.timed("score"):
                credits = self._loop.processes.together(lambda: compare(judge, asked, *sides)).scores
            margins = torch.from_numpy(np.nan_to_num(credits, nan=0.5) - 0.5)
        settled, device = (margins != 0).numpy(), rollouts.lengths.device
        return torch.from_numpy(complete[settled]).to(device), (margins[settled] > 0).to(device)

    @torch.no_grad()
    def _prepare(self, rollouts: Rollouts, first: Tensor, better: Tensor) -> tuple[Pairs, dict[str, float]]:
        """The pairs with the reference's log-probabilities, and metrics of all responses."""
        scored = partial(self.policy.logprobs, temperature=self.config.temperature)
        own = self._sampled(rollouts, scored)
        ref = columns(self._loop, rollouts, partial(scored, role="reference"))
        # At temperature 1, of which DPO's loss is.
        whole = (
            ref
            if self.config.temperature == 1
            else columns(self._loop, rollouts, partial(self.policy.logprobs, role="reference"))
        )
        chosen = first + better
        pairs = Pairs(rollouts, chosen, 2 * first + 1 - chosen, whole.sum(1))
        return pairs, self._loop.processes.means(drift(own, ref, rollouts.lengths))

    def _sums(self, pairs: Pairs, rows: Tensor) -> dict[str, Tensor]:
        chosen, rejected = pairs.chosen[rows], pairs.rejected[rows]
        both = pairs.rollouts[torch.cat([chosen, rejected])]
        logprobs = segment_sum(self.policy.logprobs(both), both.lengths).view(2, len(rows))
        ref = pairs.ref_logprobs[torch.stack([chosen, rejected])]
        return pair_sums(*logprobs, *ref, beta=self.config.beta)

    def _largest(self) -> tuple[list[int], Sums]:
        rollouts = self._collector.longest_rollouts()
        rows = torch.arange(len(rollouts) // 2, device=rollouts.lengths.device)
        ref = torch.zeros(len(rollouts), device=rollouts.lengths.device)
        pairs = Pairs(rollouts, 2 * rows, 2 * rows + 1, ref)
        sizes = rollouts.total_lengths[pairs.chosen] + rollouts.total_lengths[pairs.rejected]
        return sizes.tolist(), partial(self._sums, pairs)
