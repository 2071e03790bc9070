"""What every trained agent has: updates to go through, with or without a progress bar."""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import ClassVar

from .loop import Loop
from .progress import show_progress


class Trainer:
    """Base of what a `Loop` trains: a subclass makes `_loop` and defines `_step`."""

    label: ClassVar[str]
    """What the progress bar and warnings call it."""
    num_left_out: int = 0
    """Examples, or instructions of the environment, that are left out as their prompts are too long."""
    _loop: Loop

    def updates(self) -> Iterator[dict[str, float]]:
        """Train, one step at a time; yields each step's metrics."""
        return self._loop.run(self._step)

    def learn(self) -> dict[str, float]:
        """Train to the end, with a progress bar; returns the last metrics ({} if there was nothing left to do)."""
        return show_progress(self.updates(), done=self._loop.step, total=self._loop.total, label=self.label)

    def whole(self) -> AbstractContextManager[None]:
        """All models whole on each process, so that it may ask any of them as often as it likes, without gradients.

        Needed around what reads a reference or value model that is sharded; all processes enter and leave it together.
        """
        return self._loop.whole()

    @property
    def num_steps(self) -> int:
        """Steps of the whole run."""
        return self._loop.total

    def _step(self, step: int) -> dict[str, float]:
        """Make step `step` (from 1); its metrics."""
        raise NotImplementedError
