"""What a study's stored files say: tables, sentences and figures, for its report and for its page of the documentation.

A study has a function `page(folder)` that makes them from table.csv and manifest.json alone, so that both say the same.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure as Drawing
from pandas.api.types import is_numeric_dtype

from .plots import remove_drawn, write_png
from .report import Figure, Table
from .stored import MANIFEST, read_stored


@dataclass(frozen=True)
class Drawn:
    """A drawing with its caption, which says level, n and interval, and stands for the image."""

    drawing: Drawing
    caption: str


@dataclass(frozen=True)
class Page:
    """What a study says of its stored files.

    Attributes:
        tables: By name.
        findings: A sentence each.
        figures: By file name, without its ending.
        headline: The result in a few words, with n and interval.
        values: Numbers, and words that follow from them, for sentences that are written by hand.
    """

    tables: Mapping[str, Table]
    findings: Sequence[str]
    figures: Mapping[str, Drawn] = field(default_factory=dict)
    headline: str = ""
    values: Mapping[str, str] = field(default_factory=dict)

    def write_figures(self, folder: Path) -> dict[str, Figure]:
        """Writes the PNG files, removes those of an earlier page, and returns them for a report."""
        remove_drawn(folder)
        return {
            name: Figure(write_png(folder / f"{name}.png", drawn.drawing), drawn.caption)
            for name, drawn in self.figures.items()
        }


def read_table(path: Path) -> pd.DataFrame:
    """A CSV file as `study.write_csv` writes it; an empty cell is "" among texts, else NaN."""
    table = pd.read_csv(path, keep_default_na=False, na_values=["", "nan"])
    for name in (name for name in table if not is_numeric_dtype(table[name])):
        if set(table[name].dropna()) <= {True, False}:
            continue
        # The apostrophe keeps spreadsheets from running a text as a formula.
        table[name] = table[name].fillna("").astype(str).str.replace(r"^'(?=[=+\-@\t\r])", "", regex=True)
    return table


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a study; CheckpointError if there is none."""
    return read_stored(folder / MANIFEST, "config", "seeds", "facts", remedy="Give the folder of a study.")
