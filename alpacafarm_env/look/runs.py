"""Finds runs in folders, of our agents and of TRL's GRPOTrainer, and reads what the page shows of them."""

from __future__ import annotations

import json
import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, Final

from ..data.files import read_records
from ..errors import DataError
from ..monitors.runs import METRICS, ROLLOUTS, WARNINGS, lines_of

STATE: Final = "trainer_state.json"
COMPLETIONS: Final = "completions/completions_*.parquet"
GOLD: Final = r"(?:.*[/_])?gold(?:_reward)?"
"""Names of gold scores; the sandbox's gold_complete and others are parts of one."""
PANELS: Final = (
    ("Proxy, trained on", "reward units", "score/mean|reward/best|reward/mean|reward"),
    ("Gold reward", "reward units", f"info/{GOLD}|rewards/{GOLD}/mean"),
    ("KL to the reference", "nats a response", "kl/k1|kl/k3"),
    ("KL to the reference", "nats a token", "kl"),  # TRL's mean over tokens
    ("Length of a response", "tokens", "tokens/mean|completions/mean_length"),
    ("Entropy", "nats a token", "entropy"),
    ("Loss", "as the run defines it", "loss"),
)
"""Title, unit, and the names of the metrics in it, a regular expression."""
MOST_POINTS: Final = 200_000
"""Points of the curves of all runs together."""


@dataclass
class Run:
    """What the page shows of a run.

    Attributes:
        steps: The steps of the curves, ascending.
        curves: Each with its panel's number, its metric, and a value (None: unknown) a step.
        warnings: Of monitors, each with step, signal and text.
        texts: Step -> responses that were kept.
        notes: What is missing or left out.
    """

    name: str
    steps: Sequence[int] = ()
    curves: list[dict[str, Any]] = field(default_factory=list)
    warnings: list[dict[str, Any]] = field(default_factory=list)
    texts: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def find_runs(roots: Sequence[Path]) -> dict[str, Path]:
    """Name -> folder of each run in or below the given folders; a name is the path from there, told apart if need be.

    Raises:
        DataError: One is no folder, or has no run.
    """
    found: dict[Path, str] = {}
    for root in roots:
        if not root.is_dir():
            raise DataError(f"{root}: expected the folder of a run, found {'a file' if root.exists() else 'none'}.")
        runs = list(_below(root))
        if not runs:
            ours, trls = f"{METRICS} or {ROLLOUTS} (an agent's out)", f"{COMPLETIONS} or {STATE} (TRL's output_dir)"
            looked = f"a folder with {ours}, or with {trls}"
            raise DataError(f"{root}: expected a run: {looked}, there or below, found none. Name another folder.")
        for run in runs:
            inner = run.relative_to(root).parts
            parts = (root.resolve().name, *inner) if len(roots) > 1 or not inner else inner
            found.setdefault(run.resolve(), "/".join(parts))
    counts = Counter(found.values())
    return {name if counts[name] == 1 else str(path): path for path, name in found.items()}


def _below(root: Path) -> Iterator[Path]:
    for place, subfolders, files in os.walk(root):
        folder, is_ours = Path(place), METRICS in files or ROLLOUTS in files
        is_trl = STATE in files or any(folder.glob(COMPLETIONS)) or any(folder.glob(f"checkpoint-*/{STATE}"))
        if is_ours or is_trl:
            yield folder
        inner = r"checkpoint-.*|round-.*" if is_ours else r"checkpoint-.*"  # a run's rounds are no runs of their own
        subfolders[:] = sorted(each for each in subfolders if not re.fullmatch(inner, each))


def read_runs(folders: Mapping[str, Path], *, most_bytes: float) -> list[Run]:
    """Reads runs, in their order; texts take `most_bytes` together, as JSON.

    Raises:
        DataError: pyarrow is missing, for TRL's completions.
        OSError: A file may not be read.
    """
    num_texts = sum((path / ROLLOUTS).is_file() or any(path.glob(COMPLETIONS)) for path in folders.values())
    shares = MOST_POINTS / len(folders), most_bytes / max(num_texts, 1)
    return [_read(name, folder, *shares) for name, folder in folders.items()]


def _read(name: str, folder: Path, most_points: float, most_bytes: float) -> Run:
    run, faults = Run(name), Counter[str]()
    has_metrics = (folder / METRICS).is_file()
    is_ours = has_metrics or (folder / ROLLOUTS).is_file()
    metrics = list(_lines(folder / METRICS, faults) if has_metrics else _log_history(folder, faults))
    _set_curves(run, metrics, most_points)
    warnings = _lines(folder / WARNINGS, faults) if (folder / WARNINGS).is_file() else ()
    run.warnings = [{key: each.get(key, "") for key in ("step", "signal", "text")} for each in warnings]
    rows: Iterable[tuple[int, dict[str, Any]]] = ()
    if (folder / ROLLOUTS).is_file():
        rows = ((row["step"], _rollout(row)) for row in _lines(folder / ROLLOUTS, faults))
    elif not is_ours:
        rows = _completions(run, folder, metrics, faults)
    run.texts, every, cut = thinned(rows, most_bytes)
    if every > 1:
        run.notes.append(f"texts of one step in {every}, and of the last one (--texts-mb, or fewer runs, for more)")
    if cut:
        run.notes.append("the first texts alone of steps that have too many (--texts-mb, or fewer runs, for more)")
    if not run.texts:
        files = f"{ROLLOUTS}: keep_rollouts" if is_ours else f"{COMPLETIONS}: log_completions=True"
        run.notes.append(f"no responses kept ({files})")
    panels, responses = {curve["panel"] for curve in run.curves}, (row for rows in run.texts.values() for row in rows)
    if 1 not in panels and all(row["gold"] is None for row in responses):
        run.notes.append("no gold (in the sandbox, AddScore(env, oracle='gold') puts it beside the proxy)")
    run.notes += [f"damaged and left out in {file}: {count}" for file, count in faults.items()]
    return run


def _lines(path: Path, faults: Counter[str]) -> Iterator[dict[str, Any]]:
    """The lines of a run's file; damaged ones are counted."""
    for row in lines_of(path):
        if row is None:
            faults[path.name] += 1
        else:
            yield row


def _log_history(folder: Path, faults: Counter[str]) -> Iterator[dict[str, Any]]:
    """The log of a trainer's newest state: a checkpoint's, or the one that it leaves at the end."""
    best: list[Any] = []
    for path in (*folder.glob(f"checkpoint-*/{STATE}"), folder / STATE):
        try:
            log = json.loads(path.read_bytes())["log_history"] if path.is_file() else []
        except (ValueError, KeyError, TypeError):
            faults[STATE] += 1
            continue
        best = max(best, log, key=len)
    return (row for row in best if isinstance(row, dict) and isinstance(row.get("step"), int))


def _set_curves(run: Run, metrics: Iterable[Mapping[str, Any]], most_points: float) -> None:
    rows: dict[int, dict[str, Any]] = {}
    for row in metrics:  # TRL logs a step's evaluation in a row of its own
        rows[row["step"]] = {**rows.get(row["step"], {}), **row}
    found = dict.fromkeys(name for row in rows.values() for name in row)
    golds = sorted((name for name in found if _panel(name) == 1), key=_gold_order)
    # Agents with a KL penalty report the reward before it, score/mean, and after it.
    unused = {*golds[1:], *(["reward/mean"] if "score/mean" in found else [])}
    names = [(panel, name) for name in found if (panel := _panel(name)) is not None and name not in unused]
    every = math.ceil(len(rows) * len(names) / most_points) or 1
    steps = sorted(rows)
    run.steps = sorted({*steps[::every], *steps[-1:]})
    run.curves = [
        {"panel": panel, "metric": name, "values": [_number(rows[step].get(name)) for step in run.steps]}
        for panel, name in sorted(names)
    ]
    if not rows:
        run.notes.append("no step's metrics yet")
    if every > 1:
        run.notes.append(f"curves of one step in {every}, and of the last one")


def _panel(metric: str) -> int | None:
    """The number of the metric's panel; None: the page does not show it."""
    return next((i for i, (*_, names) in enumerate(PANELS) if re.fullmatch(names, metric, re.IGNORECASE)), None)


def _is_gold(name: str) -> bool:
    return re.fullmatch(GOLD, name, re.IGNORECASE) is not None


def _gold_order(name: str) -> tuple[bool, str]:
    """Of more names of gold the one that docs and studies use comes first."""
    return "gold_reward" not in name, name


def thinned(
    rows: Iterable[tuple[int, dict[str, Any]]], most_bytes: float
) -> tuple[dict[int, list[dict[str, Any]]], int, int]:
    """Rows by step, within a number of bytes of JSON: of each 2^k-th step and of the last one.

    Returns:
        Step -> its rows, the first up to half of the bytes; 2^k; how many rows these steps lack.
    """
    kept: dict[int, tuple[int, list[dict[str, Any]], int, int]] = {}
    every = 1
    for number, (step, group) in enumerate(groupby(rows, key=itemgetter(0))):
        kept = {each: value for each, value in kept.items() if not each % every}  # what was last may go now
        texts, size, cut = [], 0, 0
        for _, row in group:
            length = len(json.dumps(row))
            if cut or size + length > most_bytes / 2:
                cut += 1
            else:
                texts.append(row)
                size += length
        kept[number] = step, texts, size, cut
        while sum(size for *_, size, _ in kept.values()) > most_bytes:
            every *= 2
            kept = {each: value for each, value in kept.items() if not each % every or each == number}
    return {step: texts for step, texts, *_ in kept.values()}, every, sum(cut for *_, cut in kept.values())


def _number(value: Any) -> float | None:
    """Six digits of a finite number."""
    return float(f"{value:.6g}") if isinstance(value, int | float) and math.isfinite(value) else None


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    return {name: number for name, value in values.items() if (number := _number(value)) is not None}


def _rollout(row: Mapping[str, Any]) -> dict[str, Any]:
    """A response as the page reads it, of a line of `ROLLOUTS`."""
    info = _numbers(row["info"]) if isinstance(row.get("info"), dict) else {}
    golds = sorted(filter(_is_gold, info), key=_gold_order)
    return {
        "instruction": _text(row.get("instruction")),
        "response": _text(row.get("response")),
        "score": _number(row.get("score")),
        "gold": info.pop(golds[0]) if golds else None,
        "tokens": row.get("tokens"),
        "finished": row.get("finished"),
        "info": info,
    }


def _completions(
    run: Run, folder: Path, metrics: Iterable[Mapping[str, Any]], faults: Counter[str]
) -> Iterator[tuple[int, dict[str, Any]]]:
    """TRL's completions. A step's file has a column a reward function; their weights are not told."""
    found = (re.fullmatch("rewards/(.+)/mean", name) for row in metrics for name in row)
    logged = dict.fromkeys(match[1] for match in found if match)
    for path in sorted(folder.glob(COMPLETIONS), key=lambda path: (len(path.name), path.name)):
        try:
            records: list[Any] = read_records(path)
        except DataError:
            if find_spec("pyarrow") is None:
                raise
            faults[path.name] += 1
            continue
        for row in records:
            told = {name: value for name, value in row.items() if name not in ("step", "prompt", "completion")}
            names = [name for name in logged or told if name in told and name != "advantage"]
            names = [name for name in names if not _is_gold(name)] or names
            rewards = _numbers({name: told[name] for name in names}).values()
            if len(names) > 1 and not any("unweighted" in note for note in run.notes):
                run.notes.append(f"a response's score is the unweighted sum of {', '.join(names)}")
            if len(names) == 1 and not _is_gold(names[0]):
                del told[names[0]]
            own = {"instruction": row.get("prompt"), "response": row.get("completion"), "info": told}
            yield row["step"], _rollout({**own, "score": sum(rewards) if rewards else None})


def _text(value: Any) -> str | None:
    """A text, or that of a conversation, a list of messages."""
    if not isinstance(value, list):
        return None if value is None else str(value)
    said = [(each.get("role"), _text(each.get("content", each.get("text")))) for each in value]
    return "\n\n".join(f"{role}: {text}" if role and len(said) > 1 else text or "" for role, text in said)
