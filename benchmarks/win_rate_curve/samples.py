"""Sample responses of the win-rate curve: the same instructions before and after PPO, with what the judges said."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ...data import Dataset
from ...oracles.base import judge
from ...oracles.registry import make_oracle
from ..harness.evaluation import missing_at, subset
from ..harness.own_judge import has_references
from ..harness.report import Table
from .plan import RunPlan
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


def samples_table(plan: RunPlan, step: int) -> Table:
    """Some eval instructions of one run with the responses at step 0 and at `step`, and the reference if there is one.

    They are spread evenly over those evaluated, whatever the result.
    """
    dataset, evaluations = plan.dataset, [read_evaluation(plan, number)["eval"] for number in (0, step)]
    rows = subset(len(evaluations[0]["instructions"]), NUM_SAMPLES)
    instructions = [evaluations[0]["instructions"][row] for row in rows]
    columns = {
        "instruction": instructions,
        "SFT (step 0)": describe_responses(dataset, evaluations[0], rows),
        f"PPO (step {step})": describe_responses(dataset, evaluations[1], rows),
    }
    if has_references(dataset, "eval"):
        to_beat = dict(zip(map(str, dataset.instructions("eval")), dataset.references("eval"), strict=True))
        columns["reference"] = [to_beat[instruction] for instruction in instructions]
    return Table(tuple(columns), list(zip(*columns.values(), strict=True)))


def describe_responses(dataset: Dataset, found: Mapping[str, Any], rows: Sequence[int]) -> list[str]:
    """The chosen responses of an evaluation file's "eval" part, each with its scores and what gold is made of."""
    instructions, responses = ([found[key][row] for row in rows] for key in ("instructions", "responses"))
    parts: dict[str, Any] = {}
    if "gold" not in missing_at(dataset.level):
        details = judge(make_oracle("gold", dataset=dataset), instructions, responses).details
        parts = {name: values for name, values in details.items() if np.issubdtype(values.dtype, np.number)}
    texts = []
    for place, (row, response) in enumerate(zip(rows, responses, strict=True)):
        ending = "" if found["finished"][row] else " [cut at the length limit]"
        said = {name: found[name][row] for name in _SAID if name in found}
        scores = "; ".join(_SAID[name].format(value) for name, value in said.items() if value is not None)
        gold = ", ".join(f"{name} {values[place]:.2g}" for name, values in parts.items())
        texts.append("\n\n".join(text for text in (response + ending, scores, gold) if text))
    return texts


def unscored(plans: Sequence[RunPlan], level: str) -> dict[str, int]:
    """Measure -> evaluated responses without a verdict; a judge that the level does not have is no omission."""
    counts: Counter[str] = Counter()
    for plan in plans:
        for step in plan.evaluated_steps:
            for found in read_evaluation(plan, step)["unscored"].values():
                counts.update(found)
    return {name: count for name, count in counts.items() if count and name not in missing_at(level)}
