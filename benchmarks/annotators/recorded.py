"""Stored verdicts next to the simulated ones: GPT-4 asked several times, GPT-4 against Claude, and people's labels.

GPT-4's four verdicts on each pair by each of two prompts, and the humans', come from the subfolder `extras` of a folder
of recorded judgements; what is not there has no rows. prefers_longer and prefers_lists use the first verdict on a pair
and the released analysis's definitions of longer and list. People's labels, as `alpacafarm annotate-human`
collects them, are about pairs of their own, so the paper's values stand beside them without a tolerance.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Final

import numpy as np
import pandas as pd

from ...annotators import analysis
from ...annotators.analysis import Array, Pairs, agreement, likings
from ...data import RecordedDataset
from ...data.dataset import data_files
from ...data.files import read_records
from ...data.schema import PAIR, Field, check_rows
from ...errors import DataError
from ...human.labels import load_labels
from ...seeding import keyed_rng
from ...statistics import Interval
from ..harness.estimates import percentiles
from ..harness.sources import eval_rows, extra_files, judgements, published_table
from ..harness.study import Row
from .judges import TARGETS, Target, make_row, rows_of

LEVEL: Final = "recorded"
CROSS: Final = "crossannotations_gpt4_4seeds"
HUMAN: Final = "human_crossannotations_sample16"
TABLE: Final = "evaluators_leaderboard.csv.gz"
CLAUDE: Final = "preferences_claude"
JUDGES: Final = ("gpt4_b1", "gpt4_b5")
NUM_VOTES: Final = 4
NUM_RESAMPLES: Final = 2_000
PUBLISHED: Final = {
    "gpt4_b1": ("gpt4", None),
    "gpt4_b5": ("alpaca_farm_greedy_gpt4", None),
    "longest": ("longest", 1e-9),  # the same computation on the same pairs
}
"""Recorded judge -> its nearest row of the published table, and its tolerance. GPT-4's are later runs, the second with
another prompt, so they are for comparison only."""
# Not prefers_lists: the table counts lists in 111 of the pairs, by an unknown rule; the definition here finds 53.
_COLUMNS: Final = {
    "variance": ("Variance", 100.0),
    "prefers_longer": ("Proba. prefer longer", 1.0),
    "prefers_1": ("Proba. prefer 1", 1.0),
}
_PEOPLE: Final = {
    "people": ("people", "human"),
    "judge": ("their pairs' judge", "sim_gpt4"),
    "annotator": ("people", ""),
}
"""Kind of a judge among people's labels -> its name in the table, and the paper's judge that it is put next to."""


def _is_votes(value: object) -> bool:
    return isinstance(value, list) and len(value) == NUM_VOTES and all(vote in (0, 1) for vote in value)


_VOTES = tuple(Field(f"preference_{judge}", f"{NUM_VOTES} numbers, each 0 or 1", _is_votes) for judge in JUDGES)
_LABEL = Field("preference", "0 or 1", lambda value: value in (0, 1))
_FIRST = Field("first_shown", '"model" or "reference"', lambda value: value in ("model", "reference", ""), "")


def cross_rows(folder: Path) -> list[Row]:
    """The rows of the repeated verdicts, of always taking the longer response, and of the human labels.

    Raises:
        DataError: A file is faulty.
    """
    files = extra_files(folder)
    if CROSS not in files:
        return []
    pairs, votes = read_cross(files[CROSS])
    # 0 where output_1 is strictly longer, else 1.
    longest = np.array([[float(len(a) <= len(b)) for a, b in zip(pairs.a, pairs.b, strict=True)]] * NUM_VOTES)
    targets, rows = published_targets(folder / "extras" / TABLE), list[Row]()
    for judge, opinions in {**votes, "longest": longest}.items():
        own = {"variance": 1 - analysis.self_agreement(opinions), "disagreement": analysis.disagreement(opinions)}
        own |= {**likings(opinions[:1], pairs), "prefers_1": 1 - opinions.mean(axis=0)}
        rows += rows_of(judge, [own], LEVEL, targets.get(judge))
    for judge, opinions in votes.items():
        rows += rows_of("longest", [{f"agreement_with_{judge}": agreement(opinions, 2 * longest[0] - 1)}], LEVEL)
    return rows + (human_rows(files[HUMAN], pairs, votes) if HUMAN in files else [])


def read_cross(path: Path) -> tuple[Pairs, dict[str, Array]]:
    """The n pairs, and each judge's votes [4, n]: 1 for output_2, 0 for output_1."""
    rows = check_rows(read_records(path), (*PAIR, *_VOTES), str(path))
    texts = tuple(f"{row['instruction']}\n\n{row['input']}" if row["input"] else row["instruction"] for row in rows)
    a, b = (tuple(row[name] for row in rows) for name in ("output_1", "output_2"))
    votes = {judge: np.array([row[f"preference_{judge}"] for row in rows], dtype=np.float64).T for judge in JUDGES}
    return Pairs(texts, a, b, published=True), votes


def human_rows(path: Path, pairs: Pairs, votes: Mapping[str, Array]) -> list[Row]:
    """Figures of the human labels, and the judges' agreement with their majority, on the labelled pairs.

    Raises:
        DataError: The file is faulty, or labels other pairs.
    """
    labels = pd.DataFrame(check_rows(read_records(path), (*PAIR, _LABEL), str(path)))
    places = {key: place for place, key in enumerate(zip(pairs.instructions, pairs.a, pairs.b, strict=True))}
    keys = zip(labels.instruction, labels.output_1, labels.output_2, strict=True)
    labels["pair"] = [places.get(key) for key in keys]
    if (unknown := labels.pair.isna()).any():
        raise DataError(
            f"{path}: record {unknown.argmax() + 1}: expected a pair of {CROSS}, got another one. "
            "Take both files from the same copy of the data."
        )
    labelled = labels.pair.unique().astype(int)
    by_pair = labels.assign(vote=labels.groupby("pair").cumcount()).pivot(index="vote", columns="pair")
    human = by_pair.preference[labelled].to_numpy(dtype=np.float64)
    itself, side = analysis.self_agreement(human), analysis.majority(human)
    rows = rows_of("human", [{"agreement": itself, "variance": 1 - itself}], LEVEL)
    for judge, every in votes.items():
        own = every[:, labelled]
        rows += rows_of(judge, [{"agreement": agreement(own, side), "bias": analysis.bias(own, side)}], LEVEL)
    return rows


def published_targets(path: Path) -> dict[str, dict[str, Target]]:
    """Recorded judge -> figure -> the published table's value of its nearest relative; {} without the table.

    Raises:
        DataError: The file is no such table.
    """
    if not path.is_file():
        return {}
    table = published_table(path, [name for name, _ in _COLUMNS.values()], [name for name, _ in PUBLISHED.values()])
    return {
        judge: {f: Target(table[column][name] / unit, tolerance) for f, (column, unit) in _COLUMNS.items()}
        for judge, (name, tolerance) in PUBLISHED.items()
    }


def recorded_rows(dataset: RecordedDataset) -> list[Row]:
    """The rows of all recorded judges: repeated verdicts, each judge's figures, GPT-4 and Claude where both decided.

    Raises:
        DataError: A file is faulty.
    """
    extras, texts = extra_files(dataset.path), responses(dataset)
    gpt4 = decisive(data_files(dataset.path)[f"preferences_{dataset.judge}"], texts)
    rows = cross_rows(dataset.path) + own_rows(dataset.judge.removeprefix("alpaca_eval_"), gpt4)
    if CLAUDE in extras:
        claude = decisive(extras[CLAUDE], texts)
        rows += own_rows("claude", claude) + agreement_rows(gpt4, claude)
    return rows


def responses(dataset: RecordedDataset) -> pd.DataFrame:
    """(generator, index) -> columns a, the reference's response, and b, the generator's."""
    indices = eval_rows(dataset)["index"]
    pairs = {name: {"a": dataset.references("eval"), "b": dataset.outputs(name)} for name in dataset.generators}
    frames = {name: pd.DataFrame(columns, index=indices) for name, columns in pairs.items()}
    return pd.concat(frames, names=["generator", "index"])


def decisive(path: Path, texts: pd.DataFrame) -> pd.DataFrame:
    """(generator, index) -> preference (0 or 1), first_shown, and the texts a and b; ties and no verdicts are left out.

    Raises:
        DataError: The file is faulty, or judges something twice.
    """
    frame = judgements(path, _FIRST).set_index(["generator", "index"])
    return frame[frame.preference.isin((0, 1))].join(texts).astype({"preference": float})


def own_rows(judge: str, frame: pd.DataFrame) -> list[Row]:
    """Likings of one judge, and how often it agrees with rules that know nothing of quality."""
    complete = frame.dropna(subset=["a", "b"])
    credit = complete.preference.to_numpy()
    first = complete.first_shown.map({"model": 1.0, "reference": 0.0}).to_numpy(dtype=np.float64)
    pairs = Pairs(("",) * len(complete), tuple(complete.a), tuple(complete.b), published=True)
    own = {"prefers_first": np.where(np.isnan(first), np.nan, credit == first), **likings(credit[None], pairs)}
    return rows_of(judge, [own], LEVEL) + predictor_rows(f"agreement_with_{judge}", complete)


def predictor_rows(figure: str, frame: pd.DataFrame) -> list[Row]:
    """Agreement of "longer_response", where equal lengths count half, and of "model_always", never the reference."""
    credit = frame.preference.to_numpy()[None]
    length = np.sign((frame.b.str.len() - frame.a.str.len()).to_numpy(dtype=np.float64))
    sides = {"longer_response": length, "model_always": np.ones(len(frame))}
    return [row for name, side in sides.items() for row in rows_of(name, [{figure: agreement(credit, side)}], LEVEL)]


def agreement_rows(gpt4: pd.DataFrame, claude: pd.DataFrame) -> list[Row]:
    """Agreement and kappa of two judges on what both decided: of all, then of each generator."""
    both = gpt4.join(claude.preference.rename("other"), how="inner")
    if both.empty:
        return []
    rows = _pair_rows("", both)
    for name, own in both.groupby("generator"):
        rows += _pair_rows(f": {name}", own)
    complete = both.dropna(subset=["a", "b"])
    rows += predictor_rows("agreement_with_gpt4 where both judged", complete)
    return rows + predictor_rows("agreement_with_claude where both judged", complete.assign(preference=complete.other))


def kappa(counts: Array) -> Array:
    """Cohen's kappa of tables [..., 2, 2] of two judges' verdicts; NaN where both always say the same one thing."""
    total = counts.sum(axis=(-2, -1))
    seen = np.trace(counts, axis1=-2, axis2=-1) / total
    chance = (counts.sum(axis=-1) * counts.sum(axis=-2)).sum(axis=-1) / total**2
    return np.asarray(np.where(chance < 1, (seen - chance) / np.where(chance < 1, 1 - chance, 1), np.nan))


def _pair_rows(suffix: str, both: pd.DataFrame) -> list[Row]:
    table = np.histogram2d(both.preference, both.other, bins=2, range=((0, 1), (0, 1)))[0]
    same = np.asarray(both.preference == both.other, dtype=np.float64)
    rows = rows_of("claude", [{f"agreement_with_gpt4{suffix}": same}], LEVEL)
    drawn = keyed_rng(0, "kappa", suffix).multinomial(len(both), table.ravel() / len(both), size=NUM_RESAMPLES)
    low, high = percentiles(kappa(drawn.reshape(-1, 2, 2).astype(np.float64)))
    value = Interval(float(kappa(table)), low, high, len(both))
    if not np.isnan([value.mean, low]).any():
        rows.append(make_row("claude", f"kappa_with_gpt4{suffix}", value, LEVEL))
    return rows


def people_rows(path: Path) -> list[Row]:
    """The rows of all people, of the judge whose verdicts the pairs came with, and of each annotator.

    Raises:
        DataError: The file is faulty.
    """
    rows = []
    for (kind, name), values in load_labels(path).figures().items():
        own, like = _PEOPLE[kind]
        targets = {figure: Target(target.paper) for figure, target in TARGETS.get(like, {}).items()}
        rows += rows_of(f"{own} {name}".strip(), [values], "people", targets)
    return rows
