"""A wrapper that writes down what a reward is worth by others: second opinions, and what the texts themselves tell."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..arguments import environment_number
from ..envs.scoring import Judge
from ..errors import DataError
from ..instructions import Instruction
from ..monitors.runs import METRICS, ROLLOUTS, append_rollouts
from ..monitors.signals import agreement, repetition
from ..oracles.base import Verdicts
from ..oracles.ensemble import DISAGREEMENT
from .rewards import ActType, ObsType, OracleSpec, Scored, _Single, scoring_of

Columns = dict[str, NDArray[Any]]


class Audited(Scored):
    """The core of `RewardAudit`."""

    def __init__(
        self,
        env: Any,
        *,
        seconds: Mapping[str, OracleSpec] | None = None,
        most: int = 64,
        out: str | Path | None = None,
    ) -> None:
        """Raises ValueError unless `most` is at least 1, DataError if `seconds` has no names or `out` is taken."""
        super().__init__(env, seconds=seconds, most=most, out=out)
        if most < 1:
            raise ValueError(f"most: expected 1 response a step or more, got {most!r}.")
        named: Any = seconds or {}
        if not (isinstance(named, Mapping) and all(named)):
            raise DataError(f"seconds: expected oracles by name, such as {{'second': 'gold'}}, got {seconds!r}.")
        self._scoring = scoring_of(self.env, type(self).__name__)
        self.seconds = {name: self._scoring.make_oracle(spec) for name, spec in named.items()}
        self._most, self._step = most, 0
        # Of several processes, one writes.
        self._out = None if out is None or environment_number("RANK", 0) else Path(out)
        self._pairs = {name: deque[tuple[float, float]](maxlen=most) for name in self.seconds}
        if self._out is not None:
            if any((self._out / name).exists() for name in (ROLLOUTS, METRICS)):
                raise DataError(f"out: expected a new folder, got that of another run, {str(out)!r}.")
            self._out.mkdir(parents=True, exist_ok=True)

    def scoring(self) -> AbstractContextManager[None]:
        """Within a step its batch is audited too."""
        return self._scoring.audited_by(self._audit)

    def _audit(
        self, instructions: Sequence[Instruction], responses: Sequence[str], verdicts: Verdicts, ask: Judge
    ) -> Columns:
        told: Columns = {"repetition": np.array([repetition(text) for text in responses])}
        for name, oracle in self.seconds.items():
            second = ask(oracle, instructions[: self._most], responses[: self._most])
            self._pairs[name].extend(zip(verdicts.scores[: self._most].tolist(), second.scores.tolist(), strict=True))
            rest = (0, len(responses) - len(second.scores))
            told[f"{name}_reward"] = np.pad(second.scores, rest, constant_values=np.nan)
            told[f"{name}_agreement"] = np.full(len(responses), agreement(*zip(*self._pairs[name], strict=True)))
            if DISAGREEMENT in second.details and DISAGREEMENT not in verdicts.details | told:
                told[DISAGREEMENT] = np.pad(second.details[DISAGREEMENT], rest, constant_values=np.nan)
        if self._out is not None:
            self._step += 1
            append_rollouts(self._out, self._step, self._rows(instructions, responses, verdicts, told))
        return told

    def _rows(
        self, instructions: Sequence[Instruction], responses: Sequence[str], verdicts: Verdicts, told: Columns
    ) -> list[dict[str, Any]]:
        facts = {name: values for name, values in {**verdicts.details, **told}.items() if values.dtype.kind == "f"}
        return [
            {
                "instruction": str(instructions[row]),
                "response": responses[row],
                "score": float(verdicts.scores[row]),
                "info": {name: float(values[row]) for name, values in facts.items()},
            }
            for row in range(min(self._most, len(responses)))
        ]


class RewardAudit(Audited, _Single[ObsType, ActType]):
    """Reports what a reward is worth by others, in `info` beside it; the reward stays bit-identical.

    `info` has `repetition`, the share of three words in a row that a response has had before; for each of `seconds`,
    oracles by name, their score of the response, `<name>_reward`, and the rank correlation of reward and score over the
    last responses, `<name>_agreement` (NaN of fewer than three); and `disagreement` where one of them is an ensemble.
    `monitors` read all of these. Each of `seconds` is asked about the first `most` responses of a step, and agreement
    is over as many; the other responses' score is NaN. Of several processes each has an agreement of its own.

    `out` is a new folder for rollouts.jsonl.gz: the same responses with reward, components and second opinions, a line
    each; `alpacafarm look` shows it. Its steps are those of the environment. Our agents write such a file by
    themselves, by their own steps.
    """
