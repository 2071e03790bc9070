"""The files of a run that grow with its steps: metrics.jsonl, timing.jsonl and TensorBoard's."""

import json
import math
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from accelerate.tracking import TensorBoardTracker

from .checkpoints import writing


class RunLog:
    """Appends a line a step to the files in `out`, of which `step` steps are written.

    Attributes:
        length: Bytes of metrics.jsonl as this run has left it.
    """

    def __init__(self, out: Path, *, length: int, step: int) -> None:
        self.out, self.length = out, length
        self._board: TensorBoardTracker | None = None
        if find_spec("tensorboard"):
            with writing(out):
                self._board = TensorBoardTracker("tensorboard", out, purge_step=step + 1)
                self._board.start()

    def write(self, metrics: Mapping[str, float], seconds: float, parts: Mapping[str, float]) -> None:
        """One step: its metrics, its seconds and those of its parts."""
        with writing(self.out):
            with (self.out / "metrics.jsonl").open("a", encoding="utf-8", newline="\n") as file:
                known = {name: None if math.isnan(value) else value for name, value in metrics.items()}
                file.write(json.dumps(known, allow_nan=False) + "\n")
                self.length = file.tell()
            with (self.out / "timing.jsonl").open("a", encoding="utf-8", newline="\n") as file:
                rounded = {name: round(value, 4) for name, value in {"seconds": seconds, **parts}.items()}
                file.write(json.dumps({"step": metrics["step"], **rounded}) + "\n")
            if self._board is not None:
                self._board.log(dict(metrics), step=int(metrics["step"]))

    def close(self) -> None:
        """Where the run ends, or is left; `write` opens the files again."""
        if self._board is not None:
            with writing(self.out):
                self._board.finish()
