"""Progress bars, on a terminal, in a notebook and in a log file, and tables of text."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

SECONDS_IN_A_LOG = 15.0
"""Between two lines of a log file, which keeps them all."""


def make_bar(total: int, name: str, *, show: bool = True, log_s: float | None = None, **shape: Any) -> Any:
    """A tqdm bar on stderr: redrawn on a terminal and in a notebook, a line now and then in a log file.

    `log_s` are the seconds between such lines (None: `SECONDS_IN_A_LOG`), `shape` holds more of tqdm's arguments; of
    several processes one shows the bar.
    """
    from tqdm.auto import tqdm

    in_a_notebook = type(sys.stderr).__module__.startswith("ipykernel.")  # which is no terminal, but redraws
    if not (sys.stderr.isatty() or in_a_notebook):
        shape = {"file": _Lines(sys.stderr), "mininterval": SECONDS_IN_A_LOG if log_s is None else log_s, **shape}
    # miniters: by itself a bar would wait for as many steps as an earlier call had left done at once.
    return tqdm(total=total, desc=name, disable=not show, miniters=0, dynamic_ncols=True, **shape)


_CURSOR_UP = "\x1b[A"
"""Text that tqdm writes after a bar below another one."""


class _Lines:
    """A log file in which each state of a bar is a line of its own."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def write(self, text: str) -> None:
        if state := text.replace(_CURSOR_UP, "").strip():
            self._file.write(f"{state}\n")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


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
