"""GPT-4 against Claude on the same texts, and how much of both the length of a response tells.

Identical texts and verdicts that could not be parsed are left out. "longer_response" always takes the longer of the
two, "model_always" never the reference: a judge that says no more than these says nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np

from ...data import RecordedDataset
from ...data.dataset import data_files
from ...data.files import read_records
from ...data.recorded import INDEX, JUDGEMENT
from ...data.schema import Field, check_rows
from ...data.schema import Row as Record
from ...errors import DataError
from ...seeding import keyed_rng
from ..harness.study import Row
from .recorded import LEVEL
from .targets import make_row, rows_of
from .votes import Array, Pairs, agreement, likings

CLAUDE: Final = "preferences_claude"
NUM_RESAMPLES: Final = 2_000
_FIRST = Field("first_shown", '"model" or "reference"', lambda value: value in ("model", "reference", ""), "")

Judgements = dict[tuple[str, int], Record]
"""(generator, index of the instruction) -> the stored record."""
Texts = Mapping[tuple[str, int], tuple[str, str]]
"""(generator, index) -> (reference's response, generator's response)."""


def judge_rows(dataset: RecordedDataset) -> list[Row]:
    """The rows of each judge's own figures, and of the two together on what both judged.

    Raises:
        DataError: A file is faulty.
    """
    files, extras = data_files(dataset.path), dataset.path / "extras"
    more = data_files(extras) if extras.is_dir() else {}
    texts = responses(dataset)
    one = decisive(files[f"preferences_{dataset.judge}"])
    rows = own_rows(dataset.judge.removeprefix("alpaca_eval_"), one, texts)
    if CLAUDE in more:
        other = decisive(more[CLAUDE])
        rows += own_rows("claude", other, texts) + agreement_rows(one, other, texts)
    return rows


def responses(dataset: RecordedDataset) -> Texts:
    """The reference's and the generator's response of every judged pair."""
    files = data_files(dataset.path)
    path = files.get("eval_instructions") or files["eval"]
    indices = [row["index"] for row in check_rows(read_records(path), (INDEX,), str(path))]
    references = dataset.references("eval")
    return {
        (name, index): (reference, output)
        for name in dataset.generators
        for index, reference, output in zip(indices, references, dataset.outputs(name), strict=True)
    }


def decisive(path: Path) -> Judgements:
    """The stored verdicts that prefer one of two texts.

    Raises:
        DataError: The file is faulty, or judges something twice.
    """
    rows = check_rows(read_records(path), (*JUDGEMENT, _FIRST), str(path))
    found = {(row["generator"], row["index"]): row for row in rows}
    if len(found) < len(rows):
        raise DataError(f"{path}: expected each generator and index once, got {len(rows) - len(found)} repeated.")
    return {key: row for key, row in found.items() if row["preference"] in (0, 1)}


def own_rows(judge: str, judgements: Judgements, texts: Texts) -> list[Row]:
    """Likings of one judge, and what always taking the longer response, or the model's, would agree with it."""
    known = {key: row for key, row in judgements.items() if key in texts}
    a, b = zip(*(texts[key] for key in known), strict=True)
    pairs = Pairs(("",) * len(known), a, b, published=True)
    credit = np.array([[float(row["preference"]) for row in known.values()]])
    first = np.array([{"model": 1.0, "reference": 0.0, "": np.nan}[row["first_shown"]] for row in known.values()])
    own = {"prefers_first": np.where(np.isnan(first), np.nan, credit[0] == first), **likings(credit, pairs)}
    return rows_of(judge, [own], LEVEL) + predictor_rows(f"agreement_with_{judge}", credit, a, b)


def predictor_rows(figure: str, credit: Array, a: tuple[str, ...], b: tuple[str, ...]) -> list[Row]:
    """The two predictors that know nothing of quality, on verdicts [1, n]; of equal lengths half is right."""
    length = np.sign([float(len(y) - len(x)) for x, y in zip(a, b, strict=True)])
    sides = {"longer_response": length, "model_always": np.ones(len(a))}
    return [row for name, side in sides.items() for row in rows_of(name, [{figure: agreement(credit, side)}], LEVEL)]


def agreement_rows(one: Judgements, other: Judgements, texts: Texts) -> list[Row]:
    """Agreement and kappa of two judges on what both decided: over all, then of each generator."""
    both = [key for key in one if key in other]
    if not both:
        return []
    rows = _pair_rows("", one, other, both)
    for name in sorted({generator for generator, _ in both}):
        rows += _pair_rows(f": {name}", one, other, [key for key in both if key[0] == name])
    same = [key for key in both if key in texts]
    a, b = zip(*(texts[key] for key in same), strict=True)
    for judge, judgements in {"gpt4": one, "claude": other}.items():
        credit = np.array([[float(judgements[key]["preference"]) for key in same]])
        rows += predictor_rows(f"agreement_with_{judge} where both judged", credit, a, b)
    return rows


def kappa(counts: Array) -> Array:
    """Cohen's kappa of tables [..., 2, 2] of two judges' verdicts; NaN where both always say the same one thing."""
    total = counts.sum(axis=(-2, -1))
    seen = np.trace(counts, axis1=-2, axis2=-1) / total
    chance = (counts.sum(axis=-1) * counts.sum(axis=-2)).sum(axis=-1) / total**2
    return np.asarray(np.where(chance < 1, (seen - chance) / np.where(chance < 1, 1 - chance, 1), np.nan))


def _pair_rows(suffix: str, one: Judgements, other: Judgements, keys: Sequence[tuple[str, int]]) -> list[Row]:
    votes = np.array([[int(judgements[key]["preference"]) for key in keys] for judgements in (one, other)])
    table = np.bincount(2 * votes[0] + votes[1], minlength=4).reshape(2, 2).astype(np.float64)
    rows = rows_of("claude", [{f"agreement_with_gpt4{suffix}": (votes[0] == votes[1]).astype(np.float64)}], LEVEL)
    drawn = keyed_rng(0, "kappa", suffix).multinomial(len(keys), table.ravel() / len(keys), size=NUM_RESAMPLES)
    value, spread = float(kappa(table)), kappa(drawn.reshape(-1, 2, 2).astype(np.float64))
    if not np.isnan(value) and not np.isnan(spread).all():
        bounds = np.nanpercentile(spread, (2.5, 97.5)).tolist()
        rows.append(make_row("claude", f"kappa_with_gpt4{suffix}", value, bounds, len(keys), LEVEL))
    return rows
