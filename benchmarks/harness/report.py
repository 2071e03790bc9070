"""Self-contained HTML reports and the sentences of a study: templates, filled with tables, figures and numbers.

A study keeps what it says in `report.html.j2`, which extends `harness/report.html.j2`, and in `findings.txt.j2`, a
sentence a line. Everything that comes in is escaped: a response that contains markup is shown, never run. No script, no
external resource.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape

from ...data.files import write_atomic
from .agreement import coefficient_text
from .report_text import SIMULATION, interval_text, number, signed

_TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).parents[1]),
    autoescape=select_autoescape(["html.j2"]),
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_TEMPLATES.filters |= {"number": number, "signed": signed, "interval": interval_text, "coefficient": coefficient_text}
_TEMPLATES.globals["SIMULATION"] = SIMULATION


@dataclass(frozen=True)
class Table:
    """A table of plain text; line breaks in a cell are kept."""

    header: tuple[str, ...]
    rows: Sequence[Sequence[str]]
    caption: str = ""

    def __post_init__(self) -> None:
        for index, row in enumerate(self.rows):
            if len(row) != len(self.header):
                raise ValueError(
                    f"row {index}: expected {len(self.header)} cells {self.header}, got {len(row)}: {row!r}"
                )

    @property
    def numeric(self) -> list[bool]:
        """Of each column whether every cell reads as a number, perhaps with an interval or a unit; right-aligned."""
        columns = ([row[i] for row in self.rows] for i in range(len(self.header)))
        return [
            any(cells) and all(len(cell) <= 40 and cell[:1] in "+-−0123456789–" for cell in cells if cell)
            for cells in columns
        ]


@dataclass(frozen=True)
class Figure:
    """A PNG image with its caption; the caption is also the text that stands for the image."""

    png: bytes
    caption: str

    def __post_init__(self) -> None:
        if not self.png.startswith(b"\x89PNG\r\n\x1a\n"):
            raise ValueError(f"expected the bytes of a PNG image, got {self.png[:16]!r}")

    @property
    def base64(self) -> str:
        """The image as text."""
        return base64.b64encode(self.png).decode("ascii")


@dataclass(frozen=True)
class Section:
    """One section of a report: a heading, then its paragraphs, its table and its figures, in this order."""

    heading: str
    paragraphs: Sequence[str] = ()
    table: Table | None = None
    figures: Sequence[Figure] = ()


def text_table(table: Table) -> str:
    """The table for a terminal: columns of equal width."""
    rows = [table.header, *table.rows]
    widths = [max(len(row[i]) for row in rows) for i in range(len(table.header))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def settings_table(settings: Mapping[str, Any], caption: str = "") -> Table:
    """Names and values, nested ones as JSON."""
    rows = [
        (name, value if isinstance(value, str) else json.dumps(value, default=str)) for name, value in settings.items()
    ]
    return Table(("name", "value"), rows, caption)


def write_report(
    path: Path, title: str, sections: Sequence[Section] = (), template: str = "harness/report.html.j2", **values: Any
) -> Path:
    """Writes one HTML file (UTF-8; beside `path`, then renamed) and returns its path.

    Args:
        path: The file.
        title: Of the page.
        sections: What the page consists of, for the template of the harness.
        template: A study's own, such as "protocol/report.html.j2".
        values: What that is filled with. Texts are plain and are escaped.
    """
    write_atomic(path, render(template, title=title, sections=sections, **values))
    return path


def sentences(template: str, **values: Any) -> list[str]:
    """The lines of a template that say something."""
    lines = (" ".join(line.split()) for line in render(template, **values).splitlines())
    return [line for line in lines if line]


def render(template: str, **values: Any) -> str:
    """A template of the benchmarks' folders filled in; what UTF-8 cannot hold becomes "?".

    Raises:
        jinja2.UndefinedError: It names a value that is not there.
    """
    text = _TEMPLATES.get_template(template).render(**values)
    return text.encode("utf-8", "replace").decode("utf-8").replace("\0", "\ufffd")
