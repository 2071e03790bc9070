"""What else learns of a run's metrics: experiment trackers, by accelerate's own classes, and a callback."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker, get_available_trackers

from ..errors import TrackerError, did_you_mean
from .processes import Processes
from .settings import Settings

PROJECT: Final = "alpacafarm-env"
"""What runs belong to in a tracker that is named only."""

Callback = Callable[[dict[str, float]], object]
"""Is given a step's metrics; answers False to stop there."""
Trackers: TypeAlias = str | GeneralTracker | Sequence[str | GeneralTracker]
"""One or more: accelerate's names, such as "wandb", "trackio", "mlflow" and "comet_ml", or trackers of one's own."""


@contextmanager
def following(
    callback: Callback | None,
    trackers: Trackers,
    *,
    config: Settings,
    seed: int,
    out: Path | None,
    processes: Processes,
) -> Iterator[Callable[[Mapping[str, float]], bool]]:
    """Starts trackers; yields what tells them, and the callback, of a step, and says whether the run goes on.

    Trackers are of the main process, and end with the run, however it ends. The callback is called on every process,
    and stops all if it stops one.
    """
    if not (callback is None or callable(callback)):
        raise TypeError(f"callback: expected a function of a step's metrics, or None, got {callback!r}.")
    started = [each for each in _found(trackers, out) if processes.is_main]
    asked = callback is not None or bool(trackers)

    def tell(metrics: Mapping[str, float]) -> bool:
        values = {name: value for name, value in metrics.items() if name != "step"}
        for tracker in started:
            tracker.log(values, step=int(metrics["step"]))
        answer = None if callback is None else callback(dict(metrics))
        return not isinstance(answer, bool | np.bool_) or bool(answer)

    def tell_all(metrics: Mapping[str, float]) -> bool:
        return not asked or all(processes.gather(processes.together(lambda: tell(metrics))))

    with ExitStack() as ending:

        def start() -> None:
            for tracker in started:
                tracker.start()
                ending.callback(tracker.finish)
                tracker.store_init_configuration({**flat(asdict(config)), "seed": seed})

        if asked:
            processes.together(start)
        yield tell_all


def flat(settings: Mapping[str, Any], before: str = "") -> dict[str, int | float | str]:
    """Settings as all trackers take them: those of an inner config by names with dots, what is no number as text."""
    found: dict[str, int | float | str] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{before}{name}.")
        else:
            found[before + name] = value if isinstance(value, int | float) else str(value)
    return found


def _found(trackers: Trackers, out: Path | None) -> list[GeneralTracker]:
    """Trackers that are not started yet; TrackerError or UnknownNameError if one cannot be."""
    named = [trackers] if isinstance(trackers, str | GeneralTracker) else trackers
    found = []
    for name in named:
        if isinstance(name, GeneralTracker):
            found.append(name)
            continue
        known = {str(each) for each in LOGGER_TYPE_TO_CLASS}
        if name not in known:
            raise did_you_mean("tracker", name, sorted(known))
        if name not in map(str, get_available_trackers()):
            raise TrackerError(f"trackers={name!r} needs a package that is not installed. Install {name}.")
        if name == "tensorboard" and out is not None:
            continue  # the run's own log writes it
        tracker = LOGGER_TYPE_TO_CLASS[name]
        if not tracker.requires_logging_directory:
            found.append(tracker(PROJECT))
        elif out is None:
            raise TrackerError(f"trackers={name!r} needs a folder to write into. Give the agent an out.")
        else:
            found.append(tracker(PROJECT, out))
    return found
