"""The sandbox as a dataset: splits of AlpacaFarm's sizes, demonstrations, preference pairs and references.

The texts are stored and equal what `generate` makes from the seed. Labels are not stored: a judge gives them, so one
set of pairs serves every pool and noise level.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, cast

import numpy as np

from ..data.dataset import Dataset
from ..data.files import read_records, write_atomic
from ..errors import DataError, did_you_mean
from ..instructions import Demonstration, Instruction, Preference
from ..oracles.base import NoDeepCopy, PreferenceOracle, compare
from ..seeding import keyed_rng
from . import judges, tasks, writers

ASSETS: Final = Path(__file__).parent / "assets"
SEED: Final = 0
"""The seed of everything that is shipped."""
SIZES: Final = {"sft": 10_000, "preference": 10_000, "unlabeled": 20_000, "val": 2_000, "eval": 805}
EVAL_SOURCES: Final = {"selfinstruct": 252, "oasst": 188, "helpful_base": 129, "vicuna": 80, "koala": 156}
"""The parts of the 805 evaluation instructions, of the published sizes."""

# Share of instructions with an input, and the root verbs that a source of eval asks more often than the rest.
_MIXES: Final[dict[str, tuple[float, tuple[str, ...]]]] = {
    "": (0.25, ()),
    "selfinstruct": (208 / 252, ("write", "classify", "rewrite")),
    "oasst": (0.05, ("explain", "tell", "compare")),
    "helpful_base": (0.05, ("give", "suggest", "list")),
    "vicuna": (0.0, ("describe", "summarize", "compare")),
    "koala": (0.05, ("name", "find", "write")),
}


def template_weights(verbs: Mapping[str, float], with_input: float) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Chance of each of `tasks.TEMPLATES`, by weights of root verbs (1 for all others) and a share with an input."""
    weights = np.array([verbs.get(template.verb, 1.0) for template in tasks.TEMPLATES])
    has_input = np.array([template.with_input for template in tasks.TEMPLATES])
    for chosen, share in ((has_input, with_input), (~has_input, 1 - with_input)):
        weights[chosen] *= share / weights[chosen].sum()
    return weights


def generate(seed: int = SEED) -> dict[str, list[Instruction]]:
    """Draws all splits, disjoint by text."""
    seen: set[str] = set()
    splits: dict[str, list[Instruction]] = {}
    for split, size in SIZES.items():
        sources = EVAL_SOURCES if split == "eval" else {"": size}
        rows: list[Instruction] = []
        for source, count in sources.items():
            rng, (with_input, favoured) = keyed_rng(seed, "instructions", split, source), _MIXES[source]
            weights = template_weights(dict.fromkeys(favoured, 3.0), with_input)
            end = len(rows) + count
            while len(rows) < end:
                template = tasks.TEMPLATES[int(rng.choice(len(weights), p=weights))]
                row = Instruction(*tasks.draw(rng, template), id=len(rows), split=split, source=source)
                while str(row) in seen:  # drawn again of the same template, so that the mix stays what it should be
                    row = Instruction(*tasks.draw(rng, template), id=len(rows), split=split, source=source)
                seen.add(str(row))
                rows.append(row)
        splits[split] = rows
    return splits


def demonstration(instruction: str, seed: int = SEED) -> str:
    """The crowd's response."""
    return writers.write(writers.CROWD, instruction, keyed_rng(seed, "crowd", str(instruction)))


def reference(instruction: str, seed: int = SEED) -> str:
    """The response of the stand-in for Davinci003."""
    return writers.write(writers.REFERENCE, instruction, keyed_rng(seed, "reference", str(instruction)))


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Writes JSON Lines, gzipped without a time stamp: equal rows give equal bytes."""
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, gzip.compress(text.encode(), compresslevel=9, mtime=0))


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Reads what `write_rows` wrote."""
    rows = read_records(path)
    if not all(isinstance(row, dict) for row in rows):
        raise DataError(f"{path}: expected a JSON object a line, so the file is damaged: install the package again.")
    return cast(list[dict[str, Any]], rows)


class Sandbox(NoDeepCopy, Dataset):
    """The sandbox's data, read from `folder` when first asked for."""

    name = "sandbox"
    level = "sandbox"

    def __init__(self, folder: Path = ASSETS / "data") -> None:
        self.folder = folder

    @property
    def splits(self) -> tuple[str, ...]:
        """As the base class."""
        return tuple(SIZES)

    def instructions(self, split: str) -> tuple[Instruction, ...]:
        """As the base class."""
        if split not in SIZES:
            raise did_you_mean("split", split, SIZES)
        return _read(self.folder, split)

    def references(self, split: str) -> tuple[str, ...]:
        """Stored for eval, written anew (and equal every time) elsewhere."""
        instructions = self.instructions(split)
        if split == "eval":
            return tuple(row["output"] for row in read_rows(self.folder / "davinci003_stand_in.jsonl.gz"))
        return _written(instructions)

    def demonstrations(self, split: str = "sft") -> tuple[Demonstration, ...]:
        """The crowd's responses."""
        return tuple(Demonstration(x, demonstration(x)) for x in self.instructions(split))

    def pairs(self, split: str = "preference") -> tuple[tuple[str, str], ...]:
        """Two samples of the SFT policy for each instruction of `preference`, at temperature 1."""
        self.instructions(split)
        if split != "preference":
            raise DataError(f"Only the split 'preference' has pairs of responses, got {split!r}.")
        return tuple((row["output_1"], row["output_2"]) for row in read_rows(self.folder / "pairs.jsonl.gz"))

    def preferences(
        self, split: str = "preference", *, judge: PreferenceOracle | None = None
    ) -> tuple[Preference, ...]:
        """The pairs as a judge labels them (default: the noisy pool); pairs that it calls a tie are left out."""
        return label(self.instructions(split), self.pairs(split), judge or judges.judge("sim_ann"))


def label(
    instructions: Sequence[Instruction], pairs: Sequence[tuple[str, str]], judge: PreferenceOracle
) -> tuple[Preference, ...]:
    """Preferences from a judge's verdicts; ties and pairs without a verdict are left out."""
    verdicts = compare(judge, instructions, [a for a, _ in pairs], [b for _, b in pairs]).scores
    return tuple(
        Preference(instruction, pair, 2 if verdict > 0.5 else 1)
        for instruction, pair, verdict in zip(instructions, pairs, verdicts.tolist(), strict=True)
        if verdict > 0.5 or verdict < 0.5  # neither holds for NaN
    )


@lru_cache(maxsize=16)
def _read(folder: Path, split: str) -> tuple[Instruction, ...]:
    return tuple(
        Instruction(row["instruction"], row["input"], id=index, split=split, source=row.get("dataset", ""))
        for index, row in enumerate(read_rows(folder / f"{split}.jsonl.gz"))
    )


@lru_cache(maxsize=8)
def _written(instructions: tuple[Instruction, ...]) -> tuple[str, ...]:
    return tuple(reference(instruction) for instruction in instructions)
