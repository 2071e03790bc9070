"""Win-rate arithmetic: win rate with its standard error, length-controlled win rate, intervals across seeds.

A *credit* is what a response earns against the reference: 1 won, 0 lost, 0.5 a tie, anything between for a judge that
answers with a probability, NaN for no verdict. Rewards of the win-rate environments are credits.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

RIDGE = 1e-6
"""Weight of the squared parameters in the length-controlled fit: makes a separable table's optimum finite."""
LENGTH_WEIGHT: Final = -1.613
"""GPT-4's prior mean of length's weight in the length-controlled fit: that of AlpacaEval 2's two gamed baselines, told
to be verbose (-1.5835) and to be concise (-1.6425), as published. Below 0: the judge likes long responses."""
LENGTH_PRECISION: Final = 11.6
"""Its precision (1 / variance): what the gamed rows tell of that weight, by AlpacaEval's weight of 0.1 for each. Their
Fisher information, 0.1 x sum of p (1 - p) tanh(d / sd(d))^2, is 5.4 + 6.2 for the published texts and weights."""
SHARE: Final = (0.0, 1.0)
PERCENT: Final = (0.0, 100.0)
POSITIVE: Final = (0.0, math.inf)
UNBOUNDED: Final = (-math.inf, math.inf)
"""Bounds of an `interval`: of a share, a percentage, a length, time or divergence, anything."""
COUNTS: Final = ("n_wins", "n_wins_base", "n_draws", "n_total")
LEADERBOARD_COLUMNS: Final = (
    *("generator", "win_rate", "standard_error", *COUNTS),
    *("avg_length", "length_controlled_winrate", "lc_low", "lc_high"),
)
"""The columns of the published AlpacaEval leaderboards, and the 95 % interval of the last of them."""


@dataclass(frozen=True)
class WinRateSummary:
    """A win rate over `num_total` verdicts, in percent; rows without a verdict count in `num_unscored` only."""

    win_rate: float
    """100 x mean credit, in [0, 100]; NaN without a verdict."""
    standard_error: float
    """100 x sd(credit, ddof=1) / sqrt(num_total); NaN for fewer than two verdicts."""
    num_wins: int
    num_losses: int
    num_draws: int
    num_total: int
    num_unscored: int

    @property
    def bounds(self) -> tuple[float, float]:
        """The win rate if all rows without a verdict were lost, and if all were won; NaN for no rows."""
        num = self.num_total + self.num_unscored
        if not num:
            return math.nan, math.nan
        low = self.win_rate * self.num_total / num if self.num_total else 0.0
        return low, low + 100 * self.num_unscored / num

    def row(self) -> dict[str, float | int]:
        """The values under `LEADERBOARD_COLUMNS`."""
        counts = (self.num_wins, self.num_losses, self.num_draws, self.num_total)
        rates = {"win_rate": self.win_rate, "standard_error": self.standard_error}
        return {**rates, **dict(zip(COUNTS, counts, strict=True))}


@dataclass(frozen=True)
class Interval:
    """A mean over `num` values with its confidence interval; NaN bounds for a single value."""

    mean: float
    low: float
    high: float
    num: int


def win_rate(credits: ArrayLike) -> WinRateSummary:
    """Win rate of `credits` [B]; NaN is left out, as AlpacaEval's describe_head2head does.

    A credit above 0.5 is a win, below a loss, exactly 0.5 a draw; ValueError for one outside [0, 1].
    """
    values = _credits(credits)
    scored = values[~np.isnan(values)]
    num = len(scored)
    return WinRateSummary(
        win_rate=float(100 * scored.mean()) if num else math.nan,
        standard_error=float(100 * scored.std(ddof=1) / math.sqrt(num)) if num > 1 else math.nan,
        num_wins=int((scored > 0.5).sum()),
        num_losses=int((scored < 0.5).sum()),
        num_draws=int((scored == 0.5).sum()),
        num_total=num,
        num_unscored=len(values) - num,
    )


def leaderboard_row(
    generator: str, credits: ArrayLike, responses: Sequence[str], references: Sequence[str], judge: str = ""
) -> dict[str, Any]:
    """One generator's row under `LEADERBOARD_COLUMNS`: credits, responses and references are [B].

    Lengths are characters; avg_length is rounded down as published. A judge with "gpt4" in its name has
    GPT-4's taste for length as its prior, as on the published leaderboards.
    """
    lengths, base_lengths = list(map(len, responses)), list(map(len, references))
    prior = {"weight": LENGTH_WEIGHT, "precision": LENGTH_PRECISION} if _is_gpt4(judge) else {}
    controlled = length_controlled_win_rate(credits, lengths, base_lengths, **prior)
    return {
        "generator": generator,
        **win_rate(credits).row(),
        "avg_length": int(np.mean(lengths)),
        "length_controlled_winrate": controlled.mean,
        "lc_low": controlled.low,
        "lc_high": controlled.high,
    }


def length_control_note(judge: str) -> str:
    """What the columns of the length-controlled win rate are, and by which prior."""
    return (
        "length_controlled_winrate: what the win rate would be at equal lengths, with its 95 % interval (lc_low, "
        "lc_high); before its verdicts the judge's taste for length is taken for "
        f"{'that of GPT-4' if _is_gpt4(judge) else 'unknown'}."
    )


def _is_gpt4(judge: str) -> bool:
    """Whether a recorded judge's verdicts are GPT-4's, by its name: "alpaca_eval_gpt4", for instance."""
    return "gpt4" in judge.lower().replace("-", "")


def length_controlled_win_rate(
    credits: ArrayLike,
    lengths: ArrayLike,
    reference_lengths: ArrayLike,
    *,
    weight: float = 0.0,
    precision: float = 0.1,
) -> Interval:
    """Length-controlled win rate in percent, what the win rate would be at equal lengths, with its 95 % interval.

    Fits P(win_i) = sigmoid(theta * tanh(d_i / sd(d)) + beta), d_i = reference length - response length, to the credits
    [B] of one generator, and gives 100 * sigmoid(beta). theta has a normal prior of mean `weight` and 1 / variance
    `precision` (0: none). The default says little, and holds for any judge. `LENGTH_WEIGHT` and `LENGTH_PRECISION` are
    GPT-4's: what AlpacaEval's penalty amounts to, which ties each fit to two baselines that were told to be verbose and
    to be concise. AlpacaEval's fit also has a difficulty of each instruction, from a table outside its repository. It
    is left out: estimated from the judged models themselves, it takes the result away from the published figures. Rows
    without a verdict are left out of the fit but kept in sd, as upstream. The interval is over instructions, by a
    sandwich estimate of beta's variance in which the prior counts as an observation, of a fit with one more win and one
    more loss at equal lengths: without them it has no width where all verdicts agree. Its ends are NaN for a single
    verdict, and all is NaN without one.
    Source: Dubois et al. 2024 (arXiv 2404.04475).

    Raises ValueError if shapes differ, a credit lies outside [0, 1], a length is not finite, `weight` is not from -100
    to 100, or `precision` not from 0 to a million.
    """
    values = _credits(credits)
    difference = np.asarray(reference_lengths, dtype=np.float64) - np.asarray(lengths, dtype=np.float64)
    if difference.shape != values.shape or not np.isfinite(difference).all():
        raise ValueError(f"expected finite lengths of shape {values.shape}, got {difference.shape}: {difference!r}")
    given: dict[str, tuple[Any, float, float]] = {"weight": (weight, -100, 100), "precision": (precision, 0, 1e6)}
    for name, (value, least, most) in given.items():
        if not isinstance(value, int | float | np.number) or not least <= value <= most:
            raise ValueError(f"{name}: expected a number from {least} to {most:g}, got {value!r}")
    scored = ~np.isnan(values)
    if not scored.any():
        return Interval(math.nan, math.nan, math.nan, 0)
    spread = difference.std(ddof=1) if len(difference) > 1 else 0.0
    feature = np.tanh(difference / spread)[scored] if spread > 0 else np.zeros(int(scored.sum()))
    target, prior = values[scored], (np.array([weight, 0.0]), np.array([precision + 2 * RIDGE, 2 * RIDGE]))
    beta = float(_length_fit(feature, target, *prior)[0][1])
    fitted, variance = _length_fit(np.append(feature, [0, 0]), np.append(target, [0, 1]), *prior)
    half = 1.959963984540054 * math.sqrt(variance[1, 1]) if len(target) > 1 else math.nan
    ends = (min(beta, fitted[1] - half), beta, max(beta, fitted[1] + half)) if half == half else (half, beta, half)
    low, mean, high = (float(100 * _sigmoid(end)) for end in ends)
    return Interval(mean, low, high, len(target))


def _length_fit(
    feature: NDArray[np.float64], target: NDArray[np.float64], center: NDArray[np.float64], pull: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Theta and beta of credits [n] by a feature [n], held to `center` [2] by `pull` [2], and their covariance."""
    from scipy.optimize import minimize

    rows = np.stack([feature, np.ones_like(feature)], axis=1)

    def loss(parameters: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
        logits, away = rows @ parameters, parameters - center
        # Cross-entropy with soft targets: log(1 + e^x) - target * x.
        value = np.logaddexp(0, logits) - target * logits
        return float(value.sum() + (pull * away**2).sum() / 2), rows.T @ (_sigmoid(logits) - target) + pull * away

    fitted = np.asarray(minimize(loss, center, jac=True, method="BFGS", options={"gtol": 1e-6}).x)
    chance, num = _sigmoid(rows @ fitted), len(target)
    inverse = np.linalg.inv(rows.T @ (rows * (chance * (1 - chance))[:, None]) + np.diag(pull))
    scatter = rows.T @ (rows * ((chance - target) ** 2)[:, None]) * num / max(num - 1, 1) + np.diag([pull[0], 0.0])
    return fitted, inverse @ scatter @ inverse


def interval(values: ArrayLike, *, bounds: tuple[float, float] = UNBOUNDED) -> Interval:
    """Mean of the values of several seeds [S] with its 95 % interval by Student's t, S - 1 degrees of freedom.

    `bounds` are the least and greatest possible mean. Between two finite ones (a share) the interval is taken on the
    logit scale, by the delta method, so that it stays between them. A value that equals a bound has no logit; then, as
    with a single bound (a length; a KL, whose unbiased estimate may lie below 0), the plain t-interval is cut at the
    bounds. An interval wholly beyond a bound is left as it is. Values that all equal the same bound give an interval of
    no width: with few seeds that says little about others.

    Raises ValueError for no value, or one that is not finite or outside two finite bounds.
    """
    from scipy import stats

    data, (least, most) = np.asarray(values, dtype=np.float64), bounds
    if data.ndim != 1 or not len(data) or not np.isfinite(data).all():
        raise ValueError(f"expected one or more finite numbers, got {values!r}")
    share = math.isfinite(least) and math.isfinite(most)
    if share and not ((data >= least) & (data <= most)).all():
        raise ValueError(f"expected numbers from {least:g} to {most:g}, got {values!r}")
    mean, num = float(data.mean()), len(data)
    if num == 1:
        return Interval(mean, math.nan, math.nan, num)
    half = float(stats.t.ppf((1 + 0.95) / 2, num - 1) * data.std(ddof=1) / math.sqrt(num))
    if share and _is_within(data, least, most):
        return Interval(mean, *_between(mean, half, least, most), num)
    ends = (mean - half, mean + half)
    low, high = np.clip(ends, least, most) if ends[0] < most and ends[1] > least else ends
    return Interval(mean, float(low), float(high), num)


def _is_within(values: NDArray[np.float64], least: float, most: float) -> bool:
    """Whether all have a logit: none is a bound, up to rounding."""
    shares = (values - least) / (most - least)
    return bool(((shares > 1e-12) & (shares < 1 - 1e-12)).all())


def _between(mean: float, half: float, least: float, most: float) -> tuple[float, float]:
    """Mean +- half on the logit scale of [least, most], for a mean between them."""
    width = most - least
    share = (mean - least) / width
    centre, reach = math.log(share / (1 - share)), half / width / (share * (1 - share))
    low, high = (least + width * float(_sigmoid(end)) for end in (centre - reach, centre + reach))
    return min(low, mean), max(high, mean)


def mean_known(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Mean over the first axis, NaN left out; NaN where nothing is known."""
    scored = ~np.isnan(values)
    num = scored.sum(axis=0)
    return np.asarray(np.where(num, np.nansum(values, axis=0) / np.maximum(num, 1), np.nan), dtype=np.float64)


def wilson(num_correct: float, num: int) -> tuple[float, float]:
    """Wilson's 95 % interval of the share `num_correct` / `num`. Source: Wilson 1927, J. Am. Stat. Assoc."""
    z, share = 1.959963984540054, num_correct / num
    centre = share + z * z / (2 * num)
    half = z * math.sqrt(share * (1 - share) / num + z * z / (4 * num * num))
    scale = 1 + z * z / num
    # At shares of 0 and 1 a bound equals the share, which rounding may miss.
    return min(share, max(0.0, (centre - half) / scale)), max(share, min(1.0, (centre + half) / scale))


def _credits(credits: ArrayLike) -> NDArray[np.float64]:
    values = np.asarray(credits, dtype=np.float64)
    if values.ndim != 1 or ((values < 0) | (values > 1)).any() or np.isinf(values).any():
        raise ValueError(f"expected credits of shape [B] in [0, 1] or NaN, got {values!r}")
    return values


def _sigmoid(x: NDArray[np.float64] | float) -> NDArray[np.float64]:
    from scipy.special import expit

    return np.asarray(expit(x), dtype=np.float64)
