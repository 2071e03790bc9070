"""Tables for a terminal."""

from collections.abc import Mapping, Sequence
from typing import Any


def format_cell(value: Any) -> str:
    """Floats with two decimals."""
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def format_table(columns: Sequence[str], rows: Sequence[Mapping[str, Any]], *, left: int = 1) -> str:
    """Aligned text; the first `left` columns are left-aligned."""
    cells = [list(columns), *([format_cell(row[column]) for column in columns] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in cells
    )
