"""Samples of the SFT policy for the over-optimization study: drawn and judged once a seed, used by all treatments.

A policy of the sandbox says many things twice: each distinct response to an instruction is stored and judged once.
"""

from __future__ import annotations

import io
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

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
from ..harness.reward_models import MAX_RESPONSE_TOKENS
from ..harness.stored import cell_file
from ..harness.study import Row
from .plans import TEMPERATURE, Plan

JUDGED = ("gold", "win_rate_simulated", "win_rate_human")
"""What is stored of each distinct response, beside its length; win rates are credits in [0, 1] here."""
ShareFn = Callable[[float], None]
"""Is told the share of a cell that is done."""


@dataclass(frozen=True, eq=False)
class Samples:
    """N samples of each of P instructions, D of them distinct."""

    instructions: list[Instruction]
    """[P]."""
    index: NDArray[np.int64]
    """[P, N], which distinct response each sample is."""
    prompt: NDArray[np.int64]
    """[D], the number of the instruction that each distinct response answers."""
    texts: list[str]
    """[D] distinct responses."""
    measures: Mapping[str, NDArray[np.float64]]
    """Names of `JUDGED` and "length" -> [D]."""

    @property
    def asked(self) -> list[Instruction]:
        """[D], the instruction that each distinct response answers."""
        return [self.instructions[number] for number in self.prompt]


def jsonable(columns: Mapping[str, NDArray[Any]]) -> dict[str, list[Any]]:
    """Arrays as lists; NaN as null."""
    return {name: [None if x != x else x for x in column.tolist()] for name, column in columns.items()}


def run_samples(plan: Plan, on_share: ShareFn) -> tuple[list[Row], str]:
    """Samples, judges and stores; one row about them."""
    on_share(0)
    policy = LanguageModel.from_pretrained(sandbox.POLICY, max_response_tokens=MAX_RESPONSE_TOKENS)
    config = BestOfNConfig(num_samples=plan.sizes.num_samples, temperature=TEMPERATURE, batch_size=512)
    instructions = plan.sizes.instructions(plan.sizes.num_prompts)
    numbers: dict[tuple[int, str], int] = {}
    index = np.empty((len(instructions), plan.sizes.num_samples), np.int32)
    # The judges are asked afterwards, all at once: what chooses among the samples differs by treatment.
    for first, part in BestOfN(policy, Constant(), config=config, seed=plan.seed).sample_chunks(instructions):
        for row, texts in enumerate(part.responses, start=first):
            index[row] = [numbers.setdefault((row, text), len(numbers)) for text in texts]
        on_share(0.9 * first / len(instructions))
    prompts, responses = zip(*numbers, strict=True)
    found = evaluate([instructions[i] for i in prompts], responses, judges_of(sandbox.SANDBOX, proxy=None))
    columns = {"prompt": prompts, "text": responses, **jsonable({name: found.scores[name] for name in JUDGED})}
    columns["length"] = found.length.tolist()
    write_rows(
        plan.folder / "texts.jsonl.gz",
        [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)],
    )
    content = io.BytesIO()
    np.save(content, index, allow_pickle=False)
    write_atomic(plan.folder / "index.npy", content.getvalue())
    about = {"seed": plan.seed, "num_samples": index.size, "num_distinct": len(responses)}
    return [about], f"{index.size} samples, {len(responses)} of them distinct"


def read_samples(plan: Plan) -> Samples:
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
    instructions = plan.sizes.instructions(plan.sizes.num_prompts)
    if index.shape != (len(instructions), plan.sizes.num_samples) or index.max() + 1 != len(rows):
        raise CheckpointError(
            f"{plan.folder}: expected {len(instructions)} x {plan.sizes.num_samples} samples, got {index.shape}, "
            f"of {len(rows)} texts. {anew}"
        )
    measures = {name: np.array([row[name] for row in rows], np.float64) for name in (*JUDGED, "length")}
    return Samples(
        instructions, index, np.array([row["prompt"] for row in rows]), [row["text"] for row in rows], measures
    )
