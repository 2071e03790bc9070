"""Sample responses of the win-rate curve: the same instructions before and after PPO, with what the judges said."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ...data import Dataset
from ...errors import DataError
from ...oracles.base import judge
from ...oracles.registry import make_oracle
from ..harness.evaluation import missing_at, subset
from ..harness.report import Table
from .plan import RunPlan
from .report import NAMES
from .runs import read_evaluation

NUM_SAMPLES = 6

_SAID = {
    "gold": "gold {:.2f}",
    "proxy": "proxy {:.2f}",
    "win_rate_simulated": "win by p_sim^eval {:.2g}",
    "win_rate_human": "win by human raters {:.2g}",
    "win_rate": "win by the judge {:.2g}",
}
"""How a judge's verdict on one response reads."""


def samples_table(plan: RunPlan, dataset: Dataset, step: int, label: str) -> Table:
    """Some eval instructions of one run with the responses at step 0 and at `step`, and the reference if there is one.

    Args:
        plan: The run.
        dataset: Its data.
        step: The step that stands for "after".
        label: Where the numbers come from, for the caption.
    """
    before, after = (read_evaluation(plan, number)["eval"] for number in (0, step))
    rows = subset(len(before["instructions"]), NUM_SAMPLES)
    to_beat = references(dataset)
    header = ("instruction", "SFT (step 0)", f"PPO (step {step})", *(("reference",) if to_beat else ()))
    columns = [
        [before["instructions"][row] for row in rows],
        describe_responses(dataset, before, rows),
        describe_responses(dataset, after, rows),
    ]
    if to_beat:
        columns.append([to_beat[instruction] for instruction in columns[0]])
    caption = (
        f"{len(rows)} instructions spread evenly over those evaluated, whatever the result; seed {plan.seed}. A win "
        f"is a judge's verdict on this response: 1 over the reference, 0 below it, else between. {label}"
    )
    return Table(header, list(zip(*columns, strict=True)), caption)


def describe_responses(dataset: Dataset, found: Mapping[str, Any], rows: Sequence[int]) -> list[str]:
    """The chosen responses of an evaluation file's "eval" part, each with its scores and what gold is made of."""
    texts = []
    for row, parts in zip(rows, gold_parts(dataset, found, rows), strict=True):
        ending = "" if found["finished"][row] else " [cut at the length limit]"
        said = {name: found[name][row] for name in _SAID if name in found}
        scores = [_SAID[name].format(value) for name, value in said.items() if value is not None]
        texts.append("\n\n".join(part for part in (found["responses"][row] + ending, "; ".join(scores), parts) if part))
    return texts


def gold_parts(dataset: Dataset, found: Mapping[str, Any], rows: Sequence[int]) -> list[str]:
    """What the gold of each chosen response is made of: "complete 0.5, false 1, ..."; empty where there is no gold."""
    if "gold" in missing_at(dataset.level):
        return [""] * len(rows)
    instructions, responses = ([found[key][row] for row in rows] for key in ("instructions", "responses"))
    details = judge(make_oracle("gold", dataset=dataset), instructions, responses).details
    numeric = {name: values for name, values in details.items() if np.issubdtype(values.dtype, np.number)}
    return [", ".join(f"{name} {values[i]:.2g}" for name, values in numeric.items()) for i in range(len(rows))]


def references(dataset: Dataset) -> dict[str, str]:
    """Eval instruction -> response to beat; empty for data without references."""
    try:
        return dict(zip(map(str, dataset.instructions("eval")), dataset.references("eval"), strict=True))
    except DataError:
        return {}


def unscored_sentences(plans: Sequence[RunPlan], level: str) -> list[str]:
    """How many evaluated responses got no verdict; a judge that the level does not have is no omission."""
    counts: Counter[str] = Counter()
    for plan in plans:
        for step in plan.evaluated_steps:
            for found in read_evaluation(plan, step)["unscored"].values():
                counts.update(found)
    return [
        f"{count} responses have no verdict for the {NAMES[name]} and are left out of its means."
        for name, count in counts.items()
        if count and name not in missing_at(level)
    ]
