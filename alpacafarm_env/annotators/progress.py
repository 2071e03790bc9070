"""How far a pool is, on the terminal."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .asking import Progress

_SECONDS_BETWEEN = {True: 0.1, False: 15.0}
"""Between two updates: a terminal overwrites its line, a file or a CI log grows by each."""


@contextmanager
def progress_bar(name: str) -> Iterator[Callable[[Progress], None]]:
    """A bar on stderr: pairs done of all, the time left, dollars so far. Nothing is shown before the first answer.

    Args:
        name: Stands before the bar.

    Yields:
        What `AnnotatorPool` takes as `on_progress`.
    """
    from tqdm import tqdm

    bars: list[Any] = []

    def show(progress: Progress) -> None:
        if not bars:
            every = _SECONDS_BETWEEN[sys.stderr.isatty()]
            bars.append(tqdm(total=progress.total, desc=name, unit="pair", mininterval=every, dynamic_ncols=True))
        bar = bars[0]
        cost = "price unknown" if math.isnan(progress.cost_usd) else f"${progress.cost_usd:.4f}"
        bar.set_postfix_str(cost, refresh=False)
        bar.update(progress.done - bar.n)

    try:
        yield show
    finally:
        for bar in bars:
            bar.close()
