"""A judge whose faults are set one by one: noise of each label alone, noise that labels share, and tastes.

Of a pair the judge has a *margin*: how much better `b` is than `a`. Where the judge goes by a reward (`HigherReward`,
such as the sandbox's "gold") it is the difference of the rewards, in their unit; of any other judge it is
2 P(b preferred) - 1, so that one clear verdict is 1. The dials add to it, in the same unit:

    margin + (length_bias + u_k + v_i) doublings + (list_bias + u'_k + v'_i) lists + position_bias shown
           + temperature logistic

`doublings` is log2((|b| + 10) / (|a| + 10)) of the characters; `lists` is 1 if b alone has a list, -1 if a alone has
one, else 0; `shown` is 1 if b is shown first, else -1. u_k and u'_k are annotator k's own tastes, normal with SD
`annotator_noise`; v_i and v'_i are shared by all labels of instruction i, with SD `instruction_noise`. b wins where the
sum is above 0. `Flip` comes after that: it turns a share of the verdicts round, whatever the margin.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ..seeding import keyed_uniforms
from .base import DetailedJudge, PreferenceOracle, Verdicts, blank_of, compare, is_paid
from .judges import HigherReward, KeyedDraws

Array = NDArray[np.float64]
DIALS: Final = ("length_bias", "list_bias", "position_bias", "annotator_noise", "instruction_noise", "temperature")
"""Those of `Dialed`; `flip` is `Flip`'s."""
LIST_ITEM: Final = re.compile(r"^\s*(?:[-*•]|\d+[.)])\s", re.MULTILINE)
"""The beginning of a line with a bullet or a number."""
MOST: Final = 1e6
"""Largest size of a dial, and number of annotators: beyond, sums overflow or lose their digits."""
_LEAST: Final = 1e-12  # a chance that is drawn as 0 has no normal quantile


class Dialed(DetailedJudge):
    """A judge with set faults: see the module. Details are the judge's own, `dialed_annotator` and `shown_first`.

    A pair that is asked again has the same verdict, and a swapped pair has it turned round. Equal texts are a tie, and
    a missing verdict stays missing. Draws are keyed on the seed, the instruction and the unordered pair, whatever the
    dials: a pair that the noise of one temperature turns round is turned round by every higher one. Where the judge
    itself says what was shown first, that is what position_bias speaks of.

    Args:
        judge: Any judge.
        length_bias: What a response gains by twice the length; below 0 the judge likes short ones.
        list_bias: What it gains by a list.
        position_bias: What it gains by being shown first. The order is drawn for each pair.
        annotator_noise: SD of an annotator's own taste for length and for lists. One of `num_annotators` is drawn for
            each pair.
        instruction_noise: SD of a taste for length and for lists that all labels of an instruction share.
        temperature: Scale of logistic noise of each pair alone; 0: none.
        num_annotators: How many there are.
        seed: Of all draws.

    Raises:
        ValueError: A dial or `num_annotators` is above `MOST`, or not finite, or a scale is below 0.
    """

    draws_order: Final = True

    def __init__(
        self,
        judge: PreferenceOracle,
        *,
        length_bias: float = 0.0,
        list_bias: float = 0.0,
        position_bias: float = 0.0,
        annotator_noise: float = 0.0,
        instruction_noise: float = 0.0,
        temperature: float = 0.0,
        num_annotators: int = 13,
        seed: int = 0,
    ) -> None:
        given = (length_bias, list_bias, position_bias, annotator_noise, instruction_noise, temperature)
        dials = dict(zip(DIALS, given, strict=True))
        for name, value in dials.items():
            least = -MOST if name.endswith("bias") else 0
            if not least <= value <= MOST:  # nor is NaN
                raise ValueError(f"{name}: expected a number from {least:g} to {MOST:g}, got {value!r}.")
        if not 1 <= num_annotators <= MOST:
            raise ValueError(f"num_annotators: expected a number from 1 to {MOST:g}, got {num_annotators!r}.")
        self._judge = judge
        self.dials = dials
        self.num_annotators = num_annotators
        self.seed = seed
        self.blank = {**blank_of(judge), "dialed_annotator": -1, "shown_first": ""}
        self.name = judge.name + "".join(f"+{name}{value:g}" for name, value in dials.items() if value)
        self.paid = is_paid(judge)
        self._draws = KeyedDraws(seed, "dials")

    def judge(self, instructions: Sequence[str], a: Sequence[str], b: Sequence[str]) -> Verdicts:
        """[B]: 1 where b is preferred, 0 where a is, 0.5 for equal texts and for no margin either way."""
        rows = list(zip(map(str, instructions), a, b, strict=True))
        margins, details = _margins(self._judge, instructions, a, b)
        who = self._draws.annotators(rows, self.num_annotators)
        drawn = np.where(self._draws.b_first(rows), "b", "a")
        shown = details.get("shown_first", drawn)
        shown = np.where(shown == "", drawn, shown)
        dials = self.dials
        length = np.array([np.log2((len(y) + 10) / (len(x) + 10)) for _, x, y in rows])
        lists = np.array([bool(LIST_ITEM.search(y)) - bool(LIST_ITEM.search(x)) for _, x, y in rows], np.float64)
        for name, gap in (("length", length), ("list", lists)):
            own = self._tastes("annotator", name, [(str(each),) for each in who])
            shared = self._tastes("instruction", name, [row[:1] for row in rows])
            margins = margins + (dials[f"{name}_bias"] + own + shared) * gap
        margins = margins + dials["position_bias"] * np.where(shown == "b", 1.0, -1.0)
        if dials["temperature"]:
            wins = self._draws.b_wins(rows, np.nan_to_num(margins) / dials["temperature"]).astype(np.float64)
        else:
            wins = (np.sign(np.nan_to_num(margins)) + 1) / 2
        same = np.array([x == y for _, x, y in rows], bool)
        scores = np.where(np.isnan(margins), np.nan, np.where(same, 0.5, wins))
        return Verdicts(scores, {**details, "dialed_annotator": who, "shown_first": shown})

    def _tastes(self, whose: str, name: str, rows: Sequence[tuple[str, ...]]) -> Array:
        """Normal draws of the SD that a dial of noise sets, [B], the same for equal rows; 0 where it is 0."""
        from scipy.special import ndtri

        if not (deviation := self.dials[f"{whose}_noise"]):
            return np.zeros(len(rows))
        draws = np.maximum(keyed_uniforms(self.seed, f"dials {whose}, {name}", rows), _LEAST)
        return np.asarray(deviation * ndtri(draws))


def _margins(
    judge: PreferenceOracle, instructions: Sequence[str], a: Sequence[str], b: Sequence[str]
) -> tuple[Array, dict[str, NDArray[Any]]]:
    """How much better b is than a, [B], and details."""
    if isinstance(judge, HigherReward):
        return judge.margins(instructions, a, b), {}
    verdicts = compare(judge, instructions, a, b)
    return 2 * verdicts.scores - 1, verdicts.details
