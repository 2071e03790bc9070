"""The progress of a pool on the terminal."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ..annotators.served import Progress
from ..progress import make_bar

_FORMAT = "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} pairs, {elapsed} gone, {remaining} left{postfix}"

_LOG_S = 5.0


@contextmanager
def progress_bar(name: str) -> Iterator[Callable[[Progress], None]]:
    """A bar on stderr from the first answer on: pairs, time left, dollars. Yields the pool's `on_progress`."""
    bars: list[Any] = []

    def show(progress: Progress) -> None:
        if not bars:
            bars.append(make_bar(progress.total, name, log_s=_LOG_S, bar_format=_FORMAT))
        bar = bars[0]
        cost = "price unknown" if math.isnan(progress.cost_usd) else f"${progress.cost_usd:.4f} so far"
        bar.set_postfix_str(cost, refresh=False)
        bar.update(progress.done - bar.n)

    try:
        yield show
    finally:
        for bar in bars:
            bar.close()
