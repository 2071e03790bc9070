"""A study's page: its figures, sentences and tables, made of what it has stored.

Each study has a function `page(folder)` that makes a `Page` of table.csv and manifest.json alone. That is its only
output: docs/studies/make.py shows it as Markdown, `publish` as one HTML file and on the terminal.
"""

import base64
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pandas as pd
from matplotlib.figure import Figure as Drawing
from pandas.api.types import is_numeric_dtype

from ...data.files import write_atomic
from .plots import write_png
from .report import SIMULATION, Table, render, text_table
from .stored import MANIFEST, flatten, read_stored
from .study import Study

MOST_SENTENCES = 5
"""Between the first figure and the first table."""
QUICK = "A quick run: a smaller study of the same shape, to see that everything works; its numbers are no results."


@dataclass(frozen=True)
class Drawn:
    """A drawing with its caption, which says level, n and interval, and stands for the image."""

    drawing: Drawing
    caption: str


@dataclass(frozen=True)
class Page:
    """A study's result, for people.

    Attributes:
        title: Above everything.
        tables: By name.
        findings: A sentence or a few each, the most important first.
        figures: By file name, without its ending; the first one answers the study's question.
        headline: The result in a few words, with n and interval.
        values: Numbers, and words that follow from them, for sentences that are written by hand.
        method: How it was measured, a paragraph each.
        simulated: Whether some of its numbers are of the sandbox.
        printed: The tables that the terminal shows; all if empty.
    """

    title: str
    tables: Mapping[str, Table]
    findings: Sequence[str]
    figures: Mapping[str, Drawn] = field(default_factory=dict)
    headline: str = ""
    values: Mapping[str, str] = field(default_factory=dict)
    method: Sequence[str] = ()
    simulated: bool = True
    printed: Sequence[str] = ()

    @property
    def headings(self) -> dict[str, str]:
        """Name of a table -> its heading."""
        return {name: table.title or name.replace("_", " ").capitalize() for name, table in self.tables.items()}


def publish(study: Study, page: Page) -> None:
    """Writes a page's figures, its report.html and its findings in the manifest, and prints it."""
    notes = [SIMULATION] * page.simulated + [QUICK] * study.quick
    failures = [f"{cell}: FAILED: {' '.join(why.split())}" for cell, why in study.failed.items()]
    study.note(findings=[*page.findings])
    images = {name: write_png(study.out / f"{name}.png", drawn.drawing) for name, drawn in page.figures.items()}
    content = html(page, images, read_manifest(study.out), notes=notes, failures=failures)
    write_atomic(study.out / "report.html", content)
    shown = {name: page.tables[name] for name in page.printed or page.tables if page.tables[name].rows}
    for name, table in shown.items():
        print(f"{page.headings[name]}\n{text_table(table)}\n")
    captions = dict.fromkeys(table.caption for table in shown.values() if table.caption)
    print(*notes, *(text for text in page.findings if text not in notes), *captions, sep="\n")
    tables = (path.name for path in sorted(study.out.glob("*.csv")))
    files = ", ".join(["report.html", MANIFEST, *tables, *(f"{name}.png" for name in page.figures)])
    print(f"Written to {study.out}: {files}.", *failures, sep="\n")


def html(
    page: Page,
    images: Mapping[str, bytes],
    manifest: Mapping[str, Any],
    *,
    notes: Sequence[str] = (),
    failures: Sequence[str] = (),
) -> str:
    """One self-contained HTML document: the first of the `images` (PNG, by figure), few sentences, tables, the rest."""
    result = f"{page.headline[:1].upper()}{page.headline[1:]}." if page.headline else ""
    lead, rest = _lead([result, *(text for text in page.findings if text not in notes)])
    facts = {name: value for name, value in manifest["facts"].items() if not isinstance(value, list)}
    parts = (manifest["config"], {"seeds": len(manifest["seeds"])}, facts, manifest["versions"])
    return render(
        "harness/page.html.j2",
        page=page,
        images=[(page.figures[name].caption, base64.b64encode(png).decode()) for name, png in images.items()],
        notes=notes,
        failures=failures,
        lead=lead,
        rest=rest,
        settings=Table(("setting", "value"), [pair for part in parts for pair in settings(part).items()]),
    )


def settings(config: Mapping[str, Any]) -> dict[str, str]:
    """Names and values as text, nested ones as "sizes.num_eval"."""
    return {name: f"{value:,}" if type(value) is int else str(value) for name, value in flatten(config).items()}


def _lead(texts: Iterable[str]) -> tuple[list[str], list[str]]:
    """The first texts, of at most `MOST_SENTENCES` together, and the others."""
    lead, rest, num = list[str](), list[str](), 0
    for text in filter(None, texts):
        num += len(re.findall(r"[.!?](?= [A-Z]|$)", text))
        (rest if num > MOST_SENTENCES else lead).append(text)
    return lead, rest


def records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """The rows of a table."""
    return cast(list[dict[str, Any]], frame.to_dict("records"))


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
