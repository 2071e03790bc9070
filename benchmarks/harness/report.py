"""The words of a study: numbers as text, sentences of Jinja2 templates, tables, and where the numbers come from.

A study keeps what it says in `findings.txt.j2`, and how it measures in `method.txt.j2`, a sentence or paragraph a line.
Everything that comes into HTML is escaped: a response that contains markup is shown, never run.
"""

import html
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import pandas as pd
from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape

from ...statistics import Interval

SIMULATION = (
    "Sandbox: a simulation. Instructions, judges, human raters and gold are programs; nothing here is evidence about "
    "GPT-4, Davinci003 or people."
)


def number(value: float, unit: str = "", sign: str = "") -> str:
    """A number with the digits worth reading in its unit ("%", "characters", "samples" or another); "–" for NaN."""
    decimals = {"%": 1, "characters": 0, "samples": 0}.get(unit, 2)
    # As Python rounds, numpy's own numbers too. Adding zero turns a negative zero into a positive one.
    return "–" if math.isnan(value) else f"{round(float(value), decimals) + 0.0:{sign}.{decimals}f}"


def signed(value: float, unit: str = "") -> str:
    """A difference, with its sign; "–" for NaN."""
    return number(value, unit, "+")


def interval_text(value: Interval, unit: str) -> str:
    """For instance "47.1 [45.0, 49.2]"; the mean alone for one seed."""
    mean = number(value.mean, unit)
    return mean if math.isnan(value.low) else f"{mean} [{number(value.low, unit)}, {number(value.high, unit)}]"


def seeds_text(numbers: Iterable[int]) -> str:
    """For instance "3 to 5 seeds"."""
    counts = sorted(set(numbers))
    return (
        f"{counts[0]} to {counts[-1]} seeds" if len(counts) > 1 else f"{counts[0]} seed{'s' if counts[0] != 1 else ''}"
    )


_TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).parents[1]),
    autoescape=select_autoescape(["html.j2"]),
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_TEMPLATES.filters |= {"number": number, "signed": signed, "interval": interval_text}
_TEMPLATES.globals["SIMULATION"] = SIMULATION


@dataclass(frozen=True)
class Provenance:
    """Where the numbers come from; stands under every figure and table."""

    level: str
    """sandbox, recorded or live."""
    dataset: str
    policy: str
    reward_model: str
    num_val: int
    num_eval: int
    num_seeds: int
    temperature: float
    temperature_note: str = ""
    """Names what has another temperature."""
    judge: str = ""
    """The judge of one's own behind the column win_rate; "" for none."""

    @property
    def sandbox(self) -> bool:
        """Whether the numbers are those of the simulation."""
        return self.level == "sandbox"

    @property
    def reference(self) -> str:
        """Whose responses are to be beaten."""
        return "the sandbox's stand-in for Davinci003" if self.sandbox else f"the references of {self.dataset}"

    def label(self, interval: str = "95 % t-intervals of the mean over seeds") -> str:
        """Level, n, seeds and what bars or brackets are, in one line."""
        seeds = f"{self.num_seeds} seeds, {interval}" if self.num_seeds > 1 else "1 seed, no interval"
        kind = "sandbox (simulation)" if self.sandbox else self.level
        temperature = f"temperature {self.temperature:g}{self.temperature_note}"
        return f"Level: {kind}; eval, n = {self.num_eval} instructions, {temperature}; {seeds}."

    def judges(self) -> str:
        """Who gives which number."""
        own = f" Win rate by the judge: {self.judge}, against {self.reference}." if self.judge else ""
        if not self.sandbox:
            reward = "true reward" if "gold" in self.level else "gold reward"
            return (
                f"Proxy: reward model {self.reward_model}.{own} This level has no {reward}, no simulated judge and "
                "no human raters: those columns are empty."
            )
        return (
            f"Proxy: reward model {self.reward_model}. Gold: the sandbox's true reward. Win rates against "
            f"{self.reference}: by p_sim^eval (13 simulated annotators, no added noise) and 16 simulated human "
            f"raters.{own}"
        )


@dataclass(frozen=True)
class Table:
    """A table of plain text; line breaks in a cell are kept."""

    header: tuple[str, ...]
    rows: Sequence[Sequence[str]]
    caption: str = ""
    title: str = ""
    """The heading, where the table's name on its page is not enough."""

    @classmethod
    def of(cls, rows: pd.DataFrame | Sequence[Mapping[str, object]], caption: str = "", title: str = "") -> Self:
        """The rows, a column for each name that they have."""
        frame = pd.DataFrame(rows).astype(str)
        return cls(tuple(map(str, frame)), frame.to_numpy().tolist(), caption, title)

    @property
    def numeric(self) -> list[bool]:
        """For each column whether every cell reads as a number, perhaps with an interval or a unit; right-aligned."""
        columns = ([row[i] for row in self.rows] for i in range(len(self.header)))
        return [
            any(cells) and all(len(cell) <= 40 and cell[:1] in "+-−0123456789–" for cell in cells if cell)
            for cells in columns
        ]


def text_table(table: Table) -> str:
    """The table for a terminal: columns of equal width."""
    rows = [table.header, *table.rows]
    widths = [max(len(row[i]) for row in rows) for i in range(len(table.header))]
    rows.insert(1, ["-" * width for width in widths])
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def markdown_table(table: Table) -> str:
    """The table for a page of Markdown, without its caption."""
    marks = ["---:" if numeric else "---" for numeric in table.numeric]
    rows = [list(map(markdown_text, cells)) for cells in (table.header, *table.rows)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (rows[0], marks, *rows[1:]))


def markdown_text(text: str) -> str:
    """Plain text for a line of Markdown: what would be markup there is shown as it is."""
    marked = re.sub(r"[\\`*|]|(?<!\w)_|_(?!\w)|(?<=\])\(", r"\\\g<0>", html.escape(text, quote=False))
    return marked.replace("\n", "<br>")


def sentences(template: str, **values: Any) -> list[str]:
    """The lines of a filled template that are not blank."""
    lines = (" ".join(line.split()) for line in render(template, **values).splitlines())
    return [line for line in lines if line]


def render(template: str, **values: Any) -> str:
    """A template of the benchmarks' folders filled in; what UTF-8 cannot hold becomes "?".

    Raises:
        jinja2.UndefinedError: It names a value that is missing.
    """
    text = _TEMPLATES.get_template(template).render(**values)
    return text.encode("utf-8", "replace").decode("utf-8").replace("\0", "\ufffd")
