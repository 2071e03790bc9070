"""How far a pool is, on the terminal."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .asking import Progress

_FORMAT = "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} pairs, {elapsed} gone, {remaining} left{postfix}"
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
            # miniters: by itself the bar would wait for as many pairs as came at once from the ledger.
            shape: Any = {"bar_format": _FORMAT, "mininterval": every, "miniters": 1, "dynamic_ncols": True}
            bars.append(tqdm(total=progress.total, desc=name, **shape))
        bar = bars[0]
        cost = "price unknown" if math.isnan(progress.cost_usd) else f"${progress.cost_usd:.4f} so far"
        bar.set_postfix_str(cost, refresh=False)
        bar.update(progress.done - bar.n)

    try:
        yield show
    finally:
        for bar in bars:
            bar.close()
