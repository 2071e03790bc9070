"""The time that a cell has taken, over all calls that worked on it."""

import json
from pathlib import Path
from time import perf_counter

from ...data.files import write_atomic
from .stored import read_stored


class ElapsedTime:
    """Seconds spent on a cell by all calls, kept in its folder; a killed call loses the last second or step."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "seconds.json"
        self._before = 0.0
        if self._file.is_file():
            self._before = float(read_stored(self._file, "seconds", shape={"seconds": int | float})["seconds"])
        self._began = self._written = perf_counter()

    @property
    def seconds(self) -> float:
        """Wall time of this call and those before it."""
        return self._before + perf_counter() - self._began

    def keep(self, *, now: bool = False) -> None:
        """Writes the seconds down, at most once a second unless `now`."""
        if now or perf_counter() - self._written > 1:
            write_atomic(self._file, json.dumps({"seconds": self.seconds}))
            self._written = perf_counter()
