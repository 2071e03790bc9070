"""The recorded level: published responses of real models and a real judge's verdicts on them, replayed.

A folder holds `eval_instructions`, `davinci003` (the reference responses), `outputs/outputs_<generator>` and one
`preferences_<judge>` file with rows (index, generator, preference: credit of the generator in [0, 1] or null).
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import DataError, did_you_mean
from ..instructions import system_front
from ..seeding import keyed_rng
from .dataset import REFERENCE_FILE, FolderDataset, RowDataset, data_files, read_outputs
from .files import OUTPUTS, read_records
from .schema import TEXT, Fault, Field, check_rows, is_number, is_text, raise_faults, shown

DAVINCI003_SHA256 = "a4079dcd28239e8ff7ee5ea6d76b0ec3b58086c9710054e5ae6ed7d2cd975980"
"""`reference_digest` of the responses that the published judgements compare with. Two other files of that name are in
circulation, shorter ones, and give win rates up to 28 points too high.
"""
PARTS = {"preference": 0.3, "unlabeled": 0.25, "val": 0.1, "eval": 0.35}
"""Split -> its share of the instructions, where a policy is trained."""
PIN_FILE = "recorded"
"""`recorded.json` of a folder of one's own: {"reference_sha256": ...} instead of Davinci003's."""


def _is_credit(value: object) -> bool:
    return value is None or is_number(value, 0, 1)


INDEX = Field("index", "an integer of 0 or more", lambda value: type(value) is int and value >= 0)
JUDGEMENT = (INDEX, Field("generator", TEXT, is_text), Field("preference", "a number in [0, 1] or null", _is_credit))


class RecordedDataset(FolderDataset):
    """A folder of published responses and recorded judgements; its only split is eval.

    Raises DataError for a missing file, a faulty row, an instruction unknown or missing, or other reference responses
    than those the judgements were made against (their sha256 is pinned).
    """

    level = "recorded"

    def __init__(self, path: str | Path) -> None:
        super().__init__(path)
        files = data_files(self.path)
        if "eval" not in self.splits or REFERENCE_FILE not in files:
            wanted = f"the files eval_instructions and {REFERENCE_FILE} beside the judgements"
            raise DataError(f"{self.path}: expected {wanted}, got {sorted(file.name for file in files.values())}.")
        self.reference = self._read_reference(files)
        self.judge, self._judgements = self._read_judgements(files)
        outputs, read = data_files(self.path / OUTPUTS), ("eval", REFERENCE_FILE, "preferences_")
        self._output_files = {
            stem.removeprefix("outputs_"): file for stem, file in outputs.items() if stem.startswith("outputs_")
        }
        self._outputs: dict[str, tuple[str, ...]] = {}
        self._files = [file for stem, file in files.items() if stem.startswith(read)]
        if absent := sorted(set(self._judgements) - set(self._output_files)):
            wanted = "outputs/outputs_<generator> for each judged generator"
            raise DataError(f"{self.path}: expected {wanted}, got none for {', '.join(absent)}.")

    @property
    def generators(self) -> tuple[str, ...]:
        """Every generator with stored outputs, sorted."""
        return tuple(sorted(self._output_files))

    @property
    def judged(self) -> tuple[str, ...]:
        """The generators with stored judgements, sorted."""
        return tuple(sorted(self._judgements))

    def outputs(self, generator: str) -> tuple[str, ...]:
        """A generator's responses, aligned with `instructions("eval")`."""
        if generator not in self._output_files:
            raise did_you_mean("generator", generator, self.generators)
        if generator not in self._outputs:
            self._outputs[generator] = read_outputs(self._output_files[generator], self.instructions("eval"))
        return self._outputs[generator]

    def judgements(self, generator: str) -> NDArray[np.float64]:
        """Credits of a generator's responses, [number of eval instructions] in [0, 1]; NaN = no verdict."""
        if generator not in self._judgements:
            raise did_you_mean("judged generator", generator, self.judged)
        return self._judgements[generator].copy()

    def recorded_verdicts(self, generator: str | None = None) -> dict[tuple[str, str], float]:
        """(instruction, response) -> the recorded credit in [0, 1] against the reference, NaN if there is none.

        The judge sometimes judged two generators' same text differently: its verdict is NaN, unless `generator` says
        whose judgements are meant. A judgement that could not be parsed is no verdict: another one of the same text
        decides. The reference itself ties (0.5) unless judged otherwise.
        """
        names = self.judged if generator is None else (generator,)
        instructions = [str(instruction) for instruction in self.instructions("eval")]
        verdicts: dict[tuple[str, str], float] = {}
        by_text: dict[tuple[str, str], set[float]] = {}
        for name in names:
            credits = self.judgements(name).tolist()
            for text, response, credit in zip(instructions, self.outputs(name), credits, strict=True):
                if not math.isnan(credit):
                    by_text.setdefault((text, response), set()).add(credit)
                else:
                    verdicts[text, response] = math.nan
        verdicts |= {key: credits.pop() if len(credits) == 1 else math.nan for key, credits in by_text.items()}
        for text, response in zip(instructions, self.references("eval"), strict=True):
            verdicts.setdefault((text, response), 0.5)
        return verdicts

    @cached_property
    def parts(self) -> RecordedParts:
        """The same folder in the splits that training needs."""
        return RecordedParts(self)

    @cached_property
    def sha256(self) -> str:
        """Hash of the files that a replay reads."""
        digest = hashlib.sha256()
        for file in (*self._files, *(self._output_files[generator] for generator in self.judged)):
            content = file.read_bytes()
            digest.update(f"{file.name} {len(content)} ".encode() + content)
        return digest.hexdigest()

    def _read_reference(self, files: dict[str, Path]) -> str:
        """Checks the reference responses' hash and returns their generator's name."""
        path = files[REFERENCE_FILE]
        expected = _pinned(files[PIN_FILE]) if PIN_FILE in files else DAVINCI003_SHA256
        digest = reference_digest(self.instructions("eval"), self.references("eval"))
        if digest != expected:
            raise DataError(
                f"{path}: expected the reference responses with sha256 {expected}, got {digest}: the recorded "
                "judgements compare with other texts than these. Use the file that belongs to them; for "
                f'judgements of your own put {{"reference_sha256": "{digest}"}} into {PIN_FILE}.json beside it.'
            )
        rows = check_rows(read_records(path), (Field("generator", TEXT, is_text, REFERENCE_FILE),), str(path))
        return str(rows[0]["generator"])

    def _read_judgements(self, files: dict[str, Path]) -> tuple[str, dict[str, NDArray[np.float64]]]:
        """The judge's name and each judged generator's credits, aligned with the instructions."""
        stems = [stem for stem in files if stem.startswith("preferences_")]
        if len(stems) != 1:
            raise DataError(f"{self.path}: expected one file preferences_<judge>, got {stems}.")
        instructions = files["eval_instructions" if "eval_instructions" in files else "eval"]
        indices = [row["index"] for row in check_rows(read_records(instructions), (INDEX,), str(instructions))]
        position = {index: place for place, index in enumerate(indices)}
        if len(position) < len(indices):
            raise DataError(f"{instructions}: expected each index once, got {len(indices) - len(position)} repeated.")
        path = files[stems[0]]
        rows = check_rows(read_records(path), JUDGEMENT, str(path))
        credits: dict[str, NDArray[np.float64]] = {}
        seen: set[tuple[str, int]] = set()
        faults = []
        for row in rows:
            index, generator, credit = row["index"], row["generator"], row["preference"]
            if index not in position:
                wanted = f"the index of an instruction of {instructions.name}"
                faults.append(Fault(row.number, "index", shown(index), wanted))
            elif (generator, index) in seen:
                faults.append(Fault(row.number, "index", f"{index} again", f"one judgement of {generator!r} for it"))
            else:
                column = credits.setdefault(generator, np.full(len(indices), np.nan))
                column[position[index]] = np.nan if credit is None else credit
            seen.add((generator, index))
        raise_faults(faults, str(path))
        return stems[0].removeprefix("preferences_"), credits


class RecordedParts(RowDataset):
    """A recorded folder for training: its instructions in disjoint splits of the shares `PARTS`, by their sha256.

    preference holds recorded verdicts, each distinct response to its instructions against the reference, in a random
    order that is always the same; ties and texts without one verdict are left out. unlabeled has instructions alone.
    val and eval have the references to beat. Raises DataError if a split would be empty.
    """

    level = "recorded"

    def __init__(self, recorded: RecordedDataset) -> None:
        self.recorded, self.reference, self.judge = recorded, recorded.reference, recorded.judge
        instructions = recorded.instructions("eval")
        order = sorted(map(str, instructions), key=lambda text: hashlib.sha256(text.encode()).digest())
        ends = np.round(np.cumsum([*PARTS.values()]) * len(order)).astype(int).tolist()
        starts = [0, *ends[:-1]]
        place = {text: split for split, a, b in zip(PARTS, starts, ends, strict=True) for text in order[a:b]}
        rows: dict[str, list[dict[str, Any]]] = {split: [] for split in PARTS}
        asked: dict[str, dict[str, Any]] = {}
        for each, reference in zip(instructions, recorded.references("eval"), strict=True):
            asked[each] = {"instruction": each.instruction.removeprefix(system_front(each.system)), "input": each.input}
            asked[each]["system"] = each.system
            answer = {"output": reference} if place[each] in ("val", "eval") else {}
            rows[place[each]].append(asked[each] | answer)
        references = dict(zip(map(str, instructions), recorded.references("eval"), strict=True))
        rows["preference"] = [
            {**asked[text], "output_1": response, "output_2": references[text], "preference": 1 if credit > 0.5 else 2}
            for (text, response), credit in recorded.recorded_verdicts().items()
            if place[text] == "preference" and credit != 0.5 and not math.isnan(credit)
        ]
        keyed_rng(0, "order of recorded verdicts").shuffle(rows["preference"])
        if empty := [split for split in PARTS if not rows[split]]:
            raise DataError(f"{recorded.name}: expected instructions with verdicts for {empty}, got too few.")
        super().__init__(recorded.name, {split: (f"{recorded.name} ({split})", rows[split]) for split in PARTS})


def is_recorded(path: Path) -> bool:
    """Whether a folder holds recorded judgements."""
    return any(stem.startswith("preferences_") for stem in data_files(path))


def reference_digest(instructions: Sequence[str], references: Sequence[str]) -> str:
    """sha256 over all (instruction, reference), sorted by instruction: the order of a file does not matter."""
    pairs: list[Any] = sorted(zip(map(str, instructions), references, strict=True))
    return hashlib.sha256(json.dumps(pairs, ensure_ascii=True, separators=(",", ":")).encode()).hexdigest()


def _pinned(path: Path) -> str:
    try:
        return str(json.loads(path.read_text(encoding="utf-8"))["reference_sha256"])
    except (ValueError, KeyError, TypeError, OSError) as error:
        wanted = '{"reference_sha256": "<64 hex digits>"}'
        raise DataError(f"{path}: expected {wanted}, got {type(error).__name__}: {error}") from error
