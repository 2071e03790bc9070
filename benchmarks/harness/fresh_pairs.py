"""Fresh preference pairs of the sandbox: instructions that stand in no split, answered twice by a policy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ... import sandbox
from ...instructions import Instruction
from ...sandbox import tasks
from ...sandbox.dataset import Sandbox
from ...seeding import keyed_rng

MAX_RESPONSE_TOKENS: Final = 64


@dataclass(frozen=True)
class FreshPairs:
    """n pairs of samples of unequal gold, and what was drawn to get them."""

    instructions: tuple[str, ...]
    a: tuple[str, ...]
    b: tuple[str, ...]
    gap: NDArray[np.float64]
    """[n] gold of b minus gold of a; never 0."""
    num_equal: int
    """Pairs of equal gold (equal texts among them) that were drawn in between and have no right answer."""


def fresh_instructions(data: Sandbox, seed: int) -> Iterator[Instruction]:
    """Endlessly: instructions that stand in no split and were not given before, in the training splits' mix."""
    seen = {str(instruction) for split in data.splits for instruction in data.instructions(split)}
    share_with_input = np.mean([bool(instruction.input) for instruction in data.instructions("preference")])
    by_input = {kind: [t for t in tasks.TEMPLATES if t.with_input == kind] for kind in (False, True)}
    rng = keyed_rng(seed, "fresh instructions")
    while True:
        templates = by_input[bool(rng.random() < share_with_input)]
        template = templates[int(rng.integers(len(templates)))]
        row = Instruction(*tasks.draw(rng, template), split="fresh")
        while str(row) in seen:  # drawn again of the same template, so that the mix stays what it is in the splits
            row = Instruction(*tasks.draw(rng, template), split="fresh")
        seen.add(str(row))
        yield row


def fresh_pairs(data: Sandbox, policy: Path, seed: int, num: int) -> FreshPairs:
    """Samples a policy twice at temperature 1 on fresh instructions until there are `num` pairs of unequal gold.

    Args:
        data: Whose splits are to be avoided.
        policy: Folder of the policy.
        seed: Keys instructions and samples.
        num: Pairs wanted, 1 or more.
    """
    from ...agents import LanguageModel
    from ...agents.loop import keyed_generator

    model = LanguageModel.from_pretrained(policy, max_response_tokens=MAX_RESPONSE_TOKENS)
    generator, stream, gold = (
        keyed_generator(seed, "fresh pairs"),
        fresh_instructions(data, seed),
        sandbox.gold_oracle(),
    )
    pairs: list[tuple[str, str, str, float]] = []
    num_equal = 0
    while len(pairs) < num:
        missing = num - len(pairs)
        batch = tuple(islice(stream, missing + missing // 4 + 8))  # some more than are missing: some have equal gold
        texts = model.generate(batch, generator=generator, num_samples=2).texts
        gaps = gold.score(batch, texts[1::2]) - gold.score(batch, texts[::2])
        for pair in zip(batch, texts[::2], texts[1::2], gaps.tolist(), strict=True):
            if len(pairs) == num:
                break
            if pair[-1] == 0:
                num_equal += 1
            else:
                pairs.append(pair)
    instructions, a, b, gap = zip(*pairs, strict=True)
    return FreshPairs(instructions, a, b, np.array(gap), num_equal)
