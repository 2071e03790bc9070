"""What the cells of the over-optimization study share: how responses are judged, and the rows and files of evaluations.

In order: reward models (`reward_models`), samples of the SFT policy (`samples`), then best-of-n and PPO on each
treatment (`best_of_n`, `ppo`). All treatments of a seed see the same prompts, the same samples and the same draws
(common random numbers).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ... import sandbox
from ...data.files import write_atomic
from ...errors import DataError
from ...oracles.base import RewardOracle, judge
from ..harness.evaluation import SCORES, Evaluation, evaluate, judges_of
from ..harness.stored import Shape, cell_file, read_stored
from ..harness.study import Row
from .curves import COLUMNS, REQUIRED
from .plans import TreatmentPlan
from .treatments import DISAGREEMENT

EVALUATED: Mapping[str, Shape] = {"row": dict, "responses": list}
"""What is kept of an evaluation, and its shape."""


@dataclass(frozen=True)
class Assessment:
    """What was found for B responses: the evaluation, and the members' disagreement [B], NaN where one decides."""

    evaluation: Evaluation
    disagreement: NDArray[np.float64]

    def means(self) -> dict[str, float | None]:
        """The table's measures."""
        means: dict[str, float | None] = dict(self.evaluation.means())
        return {**{name: means[name] for name in (*SCORES, "length")}, DISAGREEMENT: known_mean(self.disagreement)}

    def content(self) -> dict[str, list[Any]]:
        """Everything per response, JSON-able; NaN as null."""
        columns = {**self.evaluation.scores, DISAGREEMENT: self.disagreement, "finished": self.evaluation.finished}
        values = {name: [None if x != x else x for x in column.tolist()] for name, column in columns.items()}
        return {
            "instructions": list(self.evaluation.instructions),
            "responses": list(self.evaluation.responses),
            **values,
        }


def assess(
    instructions: Sequence[str],
    responses: Sequence[str],
    proxy: RewardOracle,
    *,
    finished: NDArray[np.bool_] | None = None,
) -> Assessment:
    """Scores B responses by the proxy and by the sandbox's judges; the proxy is asked once."""
    found = evaluate(instructions, responses, judges_of(sandbox.SANDBOX, proxy=None), finished=finished)
    scores, spread = ask(proxy, instructions, responses)
    scored = Evaluation(
        found.instructions, found.responses, {**found.scores, "proxy": scores}, found.length, found.finished
    )
    return Assessment(scored, spread)


def ask(
    proxy: RewardOracle, instructions: Sequence[str], responses: Sequence[str]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The proxy's scores [B], and how far an ensemble's members are apart [B] (NaN where one model decides)."""
    verdicts = judge(proxy, instructions, responses)
    spread = verdicts.details.get(DISAGREEMENT, np.full(len(responses), np.nan))
    return verdicts.scores, np.asarray(spread, np.float64)


def known_mean(values: NDArray[np.float64]) -> float | None:
    """Mean of what is known; None where nothing is."""
    known = values[~np.isnan(values)]
    return math.fsum(known.tolist()) / len(known) if len(known) else None


def make_row(
    plan: TreatmentPlan, *, kl: float, means: Mapping[str, float | None], step: int | None = None, n: int | None = None
) -> Row:
    """A row of `COLUMNS`.

    Raises:
        DataError: Its KL, proxy or gold is not a finite number: nothing can be said of a curve with a gap, so that the
            cell fails and not the report of all others.
    """
    facts: Row = {
        "treatment": plan.found.name,
        "method": plan.method,
        "seed": plan.seed,
        "step": step,
        "n": n,
        "kl_exact": kl,
    }
    row = {name: {**facts, **means}[name] for name in COLUMNS}
    for name in REQUIRED:
        if row[name] is None or not math.isfinite(row[name]):
            where = f"step {step}" if n is None else f"n {n}"
            raise DataError(f"{plan.cell}, {where}: expected a {name} of one response at least, got none.")
    return row


def write_evaluation(plan: TreatmentPlan, number: int, row: Row, content: dict[str, list[Any]]) -> None:
    """Stores the row of an evaluation with its responses."""
    file = plan.evaluation_file(number)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(file, json.dumps({"row": row, **content}) + "\n")


def read_evaluation(plan: TreatmentPlan, number: int) -> dict[str, Any]:
    """What `write_evaluation` stored: "row", and columns of one value a response.

    Raises:
        CheckpointError: It is gone or damaged.
    """
    cell = cell_file(plan.out, plan.cell)
    remedy = f"To run the cell anew remove {plan.folder} and, if it is there, {cell}, and call again."
    return read_stored(plan.evaluation_file(number), *EVALUATED, shape=EVALUATED, remedy=remedy)


def describe(cell: str, rows: Sequence[Row]) -> str:
    """One line about a finished cell: gold at its start, peak and end, proxy, KL."""
    peak = max(rows, key=lambda row: -math.inf if row["gold"] is None else row["gold"])
    where = f"step {peak['step']}" if peak["n"] is None else f"n {peak['n']}"
    first, last = rows[0], rows[-1]
    gold = f"gold {_shown(first['gold'])}, peak {_shown(peak['gold'])} at {where}, end {_shown(last['gold'])}"
    return f"{cell}: {gold}; proxy {_shown(first['proxy'])} to {_shown(last['proxy'])}; KL {_shown(last['kl_exact'])}"


def _shown(value: float | None) -> str:
    return "unknown" if value is None or value != value else f"{value:.2f}"
