"""Best-of-n: sample n responses to an instruction, answer with the one that an oracle scores highest; no training.

Source: AlpacaFarm (Dubois et al. 2023, arXiv:2305.14387), sec. 4: n = 1024 at temperature 1.0 (16 where cost matters).
Deviations from its released code:

1. Sampling is from the policy's whole distribution. The released script keeps the top 90 % of it (top-p 0.9), which is
   another policy than the one PPO starts from, and one for which neither the divergence nor n = 1 has a meaning.
2. A sample is a function of the seed, the instruction's text and its number among the n alone: neither the size of
   chunks and batches nor the other instructions matter, and the first k of n samples are the k of a smaller run.
3. All rewards are kept, and of equally good responses the first is taken; the released script has no rule for equals.
4. The oracle reads each text as it reads any other; the script cuts prompt and response together at 512 tokens.
5. Equal texts are scored once.

How far it moves a policy (`best_of_n_kl`): Beirami et al. 2024 (arXiv:2401.01879). What any smaller n would have given
(`best_of_k`): Nakano et al. 2021 (arXiv:2112.09332, appendix I), Gao, Schulman and Hilton 2022 (arXiv:2210.10760).
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..errors import UnscoredError
from ..instructions import Instruction
from ..oracles.base import RewardOracle, judge, shorten
from .language_model import LanguageModel
from .loop import keyed_generator
from .policy_agent import PolicyActor
from .processes import Processes, judge_together
from .settings import Count, Positive, Settings

BATCHES_A_CHUNK = 4
"""Rows are sorted by length within a chunk and scored in one call: several batches make both worthwhile."""


@dataclass(frozen=True, kw_only=True)
class BestOfNConfig(Settings):
    """Settings of best-of-n; the defaults are AlpacaFarm's."""

    num_samples: Count = 1024
    """Responses sampled for each instruction, n."""
    temperature: Positive = 1.0
    """Sampling temperature. Above 0: n likeliest responses would be one response n times."""
    max_response_tokens: Count | None = None
    """Longest response; None: the policy's limit."""
    batch_size: Count = 256
    """Rows decoded together: memory and speed only."""

    @classmethod
    def sandbox(cls) -> Self:
        """Settings for the sandbox's small model on two CPU cores."""
        return cls(num_samples=64, max_response_tokens=64, batch_size=512)


@dataclass(frozen=True, eq=False)
class BestOfNSamples:
    """n scored responses to each of N instructions.

    Attributes:
        instructions: N instructions.
        responses: N tuples of n texts.
        rewards: [N, n] float64, the oracle's scores; NaN = unscored.
        finished: [N, n] bool, whether a response ended by itself.
        num_tokens: Tokens sampled in all, EOS included.
    """

    instructions: tuple[str, ...]
    responses: tuple[tuple[str, ...], ...]
    rewards: NDArray[np.float64]
    finished: NDArray[np.bool_]
    num_tokens: int

    def __len__(self) -> int:
        """Number of instructions N."""
        return len(self.instructions)

    @property
    def best(self) -> NDArray[np.int64]:
        """[N], which response has the highest reward, the first of equals; UnscoredError if an instruction has none."""
        scored = ~np.isnan(self.rewards)
        if not scored.any(axis=1).all():
            row = int(np.flatnonzero(~scored.any(axis=1))[0])
            raise UnscoredError(
                f"Best-of-n: the oracle scored none of the {self.rewards.shape[1]} responses to instruction {row}, "
                f"{shorten(self.instructions[row])}. Use another oracle, or leave the instruction out."
            )
        best: NDArray[np.int64] = np.where(scored, self.rewards, -np.inf).argmax(axis=1)
        return best

    @property
    def texts(self) -> tuple[str, ...]:
        """The best response to each instruction, [N]; errors as of `best`."""
        return tuple(row[i] for row, i in zip(self.responses, self.best.tolist(), strict=True))

    @classmethod
    def cat(cls, parts: Sequence[Self]) -> Self:
        """Joins samples instruction-wise, in order; ValueError if there are no parts, or they differ in n."""
        return cls(
            instructions=tuple(text for part in parts for text in part.instructions),
            responses=tuple(row for part in parts for row in part.responses),
            rewards=np.concatenate([part.rewards for part in parts]),
            finished=np.concatenate([part.finished for part in parts]),
            num_tokens=sum(part.num_tokens for part in parts),
        )


class BestOfN(PolicyActor):
    """Answers with the best of n samples of a policy, which is not changed, as the oracle scores them."""

    def __init__(
        self,
        policy: LanguageModel | str | Path,
        oracle: RewardOracle,
        *,
        config: BestOfNConfig | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(policy, seed=seed)
        self.oracle, self.config = oracle, config or BestOfNConfig()

    @property
    def instructions_at_once(self) -> int:
        """Instructions in a chunk."""
        return max(1, BATCHES_A_CHUNK * self.config.batch_size // self.config.num_samples)

    def act(self, instructions: Sequence[str]) -> tuple[str, ...]:
        """The best of n responses to each instruction; UnscoredError if the oracle scored none of the n."""
        texts: list[str] = []
        for _, samples in self.sample_chunks(instructions):  # only the best of each chunk stays in memory
            texts += samples.texts
            self.num_tokens += samples.num_tokens
        return tuple(texts)

    def sample(
        self, instructions: Sequence[str], *, num_samples: int | None = None, processes: Processes | None = None
    ) -> BestOfNSamples:
        """All samples of N instructions at once, with their rewards; n is `num_samples`, or the config's.

        `processes` that share instructions call it together, and ask the oracle together, once.
        """
        n = self.config.num_samples if num_samples is None else num_samples
        parts = [self._draw(chunk, n) for _, chunk in self._chunks(instructions, n)]
        empty = BestOfNSamples((), (), np.empty((0, n)), np.empty((0, n), bool), 0)
        return self._score(BestOfNSamples.cat(parts) if parts else empty, processes)

    def sample_chunks(
        self, instructions: Sequence[str], *, num_samples: int | None = None
    ) -> Iterator[tuple[int, BestOfNSamples]]:
        """The samples of a few instructions at a time, for a caller that stores them, and need not ask for those again.

        Yields:
            The number of the chunk's first instruction, and its samples.
        """
        n = self.config.num_samples if num_samples is None else num_samples
        for first, chunk in self._chunks(instructions, n):
            yield first, self._score(self._draw(chunk, n))

    def _chunks(self, instructions: Sequence[str], n: int) -> Iterator[tuple[int, Sequence[str]]]:
        if n < 1:
            raise ValueError(f"Best-of-n: num_samples must be 1 or more, got {n!r}")
        size = max(1, BATCHES_A_CHUNK * self.config.batch_size // n)
        for first in range(0, len(instructions), size):
            yield first, instructions[first : first + size]

    def _draw(self, instructions: Sequence[str], n: int) -> BestOfNSamples:
        """Samples that are not scored yet."""
        rollouts = self.policy.generate(
            instructions,
            # A stream an instruction, so that its samples depend neither on the others nor on how many are drawn.
            generator=[keyed_generator(self.seed, "best of n", text) for text in instructions],
            temperature=self.config.temperature,
            max_new_tokens=self.config.max_response_tokens,
            batch_size=self.config.batch_size,
            num_samples=n,
        )
        first: dict[str, str] = {}
        texts = [first.setdefault(text, text) for text in rollouts.texts]  # of equal texts one object is kept
        return BestOfNSamples(
            instructions=tuple(instructions),
            responses=tuple(tuple(texts[start : start + n]) for start in range(0, len(texts), n)),
            rewards=np.full((len(instructions), n), np.nan),
            finished=rollouts.finished.cpu().numpy().reshape(-1, n),
            num_tokens=len(rollouts.tokens),
        )

    def _score(self, samples: BestOfNSamples, processes: Processes | None = None) -> BestOfNSamples:
        # An Instruction compares as its text, but one text can be two prompts: with and without an input.
        prompts = [(instruction, getattr(instruction, "input", "")) for instruction in samples.instructions]
        rows = list(zip(prompts, samples.responses, strict=True))
        pairs = {(prompt, text): i for i, (prompt, row) in enumerate(rows) for text in row}
        numbers = {pair: number for number, pair in enumerate(pairs)}
        texts = [samples.instructions[i] for i in pairs.values()], [text for _, text in pairs]
        verdicts = judge(self.oracle, *texts) if processes is None else judge_together(processes, self.oracle, *texts)
        where = np.array([[numbers[prompt, text] for text in row] for prompt, row in rows], np.int64)
        return replace(samples, rewards=verdicts.scores[where.reshape(samples.rewards.shape)])


def best_responses(rows: Sequence[int], samples: BestOfNSamples) -> list[dict[str, Any]]:
    """The best of each `Instruction`'s samples, the first of equals, JSON-able; `rows` are the instructions' numbers.

    Response, reward and mean_reward (over all samples that have one, `num_scored`) are None if no sample has a reward.
    """
    lines = []
    scored = ~np.isnan(samples.rewards)
    best = np.where(scored, samples.rewards, -np.inf).argmax(axis=1).tolist()
    for i, (row, instruction) in enumerate(zip(rows, samples.instructions, strict=True)):
        assert isinstance(instruction, Instruction)
        rewards = samples.rewards[i, scored[i]].tolist()
        lines.append(
            {
                "row": row,
                "id": instruction.id,
                "instruction": instruction.instruction,
                "input": instruction.input,
                "response": samples.responses[i][best[i]] if rewards else None,
                "reward": max(rewards, default=None),
                "mean_reward": math.fsum(rewards) / len(rewards) if rewards else None,
                "num_scored": len(rewards),
                "finished": bool(rewards and samples.finished[i, best[i]]),
            }
        )
    return lines


def reward_metrics(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """reward/best, reward/mean (over all samples), reward/unscored (share of rows) and finished; NaN of nothing."""
    best = [row for row in rows if row["num_scored"]]
    if not best:
        return {"reward/best": math.nan, "reward/mean": math.nan, "reward/unscored": 1.0, "finished": math.nan}
    num_scored = sum(row["num_scored"] for row in best)
    return {
        "reward/best": math.fsum(row["reward"] for row in best) / len(best),
        "reward/mean": math.fsum(row["mean_reward"] * row["num_scored"] for row in best) / num_scored,
        "reward/unscored": 1 - len(best) / len(rows),
        "finished": sum(row["finished"] for row in best) / len(best),
    }


def best_of_n_kl(n: int) -> float:
    """Upper bound of KL(best-of-n policy || policy) in nats, for n of 1 or more: log n - (n - 1) / n.

    Exact for a policy whose responses all have different rewards and tiny probabilities. Where a text comes up several
    times among the n, the divergence is smaller (Beirami et al.).
    """
    return math.log(n) - (n - 1) / n


def best_of_k(rewards: ArrayLike, values: ArrayLike, ks: Sequence[int]) -> NDArray[np.float64]:
    """The worth of the best of k, for several k from 1 to n, from one pool of n samples for each instruction.

    The unbiased estimator: the mean over all sets of k of the n samples of the value of the set's best by reward. In
    ascending order sample i is the best in C(i-1, k-1) of C(n, k) sets. Equal rewards share their chance evenly, so the
    order of the samples does not matter, to the last bit.

    Args:
        rewards: [N, n], what the best is chosen by; NaN = unscored, left out of the pool. ValueError if infinite.
        values: [N, n], what the best is worth: gold, or the rewards again.
        ks: Sizes.

    Returns:
        [len(ks), N] float64. NaN where an instruction has fewer than k scored samples, or where one that can be the
        best of k has no value.
    """
    reward, value = np.asarray(rewards, np.float64), np.asarray(values, np.float64)
    if reward.ndim != 2 or reward.shape != value.shape:
        raise ValueError(
            f"best_of_k: expected rewards and values of one shape [N, n], got {reward.shape}, {value.shape}"
        )
    if np.isinf(reward).any():
        raise ValueError("best_of_k: rewards must be finite, or NaN for an unscored sample; got an infinity")
    if wrong := [k for k in ks if not 1 <= k <= reward.shape[1]]:
        raise ValueError(f"best_of_k: each k must be from 1 to the {reward.shape[1]} samples there are, got {wrong}")
    means = np.full((len(ks), len(reward)), np.nan)
    scored = ~np.isnan(reward)
    counts = scored.sum(axis=1)
    # Instructions with equally many scored samples, nearly always all of them, share their weights.
    for count in np.unique(counts[counts > 0]):
        rows = np.flatnonzero(counts == count)
        pools = [_tied_means(reward[row, scored[row]], value[row, scored[row]]) for row in rows]
        for j, k in enumerate(ks):
            if k <= count:
                means[j, rows] = _weigh(np.stack(pools), _weights(int(count), k))
    return means


def _tied_means(reward: NDArray[np.float64], value: NDArray[np.float64]) -> NDArray[np.float64]:
    """The values in ascending order of reward, those of equal rewards replaced by their mean."""
    order = np.lexsort((value, reward))  # by value within equal rewards, so that the sums below have one order
    _, group, size = np.unique(reward[order], return_inverse=True, return_counts=True)
    means: NDArray[np.float64] = np.bincount(group, weights=value[order]) / size
    return means[group]


def _weights(n: int, k: int) -> NDArray[np.float64]:
    """C(i-1, k-1) / C(n, k) for i = 1..n, built from the top: no binomial is ever formed, so none overflows."""
    i = np.arange(n, 1, -1)
    descending = k / n * np.cumprod(np.concatenate([[1.0], np.maximum(i - k, 0) / (i - 1)]))
    return descending[::-1]


def _weigh(pools: NDArray[np.float64], weights: NDArray[np.float64]) -> NDArray[np.float64]:
    """[N, n] and [n] -> [N]; a value of weight 0 does not count, even if it is NaN."""
    used = weights > 0
    means: NDArray[np.float64] = (pools[:, used] * weights[used]).sum(axis=1)
    return means
