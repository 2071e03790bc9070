"""Self-contained HTML reports: headings, paragraphs, tables and PNG figures in one file that opens anywhere, offline.

Everything that comes in is escaped: a response that contains markup is shown, never run. No script, no external
resource.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from ...data.files import write_atomic

_STYLE = """
:root { color-scheme: light; }
body { font: 17px/1.55 Georgia, "Times New Roman", serif; color: #1c1c1c; background: #fff;
       max-width: 60rem; margin: 0 auto; padding: 2rem 1.25rem 5rem; }
h1, h2, th, figcaption, caption, .label { font-family: system-ui, "Segoe UI", "DejaVu Sans", sans-serif; }
h1 { font-size: 1.75rem; line-height: 1.2; margin: 0 0 1.25rem; }
h2 { font-size: 1.25rem; margin: 2.75rem 0 .75rem; padding-top: .75rem; border-top: 1px solid #ddd; }
p { max-width: 44rem; margin: .6rem 0; }
figure { margin: 1.5rem 0; }
img { display: block; max-width: 100%; height: auto; }
figcaption, caption { font-size: .85rem; line-height: 1.45; color: #555; text-align: left; }
figcaption { margin-top: .4rem; max-width: 52rem; }
caption { caption-side: bottom; padding-top: .5rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; margin: 1rem 0; font-size: .92rem; }
th { font-size: .8rem; text-align: left; vertical-align: bottom; border-bottom: 2px solid #444; padding: .35rem .9rem
.35rem 0; } td { vertical-align: top; border-bottom: 1px solid #e4e4e4; padding: .4rem .9rem .4rem 0;
     white-space: pre-wrap; overflow-wrap: anywhere; min-width: 3.5rem; }
td.number, th.number { text-align: right; }
td.number { white-space: nowrap; font-variant-numeric: tabular-nums; }
@media print { body { max-width: none; } figure, tr { break-inside: avoid; } }
"""


@dataclass(frozen=True)
class Table:
    """A table of plain text; line breaks in a cell are kept."""

    header: tuple[str, ...]
    rows: Sequence[Sequence[str]]
    caption: str = ""

    def __post_init__(self) -> None:
        for number, row in enumerate(self.rows):
            if len(row) != len(self.header):
                raise ValueError(
                    f"row {number}: expected {len(self.header)} cells {self.header}, got {len(row)}: {row!r}"
                )


@dataclass(frozen=True)
class Figure:
    """A PNG image with its caption; the caption is also the text that stands for the image."""

    png: bytes
    caption: str

    def __post_init__(self) -> None:
        if not self.png.startswith(b"\x89PNG\r\n\x1a\n"):
            raise ValueError(f"expected the bytes of a PNG image, got {self.png[:16]!r}")


@dataclass(frozen=True)
class Section:
    """One section of a report: a heading, then its paragraphs, its table and its figures, in this order."""

    heading: str
    paragraphs: Sequence[str] = ()
    table: Table | None = None
    figures: Sequence[Figure] = ()


def write_report(path: Path, title: str, sections: Sequence[Section]) -> Path:
    """Writes one HTML file (UTF-8; beside `path`, then renamed) and returns its path."""
    write_atomic(path, render(title, sections))
    return path


def render(title: str, sections: Sequence[Section]) -> str:
    """The HTML page as text. All of `title` and `sections` is plain text and is escaped."""
    body = "\n".join(_section(section) for section in sections)
    # The policy is a second lock: even a slip in escaping could neither run a script nor fetch anything.
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{_text(title)}</title>\n<style>{_STYLE}</style>\n</head>\n"
        f"<body>\n<h1>{_text(title)}</h1>\n{body}\n</body>\n</html>\n"
    )


def _section(section: Section) -> str:
    parts = [f"<h2>{_text(section.heading)}</h2>"]
    parts += [f"<p>{_text(paragraph)}</p>" for paragraph in section.paragraphs]
    if section.table is not None:
        parts.append(_table(section.table))
    parts += [_figure(figure) for figure in section.figures]
    return "<section>\n" + "\n".join(parts) + "\n</section>"


def _table(table: Table) -> str:
    numeric = [_is_numeric_column([row[i] for row in table.rows]) for i in range(len(table.header))]
    caption = f"<caption>{_text(table.caption)}</caption>" if table.caption else ""
    rows = "\n".join(_row("td", row, numeric) for row in table.rows)
    return (
        f'<div class="scroll"><table>{caption}\n<thead>{_row("th", table.header, numeric)}</thead>\n'
        f"<tbody>\n{rows}\n</tbody></table></div>"
    )


def _row(tag: str, cells: Sequence[str], numeric: Sequence[bool]) -> str:
    kinds = [' class="number"' if right else "" for right in numeric]
    return (
        "<tr>"
        + "".join(f"<{tag}{kind}>{_text(cell)}</{tag}>" for cell, kind in zip(cells, kinds, strict=True))
        + "</tr>"
    )


def _figure(figure: Figure) -> str:
    data = base64.b64encode(figure.png).decode("ascii")
    caption = _text(figure.caption)
    return (
        f'<figure><img src="data:image/png;base64,{data}" alt="{caption}">\n<figcaption>{caption}</figcaption></figure>'
    )


def _is_numeric_column(cells: Sequence[str]) -> bool:
    """Whether every cell reads as a number, perhaps with an interval or a unit: such columns stand right-aligned."""
    return (
        bool(cells) and all(len(cell) <= 40 and cell[:1] in "+-−0123456789–" for cell in cells if cell) and any(cells)
    )


def _text(text: str) -> str:
    """Escaped for element content and for attributes in double quotes; what UTF-8 cannot hold becomes "?"."""
    return escape(text.encode("utf-8", "replace").decode("utf-8").replace("\0", "\ufffd"), quote=True)
