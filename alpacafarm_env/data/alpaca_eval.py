"""The recorded folder, made of a checkout of tatsu-lab/alpaca_eval: published responses and judges' verdicts on them.

Taken is what was judged against one and the same reference, Davinci003, by GPT-4, and by Claude beside it. Upstream's
history has more than its newest commit: Claude's verdicts lie in the checkouts of September 2023, GPT-4's repeated ones
and the inputs apart from the instructions in those of May 2023. What is left out is listed with its reason.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from ..errors import DataError
from .dataset import REFERENCE_FILE, merged
from .files import OUTPUTS, check_folder, read_records
from .recorded import DAVINCI003_SHA256, PIN_FILE, reference_digest
from .schema import DEMONSTRATION, PAIR, TEXT, Field, Row, check_rows, is_number, is_text

LICENCE: Final = (
    "Licence of the data: CC BY-NC 4.0, for research that is not commercial; attribute AlpacaFarm (arXiv 2305.14387) "
    "and AlpacaEval (github.com/tatsu-lab/alpaca_eval). The models behind the outputs have terms of their own."
)
MAX_FILE_BYTES: Final = 64 * 1024**2
"""Largest file read of a checkout. Those of 2024 have 6 million bytes at most."""
MAX_MODELS: Final = 2_000
GPT4: Final = "alpaca_eval_gpt4"
JUDGES: Final = {
    **dict.fromkeys((GPT4, f"{GPT4}_0613"), GPT4),
    **dict.fromkeys(("claude", "bedrock_claude"), "claude"),
}
"""Upstream's annotator -> the judge that it is here."""
PLACES: Final = (GPT4, f"{GPT4}_turbo_fn", "claude", "bedrock_claude", "")
"""Subfolders of a model's results that may hold their verdicts; until September 2023 these lay beside the outputs."""
GAMED: Final = ("gpt4_1106_preview_concise", "gpt4_1106_preview_verbose")
"""The two gamed baselines that upstream's length control is tied to: a model told to be brief, and to be long."""
WEIGHTED: Final = "weighted_alpaca_eval_gpt4_turbo"
"""Their judge, who compares with gpt4_1106_preview."""
ALTERNATIVE: Final = "text_davinci_003"
"""The model whose outputs.json is not what the judgements compare with."""
TABLES: Final = {
    f"data_AlpacaEval/{GPT4}_leaderboard.csv": f"leaderboard_{GPT4}",
    "data_AlpacaEval/claude_leaderboard.csv": "leaderboard_claude",
    "evaluators/evaluators_leaderboard.csv": "evaluators_leaderboard",
}
REPEATED: Final = ("gpt4_b1", "gpt4_b5")
NUM_VOTES: Final = 4


def _is_preference(value: Any) -> bool:
    return is_number(value, 0, 0) or is_number(value, 1, 2) or (isinstance(value, float) and value != value)


_VERDICT = (
    *PAIR,
    Field("preference", "0, a number from 1 to 2, or null", _is_preference, float("nan")),
    *(Field(name, TEXT, is_text, "") for name in ("generator_1", "annotator", "dataset")),
)


@dataclass
class _Recording:
    """The files of the new folder by name, and what is to be said of them."""

    checkouts: Sequence[Path]
    files: dict[str, Any] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    base: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Instruction and input as one text -> the row of its instruction, in order."""

    def bytes(self, path: Path) -> bytes:
        """A file's content, b"" where there is none; it is left out if it is too large, or not of a checkout."""
        if not os.path.lexists(path):
            return b""
        inside = any(path.resolve().is_relative_to(checkout.resolve()) for checkout in self.checkouts)
        if not inside or not path.is_file() or path.stat().st_size > MAX_FILE_BYTES:
            self.left_out[str(path)] = f"no plain file of the checkout, of at most {MAX_FILE_BYTES} bytes"
            return b""
        return path.read_bytes()

    def rows(self, path: Path, fields: Sequence[Field]) -> list[Row]:
        """A file's rows; [] where there are none, and where any is faulty: the file is left out then."""
        if not self.bytes(path):
            return []
        try:
            return check_rows(read_records(path), fields, str(path))
        except DataError as error:
            self.left_out[str(path)] = " ".join(str(error).removeprefix(f"{path}: ").split())[:200]
            return []


def make_recorded(checkouts: Sequence[Path], out: Path) -> str:
    """Writes the folder that `RecordedDataset` reads, whole or not at all; returns what is to be said of it.

    Args:
        checkouts: The newest first: what it has is not taken of an older one.
        out: A folder that is new, or empty.

    Raises:
        DataError: A folder is no such checkout, none has verdicts of GPT-4, or `out` cannot be written.
    """
    if os.path.lexists(out) and (not out.is_dir() or any(out.iterdir())):
        raise DataError(f"{out}: expected a new folder to write into, got one with content. Choose another.")
    check_folder(out)
    made = _Recording(checkouts)
    _collect(made)
    out.parent.mkdir(parents=True, exist_ok=True)
    parts = Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name[:60]}."))
    try:
        text = _write(made, parts)
        parts.chmod(0o755)  # mkdtemp makes it private
        parts.replace(out)  # the system refuses a folder with content
    finally:
        shutil.rmtree(parts, ignore_errors=True)
    return text


def _collect(made: _Recording) -> None:
    judged: dict[tuple[str, str], list[Row]] = {}
    for checkout in made.checkouts:
        _find_judged(checkout, made, judged)
    digests = {key: _digest(rows) for key, rows in judged.items()}
    ranked = Counter(digest for (_, judge), digest in digests.items() if judge == GPT4).most_common(1)
    if not ranked:
        why = "".join(f" First of what was left out: {path}: {why}." for path, why in [*made.left_out.items()][:1])
        wanted = f"verdicts of {GPT4} in results/MODEL/{GPT4}/annotations.json"
        raise DataError(f"{made.checkouts[0]}: expected {wanted}, got none that can be read.{why}")
    digest = ranked[0][0]
    standard = next(rows for key, rows in judged.items() if digests[key] == digest)
    made.base = _instructions(made, standard)
    made.files["eval_instructions"] = list(made.base.values())
    made.files[REFERENCE_FILE] = _outputs(made, standard, ALTERNATIVE, "output_1")
    if digest != DAVINCI003_SHA256:
        made.notes.append(f"the reference is not AlpacaEval's Davinci003: its sha256 is {digest}")
    for (generator, judge), rows in sorted(judged.items()):
        name = f"preferences_{GPT4}" if judge == GPT4 else f"extras/preferences_{judge}"
        if sorted(map(merged, rows)) != sorted(made.base):
            made.left_out[f"{generator} by {judge}"] = "other instructions than those of most models"
            continue
        if digests[generator, judge] != digest:
            name = f"extras/preferences_{judge.removeprefix('alpaca_eval_')}_vs_davinci003_alt"
            made.left_out[f"{generator} by {judge}"] = f"compares with other reference responses; is in {name}"
        made.files.setdefault(name, []).extend(_verdicts(made, rows, generator))
        made.files.setdefault(f"{OUTPUTS}/outputs_{generator}", _outputs(made, rows, generator, "output_2"))
    for checkout in made.checkouts:
        _add_extras(checkout, made)
    made.files[f"{PIN_FILE}.json"] = {"reference_sha256": digest}


def _digest(rows: Sequence[Row]) -> str:
    return reference_digest([merged(row) for row in rows], [row["output_1"] for row in rows])


def _find_judged(checkout: Path, made: _Recording, judged: dict[tuple[str, str], list[Row]]) -> None:
    """Adds a checkout's verdicts, by model and judge; those of other judges, or on other texts, are left out."""
    results = checkout / "results"
    models = sorted(path.name for path in results.iterdir() if path.is_dir()) if results.is_dir() else []
    if len(models) > MAX_MODELS or not (models or (checkout / "src" / "alpaca_eval").is_dir()):
        wanted = f"a checkout of github.com/tatsu-lab/alpaca_eval, with 1 to {MAX_MODELS} folders in results"
        raise DataError(f"{checkout}: expected {wanted}, got {len(models) or 'none'}.")
    paths = [(model, place, results / model / place / "annotations.json") for model in models for place in PLACES]
    digests: dict[str, set[bytes]] = {model: set() for model in models}
    for model, _, path in paths:
        digests[model].add(hashlib.sha256(made.bytes(path)).digest())
    for model, place, path in paths:
        if not (rows := made.rows(path, _VERDICT)):
            if place and path.parent.is_dir():
                made.left_out.setdefault(str(path), "the file is missing")
            continue
        outputs = made.rows(results / model / "model_outputs.json", DEMONSTRATION)
        texts = {merged(row): row["output"] for row in outputs}
        same = sum(texts.get(merged(row)) == row["output_2"] for row in rows)
        annotator = rows[0]["annotator"]
        if (judge := JUDGES.get(annotator)) is None:
            made.left_out[str(path)] = f"judged by {annotator or 'nobody named'}"
        elif 2 * same < len(rows):
            digest = hashlib.sha256(path.read_bytes()).digest()
            copies = [name for name, contents in digests.items() if digest in contents and name != model]
            copied = f"; a byte copy of {', '.join(copies)}" if copies else ""
            made.left_out[str(path)] = f"{same} of its {len(rows)} texts are the model's outputs{copied}"
        elif (model, judge) not in judged:
            judged[model, judge] = rows
            if annotator not in (GPT4, "claude"):
                made.notes.append(f"{model} was judged by {annotator}, which counts as {judge}")


def _instructions(made: _Recording, standard: Sequence[Row]) -> dict[str, dict[str, Any]]:
    """The instructions, in the order of their judgements, the input apart where an example of upstream's has it so."""
    examples = [path for checkout in made.checkouts for path in sorted((checkout / "example").glob("eval_*.json"))]
    apart = {merged(row): row for path in examples for row in made.rows(path, DEMONSTRATION) if row["input"]}
    if not apart:
        made.notes.append("instructions and inputs are one text: no checkout has them apart (those of May 2023 do)")
    names = ("instruction", "input", "dataset")
    rows = {merged(row): apart.get(merged(row), row) for row in standard}
    return {text: {"index": i, **{name: rows[text][name] for name in names}} for i, text in enumerate(rows)}


def _outputs(made: _Recording, rows: Sequence[Row], generator: str, name: str) -> list[dict[str, Any]]:
    """A generator's outputs in the order of the instructions, for each that has one."""
    texts = {merged(row): row[name] for row in rows}
    known = [(row, texts[text]) for text, row in made.base.items() if text in texts]
    return [{**row, "output": output, "generator": generator} for row, output in known]


def _verdicts(made: _Recording, rows: Sequence[Row], generator: str) -> list[dict[str, Any]]:
    """Credits of the model: upstream's 1 is the reference's win, 2 the model's, 0 or 1.5 stand for equal texts.

    Which of the two was shown first is not stored: it is drawn again as upstream drew it.
    """
    verdicts = []
    for row in rows:
        text, value = merged(row), float(row["preference"])
        switched = random.Random(f"is_switched_outputs{text}0").choices([False, True])[0]
        more = {"first_shown": "model" if switched else "reference", "annotator": row["annotator"]}
        credit = None if value != value else value - 1 if value else 0.5
        place = made.base[text]["index"]
        verdicts.append({"index": place, "generator": generator, "preference": credit, **more})
    return sorted(verdicts, key=lambda row: int(row["index"]))


def _add_extras(checkout: Path, made: _Recording) -> None:
    """What else there is: the gamed baselines, the other Davinci003, repeated verdicts, published tables."""
    results, gamed = checkout / "results", list[dict[str, Any]]()
    for name in (*GAMED, ALTERNATIVE):
        outputs = _outputs(made, made.rows(results / name / "model_outputs.json", DEMONSTRATION), name, "output")
        if name == ALTERNATIVE and outputs and outputs != made.files[REFERENCE_FILE]:
            made.files.setdefault("extras/davinci003_alt_results_dir", outputs)
        elif name != ALTERNATIVE and len(outputs) == len(made.base):
            made.files.setdefault(f"{OUTPUTS}/outputs_{name}", outputs)
            rows = made.rows(results / name / WEIGHTED / "annotations.json", _VERDICT)
            gamed += _verdicts(made, [row for row in rows if merged(row) in made.base], name)
    if gamed:
        made.files.setdefault(f"extras/preferences_{WEIGHTED}_gamed", gamed)
    one, five = (_votes(checkout / "src/alpaca_eval/configs" / judge, made) for judge in REPEATED)
    if both := [key for key in one if key in five]:
        asked = [((row["instruction"], row["input"]), row["index"]) for row in made.base.values()]
        places: dict[Any, int] = dict(asked)
        names = (
            "instruction",
            "input",
            "output_1",
            "output_2",
            *(f"preference_{judge}" for judge in REPEATED),
            "index",
        )
        pairs = [dict(zip(names, (*key, one[key], five[key], places.get(key[:2])), strict=True)) for key in both]
        made.files.setdefault("extras/crossannotations_gpt4_4seeds", pairs)
    for source, name in TABLES.items():
        if content := made.bytes(checkout / "src/alpaca_eval/leaderboards" / source):
            made.files.setdefault(f"extras/{name}.csv.gz", content)


def _votes(folder: Path, made: _Recording) -> dict[tuple[str, ...], list[float]]:
    """Pair -> GPT-4's verdicts by one prompt in all four runs, each 1 for output_2 or 0."""
    votes: dict[tuple[str, ...], list[float]] = {}
    for run in range(NUM_VOTES):
        for row in made.rows(folder / f"annotations_seed{run}_configs.json", _VERDICT):
            key = (row["instruction"], row["input"], row["output_1"], row["output_2"])
            votes.setdefault(key, []).append(float(row["preference"]) - 1)
    return {key: four for key, four in votes.items() if len(four) == NUM_VOTES and {*four} <= {0.0, 1.0}}


def _write(made: _Recording, folder: Path) -> str:
    """Writes the files and `recorded.json`, which lists them with hashes and rows, and what was left out."""
    listed: dict[str, dict[str, Any]] = {}
    for name, content in sorted(made.files.items()):
        if isinstance(content, dict):
            continue
        lines = content if isinstance(content, list) else []
        file = f"{name}.jsonl.gz" if lines else name
        path = folder / file
        path.parent.mkdir(exist_ok=True)
        plain = "".join(f"{json.dumps(row)}\n" for row in lines).encode() if lines else content
        path.write_bytes(packed := gzip.compress(plain, mtime=0))
        listed[file] = {"rows": len(lines) or plain.count(b"\n"), "sha256": hashlib.sha256(packed).hexdigest()}
    found = {"licence": LICENCE, "notes": made.notes, "left_out": made.left_out, "files": listed}
    pin = made.files[f"{PIN_FILE}.json"] | found
    (folder / f"{PIN_FILE}.json").write_text(f"{json.dumps(pin, indent=1)}\n", encoding="utf-8")
    text = [f"{file}: {each['rows']} rows" for file, each in listed.items() if not file.startswith(OUTPUTS)]
    text.append(f"{OUTPUTS}: {len(listed) - len(text)} models")
    text += made.notes + [f"left out: {what}: {why}" for what, why in made.left_out.items()]
    return "\n".join([*text, f"hashes: {PIN_FILE}.json", LICENCE])
