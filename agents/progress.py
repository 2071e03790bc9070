"""A training run's progress bar."""

from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from typing import Any, cast

from ..progress import make_bar
from .processes import join

SHOWN: tuple[str, ...] = ("loss", "accuracy", "score/mean", "kl/k1")
"""The metrics shown next to the progress bar."""


def show_progress(
    updates: Iterator[dict[str, float]],
    *,
    done: int,
    total: int,
    label: str,
    tell: Callable[[dict[str, float]], bool],
    stop: Callable[[], None],
) -> dict[str, float]:
    """Run `updates`, a generator, to the end behind a progress bar with an ETA; returns the last metrics.

    Each step is told to `tell`; where that is False, `stop` is called and the run ends.
    """
    metrics: dict[str, float] = {}
    show = join().is_main_process
    # Closed where it is interrupted too: a traceback that a notebook keeps would hold the run's folder.
    ending = closing(cast(Generator[Any, None, None], updates))
    with ending, make_bar(total, label, show=show, initial=done, unit="step") as bar:
        for metrics in updates:
            bar.set_postfix({name: metrics[name] for name in SHOWN if name in metrics}, refresh=False)
            bar.update()
            if not tell(metrics):
                stop()
                break
    return metrics
