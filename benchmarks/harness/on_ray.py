"""Runs cells as tasks of a Ray cluster: a study outgrows its machine.

Every node needs the package as the driver has it, and sees the study's folder under the same path. The driver alone
stores rows. A task whose worker or node is lost is run again, by Ray.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from concurrent.futures import CancelledError
from contextlib import suppress
from pathlib import Path
from typing import Any

from ...errors import DataError
from .cells import Cell, CellError, ProgressFn, ProgressUpdate, Work, attempt, rows_of
from .study import Row

RETRIES = 3
"""Workers that a cell may lose before it has failed: one that takes too much memory would lose all of them."""


class OnRay:
    """A `cells.Runner`, connected to a cluster.

    Args:
        address: As of `ray.init`; "" for the one that RAY_ADDRESS names or that runs on this machine, else a new one.

    Raises:
        DataError: Ray is not installed, or no cluster answers there.
    """

    def __init__(self, address: str) -> None:
        try:
            import ray as installed
        except ImportError as error:
            raise DataError(f"--ray: {error}. Install it (pip install 'alpacafarm-env[ray]').") from error
        ray: Any = installed  # parts of it have no types
        if not ray.is_initialized():
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # a cluster that starts here reports to nobody
            try:
                ray.init(address or None, log_to_driver=False, logging_level=logging.ERROR)
            except (ConnectionError, RuntimeError, ValueError) as error:
                raise DataError(f"--ray {address}: expected the address of a Ray cluster, got {error}") from error
        self._ray, self._running = ray, set[Any]()
        self._has_gpus = ray.cluster_resources().get("GPU", 0) > 0

    def run(self, cell: Cell, on_progress: ProgressFn) -> Sequence[Row]:
        """See `Runner`; progress is told of whole cells."""
        on_progress(ProgressUpdate(cell.key, 0))
        gpus = cell.gpus if self._has_gpus else 0  # without any it would wait for ever; on CPUs it takes longer
        task = self._ray.remote(_attempt_there).options(
            name=cell.key, num_cpus=cell.cpus, num_gpus=gpus, max_retries=RETRIES
        )
        answer = task.remote(self._ray.cloudpickle.dumps(cell.work), str(Path.cwd()), sys.path)
        self._running.add(answer)
        try:
            return rows_of(self._ray.get(answer))
        except self._ray.exceptions.RayError as error:
            if answer not in self._running:
                raise CancelledError from None  # it was ended with the command: no failure of the cell
            raise CellError(f"its workers were lost, {RETRIES + 1} of them: {error}") from None
        finally:
            self._running.discard(answer)

    def stop(self) -> None:
        """See `Runner`."""
        for answer in list(self._running):
            self._running.discard(answer)
            with suppress(self._ray.exceptions.RayError):
                self._ray.cancel(answer, force=True)


def _attempt_there(pickled: bytes, folder: str, path: list[str]) -> list[Row] | CellError:
    """On a node: in the driver's folder, as paths may be relative, and with its modules, one's own among them."""
    from ray import cloudpickle

    loads: Any = cloudpickle.loads
    os.chdir(folder)
    sys.path += [entry for entry in path if entry not in sys.path]
    work: Work = loads(pickled)
    return attempt(work, lambda update: None)
