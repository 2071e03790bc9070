"""Samples of the SFT policy for the over-optimization study: drawn and judged once a seed, used by all treatments.

A policy of the sandbox says many things twice: each distinct response to an instruction is stored and judged once.
"""

from __future__ import annotations

import io
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ... import sandbox
from ...agents import BestOfN, BestOfNConfig, LanguageModel
from ...data.files import write_atomic
from ...errors import CheckpointError
from ...instructions import Instruction
from ...oracles.base import Constant
from ...sandbox.dataset import read_rows, write_rows
from ..harness.evaluation import evaluate, judges_of
from ..harness.fresh_pairs import MAX_RESPONSE_TOKENS
from ..harness.runner import ProgressFn, ProgressUpdate, quiet
from ..harness.stored import cell_file, check_settings
from ..harness.study import Row
from .plans import TEMPERATURE, SamplesPlan

JUDGED = ("gold", "win_rate_simulated", "win_rate_human")
"""What is stored of each distinct response, beside its length; win rates are credits in [0, 1] here."""


@dataclass(frozen=True, eq=False)
class StoredSamples:
    """N samples of each of P instructions."""

    instructions: tuple[Instruction, ...]
    """[P]."""
    prompt: NDArray[np.int64]
    """[D], the number of the instruction that each distinct response answers."""
    texts: tuple[str, ...]
    """[D] distinct responses."""
    measures: Mapping[str, NDArray[np.float64]]
    """Names of `JUDGED` and "length" -> [D]."""
    index: NDArray[np.int64]
    """[P, N], which distinct response each sample is."""

    @cached_property
    def asked(self) -> list[Instruction]:
        """[D], the instruction that each distinct response answers."""
        return [self.instructions[number] for number in self.prompt.tolist()]


def run_samples(plan: SamplesPlan, on_progress: ProgressFn) -> list[Row]:
    """Samples, judges and stores; one row about them."""
    quiet()
    on_progress(ProgressUpdate(plan.cell, 0))
    plan.folder.mkdir(parents=True, exist_ok=True)
    check_settings(plan.folder, {"seed": plan.seed, **asdict(plan.sizes)})
    policy = LanguageModel.from_pretrained(sandbox.POLICY, max_response_tokens=MAX_RESPONSE_TOKENS)
    config = BestOfNConfig(num_samples=plan.sizes.num_samples, temperature=TEMPERATURE, batch_size=512)
    instructions = plan.sizes.instructions(plan.sizes.num_prompts)
    numbers: dict[tuple[int, str], int] = {}
    index = np.empty((len(instructions), plan.sizes.num_samples), np.int32)
    # The judges are asked afterwards, all at once: what chooses among the samples differs by treatment.
    for first, part in BestOfN(policy, Constant(), config=config, seed=plan.seed).sample_chunks(instructions):
        for row, texts in enumerate(part.responses, start=first):
            index[row] = [numbers.setdefault((row, text), len(numbers)) for text in texts]
        on_progress(ProgressUpdate(plan.cell, int(0.9 * plan.units * first / len(instructions))))
    prompts, responses = zip(*numbers, strict=True)
    found = evaluate([instructions[i] for i in prompts], responses, judges_of(sandbox.SANDBOX, proxy=None))
    scores = [[None if x != x else x for x in found.scores[name].tolist()] for name in JUDGED]
    rows = [
        {"prompt": prompt, "text": text, **dict(zip(JUDGED, values, strict=True)), "length": len(text)}
        for prompt, text, *values in zip(prompts, responses, *scores, strict=True)
    ]
    write_rows(plan.folder / "texts.jsonl.gz", rows)
    content = io.BytesIO()
    np.save(content, index, allow_pickle=False)
    write_atomic(plan.folder / "index.npy", content.getvalue())
    shape = f"{index.size} samples, {len(rows)} of them distinct"
    on_progress(ProgressUpdate(plan.cell, plan.units, f"{plan.cell}: {shape}"))
    return [{"seed": plan.seed, "num_samples": index.size, "num_distinct": len(rows)}]


def read_samples(plan: SamplesPlan) -> StoredSamples:
    """What `run_samples` stored.

    Raises:
        CheckpointError: There is nothing, or not what belongs together.
    """
    anew = f"To draw them anew remove {plan.folder} and {cell_file(plan.out, plan.cell)}, and call again."
    if not (plan.folder / "texts.jsonl.gz").is_file():
        raise CheckpointError(f"{plan.folder}: expected the samples of seed {plan.seed}, found none. {anew}")
    try:
        rows = read_rows(plan.folder / "texts.jsonl.gz")
        index = np.load(plan.folder / "index.npy", allow_pickle=False).astype(np.int64)
    except (OSError, ValueError, EOFError, zlib.error) as error:
        raise CheckpointError(f"{plan.folder}: expected the samples of a seed, got {error}. {anew}") from error
    instructions = tuple(plan.sizes.instructions(plan.sizes.num_prompts))
    if index.shape != (len(instructions), plan.sizes.num_samples) or index.max() + 1 != len(rows):
        raise CheckpointError(
            f"{plan.folder}: expected {len(instructions)} x {plan.sizes.num_samples} samples, got {index.shape}, "
            f"of {len(rows)} texts. {anew}"
        )
    columns = {name: np.array([row[name] for row in rows], np.float64) for name in (*JUDGED, "length")}
    return StoredSamples(
        instructions=instructions,
        prompt=np.array([row["prompt"] for row in rows]),
        texts=tuple(row["text"] for row in rows),
        measures=columns,
        index=index,
    )
