"""Who learns of a run's metrics: the files that grow with its steps, trackers and a callback."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker, get_available_trackers

from ..arguments import match_name
from ..errors import TrackerError
from ..monitors.runs import append_rollouts, without_nan
from .checkpoints import writing
from .processes import Processes

PROJECT: Final = "alpacafarm-env"
"""The project of runs in a tracker that is named only."""
SHOWN: tuple[str, ...] = ("loss", "accuracy", "score/mean", "kl/k1")
"""The metrics shown next to the progress bar."""

Callback = Callable[[dict[str, float]], object]
"""Is given a step's metrics; answers False to stop there."""
Trackers: TypeAlias = str | GeneralTracker | Sequence[str | GeneralTracker]
"""One or more: accelerate's names, such as "wandb", "trackio", "mlflow" and "comet_ml", or trackers of one's own."""


class RunLog:
    """Appends a line a step to metrics.jsonl and timing.jsonl in `out`, and responses to `ROLLOUTS`.

    Attributes:
        length: Bytes of metrics.jsonl as this run has left it.
    """

    def __init__(self, out: Path, *, length: int) -> None:
        self.out, self.length = out, length

    def write(
        self, metrics: Mapping[str, float], seconds: Mapping[str, float], rollouts: Sequence[Mapping[str, Any]] = ()
    ) -> None:
        """One step: its metrics, its seconds and those of its parts, and some of its responses."""
        with writing(self.out):
            append_rollouts(self.out, int(metrics["step"]), rollouts)  # before the metrics that they are of
            self.length = append_line(self.out / "metrics.jsonl", without_nan(metrics))
            rounded = {name: round(value, 4) for name, value in seconds.items()}
            append_line(self.out / "timing.jsonl", {"step": metrics["step"], **rounded})


def append_line(path: Path, row: Mapping[str, Any]) -> int:
    """Append a line of JSON to a file; its length now, in bytes."""
    with path.open("a", encoding="utf-8", newline="\n") as file:
        file.write(json.dumps(row, allow_nan=False) + "\n")
        return file.tell()


@contextmanager
def reporting(
    callback: Callback | None, trackers: Trackers, settings: dict[str, Any], out: Path | None, processes: Processes
) -> Iterator[Callable[[Mapping[str, float]], bool]]:
    """Starts trackers; yields what reports a step to them, and to the callback, and says whether the run goes on.

    Trackers are of the main process, and end with the run, however it ends. The callback is called on every process,
    and stops all if it stops one.
    """
    if not (callback is None or callable(callback)):
        raise TypeError(f"callback: expected a function of a step's metrics, or None, got {callback!r}.")
    started = [tracker for tracker in _make_trackers(trackers, out) if processes.is_main]
    has_listeners = callback is not None or bool(trackers)

    def report(metrics: Mapping[str, float]) -> bool:
        values = {name: value for name, value in metrics.items() if name != "step"}
        for tracker in started:
            tracker.log(values, step=int(metrics["step"]))
        answer = None if callback is None else callback(dict(metrics))
        return not isinstance(answer, bool | np.bool_) or bool(answer)

    def report_on_all(metrics: Mapping[str, float]) -> bool:
        return not has_listeners or all(processes.gather(processes.together(lambda: report(metrics))))

    with ExitStack() as ending:

        def start() -> None:
            for tracker in started:
                tracker.start()
                ending.callback(tracker.finish)
                tracker.store_init_configuration(settings)

        if has_listeners:
            processes.together(start)
        yield report_on_all


def flat(settings: Mapping[str, Any], before: str = "") -> dict[str, int | float | str]:
    """Settings as all trackers take them: those of an inner config by names with dots, what is no number as text."""
    rows: dict[str, int | float | str] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping):
            rows |= flat(value, f"{before}{name}.")
        else:
            rows[before + name] = value if isinstance(value, int | float) else str(value)
    return rows


def _make_trackers(trackers: Trackers, out: Path | None) -> list[GeneralTracker]:
    """Trackers that are not started yet; TrackerError or UnknownNameError if one cannot be."""
    made = []
    for each in [trackers] if isinstance(trackers, str | GeneralTracker) else trackers:
        if isinstance(each, GeneralTracker):
            made.append(each)
            continue
        name = match_name("tracker", each, sorted(map(str, LOGGER_TYPE_TO_CLASS)))
        if name not in map(str, get_available_trackers()):
            raise TrackerError(f"trackers={name!r} needs a package that is not installed. Install {name}.")
        tracker = LOGGER_TYPE_TO_CLASS[name]
        if tracker.requires_logging_directory and out is None:
            raise TrackerError(f"trackers={name!r} needs a folder to write into. Give the agent an out.")
        made.append(tracker(PROJECT, out) if tracker.requires_logging_directory else tracker(PROJECT))
    return made
