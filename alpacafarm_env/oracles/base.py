"""Oracles: two protocols, and the functions `judge` and `compare` that ask one and check its answer.

An oracle needs a `name` and one method, `score` or `compare`, and nothing has to be inherited or registered; where one
is given as an object, a function that scores may stand for it (`FunctionOracle`). It answers a whole batch in one call,
given as tuples of texts; NaN means "no verdict". One that knows more about each row (who judged, in which order, at
what cost) adds a method `judge` with the same arguments that returns `Verdicts`; the environment puts the details into
`info`. A preference oracle that does so also has an attribute `blank`, the details of a row that it was not asked
about, so that every step's info has the same keys. One whose answers cost something says so by an attribute `paid`:
where several processes train together, the main one alone asks it, for all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NoReturn, Protocol, Self, runtime_checkable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..errors import AlpacaFarmError, UnscoredError

Kind = Literal["oracle", "judge", "rater"]
WIN_RATES: Final = {"annotators": "ann", "win_rate": "eval", "human": "human"}
"""Oracles that are a judge's win rate against the references."""
NAMES: Final[Mapping[Kind, tuple[str, ...]]] = {
    "oracle": ("surrogate", "gold", "recorded", "constant", *WIN_RATES),
    "judge": ("eval", "ann", "greedy", "human", "gold", "recorded"),
    "rater": ("eval", "greedy", "human"),
}
"""Our names of each, for `make_oracle` and `make_judge`."""
UNSCORED_REASON = "unscored_reason"
"""The detail that says why a row has no verdict; "" if it has one."""


class OracleError(AlpacaFarmError, ValueError):
    """An oracle answered with something that is no score: a wrong shape, a wrong type, an infinity."""


@runtime_checkable
class RewardOracle(Protocol):
    """Scores responses. Higher is better; the scale is the oracle's own."""

    @property
    def name(self) -> str:
        """The key of its rewards in `info["reward_components"]`."""

    def score(self, instructions: Sequence[str], responses: Sequence[str]) -> NDArray[np.float64]:
        """Returns one score for each response, [B]; NaN = no verdict."""


@runtime_checkable
class PreferenceOracle(Protocol):
    """Compares two responses to the same instruction."""

    @property
    def name(self) -> str:
        """The judge's name in reports and in the names of oracles built on it."""

    def compare(self, instructions: Sequence[str], a: Sequence[str], b: Sequence[str]) -> NDArray[np.float64]:
        """Returns P(b preferred to a) for each pair, [B] in [0, 1]; 0.5 = tie, NaN = no verdict.

        In which order an annotator sees the two is the judge's own business.
        """


@dataclass(frozen=True)
class Verdicts:
    """A batch of answers and their details."""

    scores: NDArray[np.float64]
    """Scores of a reward oracle, or P(b preferred) of a preference oracle, [B]; NaN = no verdict."""
    details: dict[str, NDArray[Any]] = field(default_factory=dict)
    """Further facts about each row, such as `annotator`, `noised` or `cost_usd`, each an array of length B."""

    def with_detail(self, key: str, values: NDArray[Any]) -> Verdicts:
        """These verdicts with one detail added or replaced."""
        return Verdicts(self.scores, {**self.details, key: values})


class NoDeepCopy:
    """A mixin for oracles and data sets: copying an environment's spec must not copy models and caches."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self


class NoCopy:
    """A mixin for policies, which may be in an environment's spec too: its copy holds nothing, and refuses to be used.

    To give the policy itself, as oracles do, would pass it off as a frozen copy.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> Uncopied:
        return Uncopied(type(self).__name__)


class Uncopied:
    """Stands in place of a policy's deep copy."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_"):  # Python's own questions, such as those of pickle
            raise AttributeError(name)
        raise TypeError(f"{self._name} is not copied by copy.deepcopy. For a copy, save it and load the folder.")


class DetailedOracle(NoDeepCopy):
    """A mixin for reward oracles with details: `score` is `judge` without them."""

    def judge(self, instructions: Sequence[str], responses: Sequence[str]) -> Verdicts:
        """Returns the score of each response, [B], with details."""
        raise NotImplementedError

    def score(self, instructions: Sequence[str], responses: Sequence[str]) -> NDArray[np.float64]:
        """Returns the scores of `judge`."""
        return self.judge(instructions, responses).scores


class DetailedJudge(NoDeepCopy):
    """A mixin for preference oracles with details: `compare` is `judge` without them."""

    def judge(self, instructions: Sequence[str], a: Sequence[str], b: Sequence[str]) -> Verdicts:
        """Returns P(b preferred), [B], with details."""
        raise NotImplementedError

    def compare(self, instructions: Sequence[str], a: Sequence[str], b: Sequence[str]) -> NDArray[np.float64]:
        """Returns P(b preferred) of `judge`."""
        return self.judge(instructions, a, b).scores


@dataclass(frozen=True)
class Constant(NoDeepCopy):
    """Gives every response the same score: for tests, and to measure what the environment itself costs."""

    value: float = 0.0
    name: str = "constant"

    def score(self, instructions: Sequence[str], responses: Sequence[str]) -> NDArray[np.float64]:
        """`value` for each response, [B]."""
        return np.full(len(responses), self.value, np.float64)


class FunctionOracle(NoDeepCopy):
    """An oracle that is a function of instructions and responses, such as `lambda instructions, responses: [...]`.

    Args:
        function: Gets two tuples of B texts; gives B scores, such as a list or an array [B]; NaN = no verdict.
        name: The function's own name by default, "lambda" of a lambda.
    """

    def __init__(
        self, function: Callable[[Sequence[str], Sequence[str]], ArrayLike], *, name: str | None = None
    ) -> None:
        self._function = function
        self.name = name or getattr(function, "__name__", type(function).__name__).strip("<>")

    def score(self, instructions: Sequence[str], responses: Sequence[str]) -> NDArray[np.float64]:
        """The function's scores, [B]."""
        return np.asarray(self._function(instructions, responses))


def blank_of(oracle: PreferenceOracle) -> Mapping[str, Any]:
    """The details of a row that a preference oracle was not asked about, {} if it declares none."""
    blank: Mapping[str, Any] = getattr(oracle, "blank", {})
    return blank


def is_paid(*oracles: RewardOracle | PreferenceOracle) -> bool:
    """Whether an answer of one of the oracles costs something, by its attribute `paid`."""
    return any(getattr(oracle, "paid", False) for oracle in oracles)


def judge(oracle: RewardOracle, instructions: Sequence[str], responses: Sequence[str]) -> Verdicts:
    """Asks a reward oracle once for a whole batch, by its `judge` method if it has one, and checks its answer.

    Returns finite or NaN float64 scores [B] and details; for an empty batch the oracle is not called. Raises
    OracleError for an answer of a wrong shape or type or an infinity, ValueError if `instructions` and `responses`
    differ in length.
    """
    verdicts = _ask(oracle, oracle.score, instructions, responses)
    if np.isinf(verdicts.scores).any():
        row = int(np.flatnonzero(np.isinf(verdicts.scores))[0])
        raise OracleError(
            f"Oracle {oracle.name!r} must answer finite scores, or NaN for no verdict; it gave "
            f"{verdicts.scores[row]!r} in row {row}, for the response {shorten(responses[row])}."
        )
    return verdicts


def rewards_of(oracle: RewardOracle, instructions: Sequence[str], responses: Sequence[str]) -> list[float]:
    """An oracle's scores for who can leave no response out; UnscoredError where it gives no verdict."""
    scores = judge(oracle, instructions, responses).scores
    if np.isnan(scores).any():
        response = responses[int(np.flatnonzero(np.isnan(scores))[0])]
        raise UnscoredError(f"Oracle {oracle.name!r} gave no verdict on {shorten(response)}.")
    rewards: list[float] = scores.tolist()
    return rewards


def compare(oracle: PreferenceOracle, instructions: Sequence[str], a: Sequence[str], b: Sequence[str]) -> Verdicts:
    """Asks a preference oracle as `judge` does; returns P(b preferred), float64 [B] in [0, 1] or NaN, and details."""
    verdicts = _ask(oracle, oracle.compare, instructions, a, b)
    wrong = (verdicts.scores < 0) | (verdicts.scores > 1)  # False for NaN, True for infinities
    if wrong.any():
        row = int(np.flatnonzero(wrong)[0])
        raise OracleError(
            f"Judge {oracle.name!r} must answer probabilities from 0 to 1, or NaN for no verdict; it gave "
            f"{verdicts.scores[row]!r} in row {row}, for {shorten(a[row])} and {shorten(b[row])}."
        )
    return verdicts


def place(
    details: Mapping[str, NDArray[Any]], rows: NDArray[np.bool_], blank: Mapping[str, Any]
) -> dict[str, NDArray[Any]]:
    """Spreads the details of the `rows` (bool [B]) that were asked over the whole batch.

    `blank` holds the details of the other rows. One that is missing there is "", 0, False or None after its type.
    """
    placed: dict[str, NDArray[Any]] = {key: np.full(rows.shape, value) for key, value in blank.items()}
    for key, detail in details.items():
        values = np.asarray(detail)
        fill = blank.get(key, None if values.dtype == object else values.dtype.type())
        placed[key] = np.full(rows.shape, fill, np.result_type(values, np.asarray(fill)))
        placed[key][rows] = values
    return placed


def unscored(verdicts: Verdicts, reasons: NDArray[Any]) -> Verdicts:
    """Adds the detail `unscored_reason`: of `reasons` [B] where the score is NaN, "" elsewhere."""
    return verdicts.with_detail(UNSCORED_REASON, np.where(np.isnan(verdicts.scores), reasons, ""))


def check_batch(instructions: Sequence[str]) -> None:
    """Refuses one text in the place of several: each of its letters would be an instruction.

    Raises:
        TypeError: It is a str.
    """
    if isinstance(instructions, str):
        text = shorten(instructions)
        raise TypeError(f"Expected a sequence of instructions, got one text, {text}; put it into a list: [{text}].")


def shorten(text: str, length: int = 60) -> str:
    """The text's representation, cut to fit an error message."""
    return repr(text) if len(text) <= length else f"{text[:length]!r}... ({len(text)} characters)"


def _ask(
    oracle: RewardOracle | PreferenceOracle, answer: Callable[..., NDArray[np.float64]], *batch: Sequence[str]
) -> Verdicts:
    lengths = [len(column) for column in batch]
    if len(set(lengths)) > 1:
        raise ValueError(f"Oracle {oracle.name!r} needs sequences of the same length, got lengths {lengths}.")
    if not lengths[0]:
        return Verdicts(np.empty(0))
    detailed = getattr(oracle, "judge", None)
    # Tuples: the next oracle to be asked, and `info`, must see what this one saw.
    columns = [tuple(column) for column in batch]
    verdicts = detailed(*columns) if detailed is not None else Verdicts(answer(*columns))
    if not isinstance(verdicts, Verdicts):
        raise OracleError(f"{oracle.name!r}.judge must return Verdicts, got {type(verdicts).__name__}.")
    for key, values in verdicts.details.items():
        if np.shape(values) != (lengths[0],):
            who = f"Oracle {oracle.name!r}: detail {key!r}"
            raise OracleError(f"{who} must have shape ({lengths[0]},), got {np.shape(values)}.")
    return Verdicts(checked(f"Oracle {oracle.name!r}", verdicts.scores, lengths[0]), verdicts.details)


def checked(who: str, answer: object, size: int) -> NDArray[np.float64]:
    """One real number for each of `size` rows as float64 [size], never broadcast.

    Raises an OracleError that begins with `who` ("Oracle 'x'") for anything else.
    """
    scores = np.asarray(answer)
    if scores.shape != (size,):
        raise OracleError(f"{who} must answer {size} rows with shape ({size},), got shape {scores.shape}.")
    if scores.dtype.kind not in "fiu":
        raise OracleError(f"{who} must answer real numbers (NaN = no verdict), got dtype {scores.dtype}.")
    return scores.astype(np.float64, copy=False)
