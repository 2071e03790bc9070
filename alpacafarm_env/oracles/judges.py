"""Oracles made of other oracles: a judge becomes a reward, gets noise, is asked in both orders, by many threads.

They nest: `WinRate(Flip(judge, p=0.25), references)` of a pool of annotators is AlpacaFarm's training reward.

Randomness is keyed on (seed, instruction, unordered pair of responses): a noisy judge that is asked again answers the
same; asked with the pair swapped, P becomes 1 - P exactly. (The released AlpacaFarm keys its noise on the instruction
alone, so that half of all instructions get one constant label: wrong for the reward of an agent that answers each many
times.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..seeding import keyed_uniforms
from .base import (
    UNSCORED_REASON,
    DetailedJudge,
    DetailedOracle,
    NoDeepCopy,
    PreferenceOracle,
    RewardOracle,
    Verdicts,
    blank_of,
    compare,
    is_paid,
    judge,
    place,
    unscored,
)

Batch = tuple[Sequence[str], Sequence[str], Sequence[str]]
Row = tuple[str, str, str]
"""(instruction, a, b): the pair in the order in which `b_first` and `b_wins` speak of it."""

NO_REFERENCE = "no reference response for this instruction"
NO_VERDICT = "the judge gave no verdict"


class WinRate(DetailedOracle):
    """A reward: the judge's verdict on the response (`b`) against the instruction's reference response (`a`).

    A response identical to the reference gets 0.5 without asking the judge; an instruction without a reference gets
    NaN. Details are the judge's own (its `blank` where it was not asked) and `unscored_reason`. The name is "win_rate:"
    and the judge's name by default.
    """

    def __init__(self, judge: PreferenceOracle, references: Mapping[str, str], *, name: str | None = None) -> None:
        self._judge = judge
        self.references = references
        self.name = name or f"win_rate:{judge.name}"
        self.paid = is_paid(judge)

    def judge(self, instructions: Sequence[str], responses: Sequence[str]) -> Verdicts:
        """The judge's verdict on the response, [B] in [0, 1]: 1 = it wins, 0.5 = tie, NaN = no verdict."""
        references = [self.references.get(instruction) for instruction in instructions]
        missing = np.array([reference is None for reference in references], bool)
        same = np.array([r == reference for r, reference in zip(responses, references, strict=True)], bool)
        batch = instructions, [reference or "" for reference in references], responses
        verdicts = _ask_some(self._judge, batch, ~(missing | same), np.where(missing, np.nan, 0.5))
        stated = np.asarray(verdicts.details.get(UNSCORED_REASON, ""))
        reasons = np.where(stated == "", NO_VERDICT, stated)
        return unscored(verdicts, np.where(missing, NO_REFERENCE, reasons))


class HigherReward(NoDeepCopy):
    """A reward as a judge: it prefers the response of higher reward. That of `a`, often a reference, is asked once."""

    def __init__(self, oracle: RewardOracle) -> None:
        self._oracle = oracle
        self.name = oracle.name
        self.paid = is_paid(oracle)
        self._known: dict[tuple[str, str], float] = {}

    def compare(self, instructions: Sequence[str], a: Sequence[str], b: Sequence[str]) -> NDArray[np.float64]:
        """Verdicts [B]: 1 where b has the higher reward, 0 where a has, 0.5 where both are equal, NaN without one."""
        return np.asarray((np.sign(self.margins(instructions, a, b)) + 1) / 2)

    def margins(self, instructions: Sequence[str], a: Sequence[str], b: Sequence[str]) -> NDArray[np.float64]:
        """The reward of b less that of a, [B]; NaN without one."""
        pairs = list(zip(map(str, instructions), a, strict=True))
        new = list({pair: row for row, pair in enumerate(pairs) if pair not in self._known}.values())
        verdicts = judge(self._oracle, [instructions[row] for row in new], [a[row] for row in new])
        self._known.update(zip((pairs[row] for row in new), verdicts.scores.tolist(), strict=True))
        of_a = np.array([self._known[pair] for pair in pairs], dtype=np.float64)
        return np.asarray(judge(self._oracle, instructions, b).scores - of_a)


class Flip(DetailedJudge):
    """AlpacaFarm's label noise: with probability 2p the verdict is a fair coin and the judge is not asked.

    The same as flipping a binary verdict with probability p, from 0 to 0.5, for a share 2p fewer calls. Identical
    responses stay 0.5. Adds the detail `noised`.
    Source: Dubois et al. 2023 (arXiv 2305.14387), p_sim^ann; released code, p_label_flip.
    """

    def __init__(self, judge: PreferenceOracle, p: float = 0.25, *, seed: int = 0) -> None:
        if not 0 <= p <= 0.5:
            raise ValueError(f"Flip needs a probability p from 0 to 0.5 (0.5 = a coin, no judge), got {p!r}.")
        self._judge = judge
        self.p = p
        self.seed = seed
        self.draws_order: bool = getattr(judge, "draws_order", False)
        self.blank = {**blank_of(judge), "noised": False}
        self.name = f"{judge.name}+flip{p:g}"
        self.paid = is_paid(judge)
        # Noise on top of noise has coins of its own: shared ones would pick the same rows twice.
        self._stream = f"flip over {judge.name}" if isinstance(judge, Flip) else "flip"

    def judge(self, instructions: Sequence[str], a: Sequence[str], b: Sequence[str]) -> Verdicts:
        """P(b preferred), [B]: 0 or 1 where noised, the judge's answer elsewhere."""
        same = np.array([x == y for x, y in zip(a, b, strict=True)], bool)
        coin = self._coins(instructions, a, b)
        noised = ~(np.isnan(coin) | same)
        verdicts = _ask_some(self._judge, (instructions, a, b), ~(noised | same), np.where(same, 0.5, coin))
        # A judge that adds noise itself says so too.
        return verdicts.with_detail("noised", noised | verdicts.details.get("noised", False))

    def _coins(self, instructions: Sequence[str], a: Sequence[str], b: Sequence[str]) -> NDArray[np.float64]:
        """The coin in place of the verdict, [B]: 1 = b preferred, 0 = a, NaN = no noise."""
        rows = list(zip(instructions, a, b, strict=True))
        u = keyed_uniforms(self.seed, self._stream, _unordered(rows))
        # One draw decides noise and coin: below p the pair's first text in sorted order wins, below 2p its second.
        b_is_first = np.array([second <= first for _, first, second in rows], bool)
        return np.where(u < 2 * self.p, np.where(b_is_first, u < self.p, u >= self.p), np.nan)


class BothOrders(DetailedJudge):
    """Asks a judge about (a, b) and (b, a) in one call and averages, which cancels a liking for one position.

    Details are those of the order (a, b), except that costs (`cost_*`) are summed, booleans have to hold in both, and
    the reason of a missing verdict may be the other order's. `orders_agree` says whether both orders prefer the same
    response, or both neither; None where one has no verdict. Raises ValueError for a judge that shuffles each pair
    itself (`draws_order`, as the sandbox's do): the other order would be the same question, paid for twice.
    """

    def __init__(self, judge: PreferenceOracle) -> None:
        if getattr(judge, "draws_order", False):
            raise ValueError(
                f"Judge {judge.name!r} draws the order of a pair itself, so (a, b) and (b, a) are one question to it: "
                "leave out both_orders, or give a judge that shows a pair as it comes."
            )
        self._judge = judge
        self.name = f"{judge.name}+both_orders"
        self.paid = is_paid(judge)
        self.blank = {**blank_of(judge), "orders_agree": True}

    def judge(self, instructions: Sequence[str], a: Sequence[str], b: Sequence[str]) -> Verdicts:
        """The mean P(b preferred) over both orders, [B]; NaN if either has no verdict."""
        size = len(instructions)
        verdicts = compare(self._judge, [*instructions, *instructions], [*a, *b], [*b, *a])
        forth, back = verdicts.scores[:size], 1 - verdicts.scores[size:]
        details = {key: _both(key, values[:size], values[size:]) for key, values in verdicts.details.items()}
        agree = (np.sign(forth - 0.5) == np.sign(back - 0.5)).astype(object)
        agree[np.isnan(forth + back)] = None
        return Verdicts((forth + back) / 2, details).with_detail("orders_agree", agree)


def _both(key: str, forth: NDArray[Any], back: NDArray[Any]) -> NDArray[Any]:
    """A detail of a pair that was asked in both orders."""
    if key.startswith("cost_"):
        return np.asarray(forth + back)
    if key == UNSCORED_REASON:
        return np.where(forth == "", back, forth)
    return np.logical_and(forth, back) if forth.dtype == np.bool_ else forth


def _ask_some(judge: PreferenceOracle, batch: Batch, rows: NDArray[np.bool_], otherwise: ArrayLike) -> Verdicts:
    """Asks the judge about some rows; the others have their verdict already."""
    if rows.all():
        return compare(judge, *batch)
    verdicts = compare(judge, *_take(batch, rows))
    scores = np.array(otherwise, np.float64)
    scores[rows] = verdicts.scores
    return Verdicts(scores, place(verdicts.details, rows, blank_of(judge)))


def _take(batch: Batch, rows: NDArray[np.bool_]) -> Batch:
    chosen = np.flatnonzero(rows).tolist()
    instructions, a, b = ([texts[row] for row in chosen] for texts in batch)
    return instructions, a, b


def _unordered(rows: Sequence[Row | tuple[str, str]]) -> list[tuple[str, ...]]:
    """Each row's instruction and its one or two responses, these in sorted order."""
    return [(row[0], *sorted(row[1:])) for row in rows]


@dataclass(frozen=True)
class KeyedDraws:
    """Draws keyed on (seed, name, instruction, unordered pair): two pools that share a `name` draw alike.

    Example:
        >>> draws = KeyedDraws(0, "sim_eval")
        >>> draws.annotators([("Why?", "Because.", "No.")], 13) == draws.annotators([("Why?", "No.", "Because.")], 13)
        array([ True])
    """

    seed: int
    name: str

    def annotators(self, rows: Sequence[Row | tuple[str, str]], count: int) -> NDArray[np.int64]:
        """The index of the annotator of each pair or (instruction, response), uniform over range(count), [B]."""
        check_count(count)
        return np.floor(self._uniforms("annotator", rows) * count).astype(np.int64)

    def b_first(self, rows: Sequence[Row]) -> NDArray[np.bool_]:
        """Whether b is shown before a, [B]: for half of all pairs, and the other way for (b, a)."""
        return np.asarray((self._uniforms("order", rows) >= 0.5) == _in_order(rows))

    def b_wins(self, rows: Sequence[Row], log_odds: NDArray[np.float64]) -> NDArray[np.bool_]:
        """Whether b is preferred, [B]: a draw from its probability, and the other way for (b, a).

        There is one draw for a pair, whoever judges it and whichever response is shown first, so that verdicts differ
        only where the chances do. `log_odds` are log(p / (1 - p)) of the probability p that b is preferred, [B]:
        swapping a pair changes their sign, which is exact where 1 - p is not.
        """
        in_order = _in_order(rows)
        later_wins = self._uniforms("verdict", rows) < probability(np.where(in_order, log_odds, -log_odds))
        return np.asarray(later_wins == in_order)

    def _uniforms(self, purpose: str, rows: Sequence[Row | tuple[str, str]]) -> NDArray[np.float64]:
        return keyed_uniforms(self.seed, f"{self.name} {purpose}", _unordered(rows))


def probability(log_odds: NDArray[np.float64]) -> NDArray[np.float64]:
    """The probability p of each log(p / (1 - p)), [B]; NaN for NaN."""
    with np.errstate(over="ignore"):  # log-odds of -1000, as a megabyte of text may have: p is 0 then
        return np.asarray(1.0 / (1.0 + np.exp(-log_odds)))


def check_count(count: int) -> None:
    """Raises ValueError unless there is somebody to draw."""
    if count < 1:
        raise ValueError(f"A pool to draw from needs one or more annotators, got {count!r}.")


def _in_order(rows: Sequence[Row]) -> NDArray[np.bool_]:
    return np.array([a <= b for _, a, b in rows], bool)
