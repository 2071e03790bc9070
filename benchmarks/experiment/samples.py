"""Samples of the sandbox's SFT policy, drawn, judged and stored once for all reward models that choose among them.

A policy of the sandbox says many things twice: each distinct response is stored, judged and scored once.
"""

from __future__ import annotations

import io
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Final, cast

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from ... import agents, sandbox
from ...data.files import write_atomic
from ...errors import CheckpointError, DataError
from ...instructions import Instruction
from ...oracles.base import Constant
from ...sandbox.dataset import read_rows, write_rows
from ..harness.runner import ProgressFn, ProgressUpdate, quiet
from ..harness.stored import cell_file
from ..harness.study import Row
from .evaluation import evaluate, judges_of, subset
from .reward_models import MAX_RESPONSE_TOKENS

JUDGED: Final = ("gold", "win_rate_simulated", "win_rate_human")


@dataclass(frozen=True, eq=False)
class Drawn:
    """N samples of each of P instructions, D of them distinct."""

    instructions: list[Instruction]
    index: NDArray[np.int64]
    """[P, N], which distinct response each sample is."""
    responses: pd.DataFrame
    """[D]: prompt (number of its instruction), text, length, `JUDGED` (win rates as credits in [0, 1])."""

    @property
    def prompts(self) -> list[Instruction]:
        """[D], the instruction that each distinct response answers."""
        return [self.instructions[number] for number in self.responses.prompt]


@dataclass(frozen=True)
class SampleRun:
    """A seed's samples at temperature 1: a cell, picklable."""

    seed: int
    out: Path
    """The study's folder."""
    num_prompts: int
    """Instructions of eval, spread evenly."""
    num_samples: int
    units: int
    """Its weight in the progress report: seconds on one core, roughly."""

    @property
    def cell(self) -> str:
        """Its name in the study."""
        return f"samples, seed {self.seed}"

    @property
    def folder(self) -> Path:
        """Where they are."""
        return self.out / "samples" / f"seed-{self.seed}"

    @property
    def instructions(self) -> list[Instruction]:
        """Those that are answered."""
        rows = sandbox.SANDBOX.instructions("eval")
        return [rows[index] for index in subset(len(rows), self.num_prompts)]

    def draw(self, on_progress: ProgressFn) -> list[Row]:
        """Draws, judges and stores them; one row about them."""
        quiet()
        self.folder.mkdir(parents=True, exist_ok=True)
        on_progress(ProgressUpdate(self.cell, 0))
        policy = agents.LanguageModel.from_pretrained(sandbox.POLICY, max_response_tokens=MAX_RESPONSE_TOKENS)
        config = agents.BestOfNConfig(num_samples=self.num_samples, temperature=1.0, batch_size=512)
        instructions = self.instructions
        numbers: dict[tuple[int, str], int] = {}
        index = np.empty((len(instructions), self.num_samples), np.int32)
        sampler = agents.BestOfN(policy, Constant(), config=config, seed=self.seed)
        for first, part in sampler.sample_chunks(instructions):
            for row, texts in enumerate(part.responses, start=first):
                index[row] = [numbers.setdefault((row, text), len(numbers)) for text in texts]
            on_progress(ProgressUpdate(self.cell, 0.9 * first / len(instructions) * self.units))
        prompts, responses = zip(*numbers, strict=True)
        judged = evaluate([instructions[i] for i in prompts], responses, judges_of(sandbox.SANDBOX)).values
        columns = {name: judged[name] for name in (*JUDGED, "length")}
        frame = pd.DataFrame({"prompt": prompts, "text": responses, **columns})
        # Texts before the index: what is read back has both or is refused.
        plain = frame.astype(object).where(frame.notna(), None).to_dict("records")
        write_rows(self.folder / "texts.jsonl.gz", cast(list[Row], plain))
        content = io.BytesIO()
        np.save(content, index, allow_pickle=False)
        write_atomic(self.folder / "index.npy", content.getvalue())
        text = f"{self.cell}: {index.size} samples, {len(responses)} of them distinct"
        on_progress(ProgressUpdate(self.cell, self.units, text))
        return [{"seed": self.seed, "num_samples": index.size, "num_distinct": len(responses)}]

    def read(self) -> Drawn:
        """What `draw` stored; CheckpointError where it is gone or damaged."""
        instructions = self.instructions
        anew = f"To draw them anew remove {self.folder} and {cell_file(self.out, self.cell)}, and call again."
        try:
            frame = pd.DataFrame(read_rows(self.folder / "texts.jsonl.gz"))
            responses = frame.astype(dict.fromkeys((*JUDGED, "length"), float))
            index = np.load(self.folder / "index.npy", allow_pickle=False).astype(np.int64)
            if index.shape != (len(instructions), self.num_samples) or index.max() + 1 != len(responses):
                raise ValueError(f"{index.shape} samples of {len(responses)} texts")
        except (DataError, OSError, ValueError, KeyError, EOFError, zlib.error) as error:
            got = f"{self.folder}: expected the samples of seed {self.seed}, got {error}"
            raise CheckpointError(f"{got}. {anew}") from error
        return Drawn(instructions, index, responses)
