"""Tables for a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def format_cell(value: Any) -> str:
    """A value as a printed table shows it: floats with two decimals."""
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def format_table(columns: Sequence[str], rows: Sequence[Mapping[str, Any]], *, left: int = 1) -> str:
    """Rows as aligned text under the names of their columns; the first `left` columns stand to the left."""
    cells = [list(columns), *([format_cell(row[column]) for column in columns] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in cells
    )
