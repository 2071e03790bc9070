"""What every trained agent has: updates to go through, with or without a progress bar."""

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict
from typing import Any, ClassVar

from torch import Tensor

from .loop import Loop, Sums
from .progress import show_progress
from .settings import FREE_TO_CHANGE
from .tracking import Callback, Trackers, following


class Trainer:
    """Base of what a `Loop` trains: a subclass makes `_loop` and defines `_step`."""

    label: ClassVar[str]
    """What the progress bar and warnings call it."""
    num_left_out: int = 0
    """Examples, or instructions of the environment, that are left out as their prompts are too long."""
    _loop: Loop

    def updates(self) -> Iterator[dict[str, float]]:
        """Train, one step at a time; yields each step's metrics.

        Before the first one, passes of the largest update find out whether its micro-batches fit into the memory.

        Raises:
            NotEnoughMemoryError: Not even the longest row does.
        """
        if self.step < self.num_steps:
            self._loop.fit(*self._largest(), who=self.label)
        yield from self._loop.run(self._step)

    def learn(self, *, callback: Callback | None = None, trackers: Trackers = ()) -> dict[str, float]:
        """Train to the end, with a progress bar; returns the last metrics ({} if there was nothing left to do).

        Args:
            callback: Is called with each step's metrics, on every process, once they are on disk. If it returns False,
                the run ends there, with a checkpoint. What it raises is raised; the run goes on from its last
                checkpoint.
            trackers: Names of accelerate's trackers ("wandb", "trackio", "mlflow", "comet_ml" ...), or its
                `GeneralTracker` objects, such as `WandBTracker("my project", name="run 3")`; of the main process. They
                are given the config, the seed and each step's metrics. TensorBoard is written into `out` anyway.

        Raises:
            TypeError: `callback` cannot be called.
            TrackerError: A tracker's package is not installed, or it needs an `out`; nothing has been trained then.
            UnknownNameError: There is no such tracker.
        """
        with following(callback, trackers if self.step < self.num_steps else (), **self._run()) as tell:
            return show_progress(
                self.updates(), done=self.step, total=self.num_steps, label=self.label, tell=tell, stop=self._keep
            )

    @property
    def step(self) -> int:
        """Completed steps."""
        return self._loop.step

    def whole(self) -> AbstractContextManager[None]:
        """All models whole on each process, so that it may ask any of them as often as it likes, without gradients.

        Needed around what reads a reference or value model that is sharded; all processes enter and leave it together.
        """
        return self._loop.whole()

    @property
    def num_steps(self) -> int:
        """Steps of the whole run."""
        return self._loop.total

    @property
    def facts(self) -> dict[str, Any]:
        """The rows of a model card: the method, its steps and seed, and the settings that decide what it learns."""
        run = self._run()
        settings = {name: value for name, value in asdict(run["config"]).items() if name not in FREE_TO_CHANGE}
        steps = f"{self.step} of {self.num_steps}"
        return {"method": type(self).__name__, "steps": steps, "seed": run["seed"], "settings": settings}

    def _run(self) -> dict[str, Any]:
        """What `following` is to know of the run."""
        loop = self._loop
        return {"config": loop.config, "seed": loop.seed, "out": loop.out, "processes": loop.processes}

    def _keep(self) -> None:
        """Save the run as it is, if it is not yet."""
        self._loop.keep()

    def _longest_rows(self, sizes: Tensor, batch_size: int) -> Tensor:
        """The rows of this process's share of a batch in the worst case: those of the largest sizes, [b]."""
        return sizes.topk(min(len(sizes), math.ceil(batch_size / self._loop.processes.count))).indices

    def _largest(self) -> tuple[list[int], Sums]:
        """This process's largest update: tokens of each row in a micro-batch, and sums over some of these rows."""
        raise NotImplementedError

    def _step(self, step: int) -> dict[str, float]:
        """Make step `step` (from 1); its metrics."""
        raise NotImplementedError
