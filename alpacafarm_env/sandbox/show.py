"""The sandbox as text to read: instructions, responses, their gold, and every annotator's opinion of them."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
import pandas as pd

from ..instructions import Instruction
from ..oracles.policies import LANGUAGE_MODEL
from ..plugins import find_attribute
from ..seeding import keyed_rng
from . import gold
from .dataset import ASSETS, Sandbox
from .judges import GREEDY, HUMANS, POOL, Annotator, Annotators

MAX_TOKENS: Final = 64
"""Longest response sampled."""
TEMPERATURE: Final = 0.7
_LABEL: Final = 13
"""Width of the column of labels."""


def show(split: str = "eval", *, num: int = 5, seed: int = 0) -> Iterator[str]:
    """Yields a heading, then a page for each of `num` instructions drawn from a split (all of them if it has fewer).

    `seed` picks instructions and responses.
    """
    data = Sandbox()
    instructions = data.instructions(split)
    rows = keyed_rng(seed, "show", split).permutation(len(instructions))[:num].tolist()  # a larger num only adds pages
    references = data.references(split)
    chosen = [instructions[row] for row in rows]
    responses = sample(chosen, seed)
    width = max(72, min(100, shutil.get_terminal_size((96, 24)).columns))
    yield _filled(
        f"AlpacaFarm's sandbox: {len(rows)} of the {len(instructions)} instructions of the split {split}, seed {seed}. "
        f"Reference: the stand-in for Davinci003. Policy: the shipped SFT10k, sampled at temperature {TEMPERATURE:g}.",
        width,
    )
    yield _filled(
        "This is a simulation. Its annotators and human raters are formulas over the parts of gold; what they say is "
        "no evidence about GPT-4 or about people.",
        width,
    )
    for number, (row, instruction, response) in enumerate(zip(rows, chosen, responses, strict=True), start=1):
        source = f", {instruction.source}" if instruction.source else ""
        title = f"── {number} of {len(rows)}: {split} {instruction.id}{source} "
        yield "\n".join(["", title.ljust(width, "─"), *page(instruction, references[row], response, width)])


def page(instruction: Instruction, reference: str, response: str, width: int = 96) -> list[str]:
    """The lines of one instruction: texts, gold with its parts, and what each annotator would say."""
    texts = {"Instruction": instruction.instruction, "Input": instruction.input}
    lines = [line for label, text in texts.items() if text for line in _labelled(label, text, width)]
    for label, text in {"Reference": reference, "Policy": response}.items():
        lines += _labelled(label, text or "(empty)", width)
    return [
        *lines,
        "",
        *_gold_table(instruction, reference, response),
        "",
        *_opinions(instruction, reference, response),
    ]


def sample(instructions: Sequence[str], seed: int) -> tuple[str, ...]:
    """One response of the shipped policy to each instruction, keyed on (seed, instruction)."""
    import torch

    # Each instruction has numbers of its own, so that a larger `num` only adds pages.
    draws = [keyed_rng(seed, "show response", str(instruction)).random(MAX_TOKENS) for instruction in instructions]
    model = find_attribute("Policy", LANGUAGE_MODEL).from_pretrained(ASSETS / "policy", device="cpu")
    uniforms = torch.from_numpy(np.array(draws))
    sampled = model.generate(instructions, generator=uniforms, temperature=TEMPERATURE, max_new_tokens=MAX_TOKENS)
    texts: tuple[str, ...] = sampled.texts
    return texts


def opinions(annotators: Sequence[Annotator], instruction: str, reference: str, response: str) -> list[float]:
    """P(response preferred to the reference) by each annotator, the mean over both orders."""
    pool = Annotators("shown", annotators)
    row = ([instruction], [reference], [response])
    return [
        float(np.mean([pool.probabilities(*row, index, a_first=first) for first in (True, False)]))
        for index in range(len(annotators))
    ]


def _gold_table(instruction: str, reference: str, response: str) -> list[str]:
    rows = {"weights": vars(gold.WEIGHTS)}
    for label, text in {"reference": reference, "policy": response}.items():
        rows[label] = {"total": gold.gold(instruction, text), **vars(gold.parts(instruction, text))}
    table = pd.DataFrame(rows).T[["total", *vars(gold.WEIGHTS)]]
    return ["Gold and its parts:", *table.to_string(float_format="{:.4g}".format, na_rep="").split("\n")]


def _opinions(instruction: str, reference: str, response: str) -> list[str]:
    """A row for each family of annotators: P(policy preferred) by each member in percent, and their mean."""
    annotators = [*POOL, *GREEDY, *HUMANS]
    names = pd.Series([each.name for each in annotators])
    family = names.where(names == GREEDY[0].name, names.str.replace(r"_\d+$", "", regex=True))
    percent = 100 * pd.Series(opinions(annotators, instruction, reference, response))
    table = percent.groupby(family, sort=False).apply(lambda group: group.reset_index(drop=True)).unstack()
    table.columns = pd.Index(range(1, table.shape[1] + 1))
    table["mean"] = table.mean(axis=1)
    heading = "P(policy preferred to the reference) by each annotator, in percent:"
    return [heading, *table.to_string(float_format="{:.0f}".format, na_rep="").split("\n")]


def _labelled(label: str, text: str, width: int) -> list[str]:
    """The text next to its label; its line breaks are kept, long lines are wrapped."""
    lines = [piece for line in text.split("\n") for piece in textwrap.wrap(line, width - _LABEL) or [""]]
    return [(label if k == 0 else "").ljust(_LABEL) + line for k, line in enumerate(lines)]


def _filled(text: str, width: int) -> str:
    return textwrap.fill(text, width, break_on_hyphens=False)
