"""What decides the study's cells, its instructions, and where it keeps texts, states and scores.

The answered instructions are in a random order. Those with the most samples come first, and a proxy that is learned on
the instructions at even places is judged at odd ones, and the other way round.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ...data import RecordedDataset
from ...data.files import write_atomic
from ...data.load import recorded_dataset
from ...errors import CheckpointError, DataError
from ...instructions import Instruction
from ...seeding import keyed_rng
from ..experiment.evaluation import subset
from ..harness.runner import ProgressFn, ProgressUpdate, Work
from ..harness.stored import ElapsedTime, file_name, read_stored
from ..harness.study import Row
from ..surrogates.judged import Judged, read_judged

Array = NDArray[np.float64]
LONGEST = 500
"""Characters of an answered instruction: longer ones take most of the time."""


@dataclass(frozen=True)
class Sizes:
    """How large the study is; the defaults are the full study's."""

    tiers: tuple[tuple[int, int], ...] = ((64, 200), (256, 100), (1024, 30))
    """(samples of an instruction, instructions that have them or more), in this order."""
    block: int = 64
    """Samples that are drawn, and stored, together."""
    tokens: int = 96
    blocks_a_cell: int = 8
    num_recorded: int | None = None
    """Instructions of the recorded folder that are used, evenly spread; None: all."""
    recorded_tokens: int = 128
    """Tokens of a recorded text that the policy reads for its states."""
    components: int = 100
    """Components of words that proxies see."""
    labels: tuple[int, ...] = (250, 1000, 4000)
    flips: tuple[float, ...] = (0.0, 0.25, 0.35, 0.45)
    repeats: int = 20
    trained: int = 1000
    """Labels of the reward model by LoRA, of PPO's proxies and of DPO."""
    steps: tuple[int, ...] = (0, 5, 10, 20, 30, 40)
    """Steps of PPO after which its policy answers."""
    rollouts: int = 64

    def __post_init__(self) -> None:
        samples, instructions = zip(*self.tiers, strict=True) if self.tiers else ((), ())
        rising = all(one < two for one, two in pairwise((0, *samples)))
        falling = all(one >= two >= 4 for one, two in pairwise((math.inf, *instructions)))
        if not (self.tiers and rising and falling) or any(num % self.block for num in samples):
            text = f"a multiple of {self.block} samples, more in each; 4 or more instructions, no more than before"
            raise DataError(f"--tiers: expected pairs ({text}), got {self.tiers}.")

    @classmethod
    def quick(cls) -> Sizes:
        """Those of --quick."""
        return cls(
            tiers=((8, 8), (16, 4)), block=8, tokens=24, num_recorded=60, recorded_tokens=24, components=20,
            labels=(30, 60), flips=(0.0, 0.25, 0.45), repeats=3, trained=30, steps=(0, 1, 2), rollouts=8,
        )  # fmt: skip

    @property
    def halved(self) -> int:
        """Instructions on which a proxy of own pairs is learned."""
        return self.tiers[0][1] // 2


@dataclass(frozen=True)
class Plan:
    """All that decides the rows of a cell; picklable."""

    out: Path
    data: str | None
    policy: str
    sizes: Sizes = Sizes()
    seed: int = 0
    upto: int = 1024
    """Most samples of an instruction in cells that read them."""
    state_models: int | None = None
    """Recorded models whose texts the policy reads for gold B; None: all."""
    precision: Literal["float32", "bfloat16"] = "bfloat16"

    @property
    def tiers(self) -> list[tuple[int, int]]:
        """Those of up to `upto` samples."""
        return [tier for tier in self.sizes.tiers if tier[0] <= self.upto]

    def blocks(self) -> Iterator[list[tuple[int, int]]]:
        """(block, place) of the samples that each tier adds, the first tier first."""
        first = 0
        for samples, num in self.tiers:
            last = samples // self.sizes.block
            yield [(block, place) for block in range(first, last) for place in range(num)]
            first = last

    def chunks(self) -> Iterator[list[tuple[int, int]]]:
        """The blocks of each cell of answers, or of their states; those of fewer samples are among those of more."""
        size = self.sizes.blocks_a_cell
        for blocks in self.blocks():
            yield from (blocks[first : first + size] for first in range(0, len(blocks), size))

    def num_samples(self, place: int) -> int:
        """Samples of the instruction at a place."""
        return max(samples for samples, num in self.tiers if place < num)

    def answers_file(self, block: int, place: int) -> Path:
        """Where the texts of a block are."""
        return self.out / "answers" / f"{place:04}-{block:02}.json"

    def states_file(self, block: int, place: int) -> Path:
        """Where their states are."""
        return self.out / "states" / f"{place:04}-{block:02}.npy"

    def texts(self, place: int, samples: int | None = None) -> list[str]:
        """The samples of an instruction, or the first of them."""
        num = (samples or self.num_samples(place)) // self.sizes.block
        files = [self.answers_file(block, place) for block in range(num)]
        shape = {"texts": [str]}
        return [text for file in files for text in read_stored(file, "texts", shape=shape)["texts"]]

    def write_answers(self, block: int, place: int, texts: list[str]) -> None:
        """Stores the texts of a block."""
        file = self.answers_file(block, place)
        file.parent.mkdir(exist_ok=True)
        write_atomic(file, json.dumps({"texts": texts}))


@dataclass(frozen=True, eq=False)
class World:
    """Instructions with all that is recorded of them, and which of them the policy answers."""

    dataset: RecordedDataset
    instructions: list[Instruction]
    judged: Judged
    answered: list[int]
    """Number of the instruction at each place."""
    others: list[int]
    """Numbers of those that it does not answer: gold is learned on them."""

    def at(self, place: int) -> Instruction:
        """The instruction at a place."""
        return self.instructions[self.answered[place]]


@cache
def read_world(data: str | None, num_recorded: int | None, num_answered: int, seed: int) -> World:
    """The recorded folder, and the random order of its instructions; DataError where there are too few."""
    dataset = recorded_dataset(data)
    every = dataset.instructions("eval")
    instructions = [every[row] for row in subset(len(every), num_recorded or len(every))]
    order = keyed_rng(seed, "real policy", "instructions").permutation(len(instructions)).tolist()
    short = [number for number in order if len(instructions[number]) <= LONGEST]
    if len(short) < num_answered or len(instructions) < num_answered + 4:
        text = f"expected {num_answered + 4} or more instructions, {num_answered} of {LONGEST} characters at most"
        raise DataError(f"{dataset.name}: {text}, got {len(instructions)} and {len(short)}.")
    answered = short[:num_answered]
    others = sorted(set(range(len(instructions))) - set(answered))
    return World(dataset, instructions, read_judged(dataset, num_recorded), answered, others)


def world_of(plan: Plan) -> World:
    """The plan's world."""
    return read_world(plan.data, plan.sizes.num_recorded, plan.sizes.tiers[0][1], plan.seed)


def write_array(file: Path, values: NDArray[np.generic]) -> None:
    """Stores numbers, without pickles."""
    file.parent.mkdir(exist_ok=True)
    content = io.BytesIO()
    np.save(content, values, allow_pickle=False)
    write_atomic(file, content.getvalue())


def read_array(file: Path) -> Array:
    """Stored numbers; CheckpointError where they are gone or damaged."""
    try:
        return np.asarray(np.load(file, allow_pickle=False), np.float64)
    except (OSError, ValueError, EOFError) as error:
        text = (
            f"{file}: expected stored numbers, got {error}. Remove the cell that made it from cells/, and call again."
        )
        raise CheckpointError(text) from error


def timed(part: str, out: Path, key: str, work: Work, on_progress: ProgressFn) -> Sequence[Row]:
    """The rows of a cell, and one of the time that all calls have taken for it."""
    (folder := out / "times" / file_name(key)).mkdir(parents=True, exist_ok=True)
    spent = ElapsedTime(folder)

    def progress(update: ProgressUpdate) -> None:
        spent.keep()
        on_progress(update)

    rows = list(work(progress))
    spent.keep(now=True)
    return [*rows, {"table": "times", "part": part, "seconds": round(spent.seconds, 1)}]
