"""The core of every AlpacaFarm environment: its instructions, and who scores the responses to them.

While a reward wrapper's `step` runs, it names the oracle to ask by `scored_by`. Calls nest from the outside in, so the
outermost wrapper decides; the environment's own oracle is then neither asked nor even built.
"""

import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any, Final

import gymnasium as gym
import numpy as np
from gymnasium.error import ResetNeeded
from numpy.typing import NDArray

from ..data import load_dataset
from ..errors import (
    DataError,
    InvalidResponseError,
    InvalidResponseTypeError,
    UnknownNameError,
    UnscoredError,
    did_you_mean,
)
from ..instructions import Instruction
from ..oracles import check_oracle, make_oracle
from ..oracles.base import UNSCORED_REASON, Verdicts, judge, shorten
from ..spaces import MAX_TEXT_LENGTH, find_surrogate
from .infos import Column, Columns, column
from .rendering import RENDER_MODES, Episode, Frame

if TYPE_CHECKING:
    from ..data import Dataset
    from ..oracles.base import RewardOracle

Judge = Callable[["RewardOracle", Sequence[Instruction], Sequence[str]], Verdicts]
"""Asks an oracle about a batch, as `oracles.base.judge` does."""

Audit = Callable[[Sequence[Instruction], Sequence[str], Verdicts, Judge], Mapping[str, NDArray[Any]]]
"""Is given a batch, what the deciding oracle says of it, and by whom to ask; returns info of each response."""

ON_UNSCORED: Final = ("raise", "truncate")

RESERVED_KEYS: Final = frozenset(
    (
        *("instruction_id", "split", "response", "response_length", "oracle", "scored", "reward_components"),
        *("response_tokens", "response_truncated"),  # the token environment's
        # Gymnasium's and Stable-Baselines3's own.
        *("episode", "final_obs", "final_info", "terminal_observation", "TimeLimit.truncated", "is_success"),
    )
)
"""Info keys that an oracle's details and an `AddScore` may not use, nor any that starts with an underscore."""


class Scoring:
    """A data set's split to draw from and an oracle to ask; a mixin of the environments."""

    def __init__(
        self,
        dataset: "str | Dataset",
        split: str,
        oracle: "str | Mapping[str, Any] | RewardOracle",
        render_mode: str | None,
        on_unscored: str,
    ) -> None:
        """See `InstructionEnv`."""
        if on_unscored not in ON_UNSCORED:
            raise did_you_mean("on_unscored value", on_unscored, ON_UNSCORED)
        if render_mode not in (None, *RENDER_MODES):
            raise did_you_mean("render mode", render_mode, RENDER_MODES)
        self.dataset = load_dataset(dataset)
        self.split = split
        self.instructions: Sequence[Instruction] = self.dataset.instructions(split)
        if not self.instructions:
            raise DataError(f"Split {split!r} of data set {self.dataset.name!r} is empty: there is nothing to ask.")
        self.drawn: Sequence[int] = range(len(self.instructions))
        """The positions within `instructions` of those that may be drawn, ascending."""
        check_oracle(oracle)
        self._on_unscored = on_unscored
        self._oracle_spec = oracle
        self.render_mode = render_mode
        self._episodes: dict[int, Episode] = {}  # by slot; stays empty without a render mode
        self._deciding: RewardOracle | None = None
        self._observers: dict[str, RewardOracle] = {}
        self._audits: list[Audit] = []
        self._judge: Judge = judge

    @property
    def truncates_unscored(self) -> bool:
        """Whether a response without a verdict truncates its episode, instead of an error."""
        return self._on_unscored == "truncate"

    def leave_out(self, instruction_ids: Iterable[int]) -> None:
        """Draws these instructions no more, such as those that are too long for a model.

        By its id each can still be asked. Slots that have begun to draw begin a new stream from their generators.
        Raises UnknownNameError for an unknown id, DataError if no instruction remains.
        """
        self._leave({self.find_instruction(id) for id in instruction_ids})

    @contextmanager
    def leaving_out(self, positions: Collection[int]) -> Iterator[None]:
        """While this context is open, the instructions at these positions of `instructions` are not drawn.

        Slots that have begun to draw begin a new stream, now and at the end. Raises DataError if no instruction
        remains.
        """
        before = self.drawn
        self._leave(positions)
        try:
            yield
        finally:
            if self.drawn is not before:
                self.drawn = before
                self._renew_streams()

    def _leave(self, positions: Collection[int]) -> None:
        drawn = [position for position in self.drawn if position not in positions]
        if not drawn:
            raise DataError(f"Split {self.split!r} of data set {self.dataset.name!r}: every instruction is left out.")
        if len(drawn) < len(self.drawn):
            self.drawn = drawn
            self._renew_streams()

    def _renew_streams(self) -> None:
        """Begins new streams over the instructions that may be drawn now."""
        raise NotImplementedError

    @cached_property
    def oracle(self) -> "RewardOracle":
        """The environment's own oracle, built when it is first needed."""
        return self.make_oracle(self._oracle_spec)

    def make_oracle(self, spec: "str | Mapping[str, Any] | RewardOracle") -> "RewardOracle":
        """The oracle that `spec` names, for this environment's data set."""
        return make_oracle(spec, dataset=self.dataset)

    def scored_by(self, oracle: "RewardOracle") -> AbstractContextManager[None]:
        """While this context is open, `oracle` decides the reward, unless an outer `scored_by` already does."""
        return nullcontext() if self._deciding is not None else self._with(_deciding=oracle)

    def also_scored_by(self, key: str, oracle: "RewardOracle") -> AbstractContextManager[None]:
        """While this context is open, every step also reports `oracle`'s score under `info[key]` (NaN: no verdict).

        The reward is not touched. An oracle that also decides the reward is asked once, not twice.
        """
        return self._with(_observers={**self._observers, key: oracle})

    def audited_by(self, audit: "Audit") -> AbstractContextManager[None]:
        """While this context is open, every step also reports what `audit` says of its batch. The reward stays."""
        return self._with(_audits=[*self._audits, audit])

    def asking_by(self, ask: "Judge") -> AbstractContextManager[None]:
        """While this context is open, oracles are asked by `ask` instead of `oracles.base.judge`."""
        return self._with(_judge=ask)

    @contextmanager
    def _with(self, **values: Any) -> Iterator[None]:
        """While this context is open, attributes have these values."""
        before = {name: getattr(self, name) for name in values}
        vars(self).update(values)
        try:
            yield
        finally:
            vars(self).update(before)

    def score(
        self, instructions: Sequence[Instruction], responses: Sequence[str]
    ) -> tuple[NDArray[np.float64], Columns]:
        """Asks the deciding oracle for one batch, then those that only report: one call each.

        Returns rewards, float64 [B], NaN where the oracle gave no verdict, and the step's info, B rows. Raises
        UnscoredError for a response without verdict unless on_unscored="truncate".
        """
        oracle = self._deciding if self._deciding is not None else self.oracle
        verdicts = self._judge(oracle, instructions, responses)
        rewards = column(verdicts.scores)
        scored = ~np.isnan(rewards)
        if self._on_unscored == "raise" and not scored.all():
            raise _unscored(oracle.name, verdicts, instructions, responses)
        columns: dict[str, Column | Mapping[str, Column]] = {
            **instruction_columns(instructions, self.split),
            "response": np.array(responses, dtype=object),
            "response_length": np.fromiter(map(len, responses), dtype=np.int64, count=len(responses)),
            "oracle": np.full(len(responses), oracle.name, dtype=object),
            "scored": scored,
            "reward_components": {oracle.name: rewards.copy()},
        }
        for key, observer in self._observers.items():
            scores = verdicts.scores if observer is oracle else self._judge(observer, instructions, responses).scores
            columns[key] = column(scores)
        audits = [audit(instructions, responses, verdicts, self._judge) for audit in self._audits]
        for key, values in chain(verdicts.details.items(), *(told.items() for told in audits)):
            if key in columns or key in RESERVED_KEYS or key.startswith("_"):
                who = f"Oracle {oracle.name!r}" if key in verdicts.details else "An audit"
                raise ValueError(f"{who} reports a detail under {key!r}, an info key that is taken.")
            columns[key] = column(values)
        return rewards, columns

    def _show(self, slot: int, episode: Episode) -> None:
        """Keeps what `render` shows; prints it in mode "human"."""
        if self.render_mode is not None:
            self._episodes[slot] = episode
        if self.render_mode == "human":
            episode.show("human")

    def _rendered(self) -> tuple[str | Frame | None, ...] | None:
        if self.render_mode is None:
            gym.logger.warn('render() does nothing without a render mode: give render_mode="ansi".')
            return None
        if not self._episodes:
            raise ResetNeeded("There is nothing to render before the first reset().")
        return tuple(self._episodes[slot].show(self.render_mode) for slot in sorted(self._episodes))

    def find_instruction(self, instruction_id: object) -> int:
        """The position within the split of the instruction with this id.

        Raises UnknownNameError if no instruction has it, DataError if the ids of the split are not unique.
        """
        try:
            return self._positions[operator.index(instruction_id)]  # type: ignore[arg-type]  # TypeError is caught
        except (KeyError, TypeError):
            ids = list(self._positions)
            raise UnknownNameError(
                f"Unknown instruction_id {instruction_id!r}: expected one of the {len(ids)} integer ids of split "
                f"{self.split!r} of data set {self.dataset.name!r}, such as {ids[0]} or {ids[-1]}."
            ) from None

    @cached_property
    def _positions(self) -> dict[int, int]:
        positions: dict[int, int] = {}
        for position, instruction in enumerate(self.instructions):
            if (first := positions.setdefault(instruction.id, position)) != position:
                raise DataError(
                    f"Instruction ids must be unique within a split, but instructions {first} and {position} of split "
                    f"{self.split!r} of data set {self.dataset.name!r} both have id {instruction.id}."
                )
        return positions


def instruction_columns(instructions: Sequence[Instruction], split: str) -> dict[str, Column]:
    """The info that every reset and step has: which instruction was asked."""
    num = len(instructions)
    return {
        "instruction_id": np.fromiter((i.id for i in instructions), dtype=np.int64, count=num),
        "split": np.full(num, split, dtype=object),
    }


def check_options(given: Iterable[str], options: Sequence[str]) -> None:
    """Raises UnknownNameError for an option of `reset` that does not exist."""
    for key in given:
        if key not in options:
            raise did_you_mean("reset option", key, options)


def check_response(response: object, slot: int | None = None) -> str:
    """The response itself, once it is known to lie in the action space; `slot` is its place in a batch."""
    if isinstance(response, str) and len(response) <= MAX_TEXT_LENGTH and find_surrogate(response) < 0:
        return response
    where = "" if slot is None else f" in slot {slot}"
    if not isinstance(response, str):
        raise InvalidResponseTypeError(
            f"Expected a response that is a str{where}, got {type(response).__name__}: {response!r:.60}. "
            "Decode tokens to text before step."
        )
    if len(response) > MAX_TEXT_LENGTH:
        raise InvalidResponseError(
            f"Expected a response of at most {MAX_TEXT_LENGTH} code points{where}, got {len(response)}. "
            "Shorten it before step: the environment never cuts a response."
        )
    at = find_surrogate(response)
    raise InvalidResponseError(
        f"Expected a response that can be written as UTF-8{where}, got a lone surrogate {response[at]!r} at position "
        f'{at}. Decode with errors="replace", or encode with "surrogatepass" and decode again.'
    )


def _unscored(
    name: str, verdicts: Verdicts, instructions: Sequence[Instruction], responses: Sequence[str]
) -> UnscoredError:
    missing = np.isnan(verdicts.scores)
    first = int(np.argmax(missing))
    reason = verdicts.details[UNSCORED_REASON][first] if UNSCORED_REASON in verdicts.details else ""
    return UnscoredError(
        f"Oracle {name!r} gave no verdict on {np.count_nonzero(missing)} of {len(missing)} responses. The first is "
        f"{shorten(responses[first])} to instruction {instructions[first].id}, {shorten(instructions[first])}"
        f"{f' ({reason})' if reason else ''}. The episode is still open: call step again, or make the environment with "
        'on_unscored="truncate" to go on without a verdict.'
    )
