"""A monitor: asks a detector at each step of a run, warns, and where that is wanted stops the run or keeps its best."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np

from ..arguments import environment_number
from ..errors import DataError, did_you_mean, warn_caller
from .detector import Detector, Metrics, table_of
from .runs import METRICS, WARNINGS, read_run
from .signals import SIGNALS, Array

ACTIONS: Final = ("warn", "stop")
BASIC: Final = ("distance", "gain")
"""Signals whose absence is told."""
Keep = Callable[[int], object]


class OveroptimizationWarning(UserWarning):
    """The proxy is probably no longer worth following."""


class Monitor:
    """Is given each step's metrics, and says whether the run should go on: a callback of `learn`, of one run.

    Args:
        detector: Fitted on other runs; see `Detector.fit`. None: the shipped one, of runs of the sandbox.
        threshold: Log-odds above which it warns; None: the detector's.
        action: "stop" ends the run with its first warning; "warn" lets it go on.
        keep: Is called with the step until the first warning, to save the policy, such as
            `lambda step: agent.save(f"kept/{step}")`. The metrics of a step are of the policy before its update: those
            of the next step tell whether what was saved is good.
        keep_every: Steps between its calls.
        out: Folder of a warnings.jsonl, a line a warning; None: none. If it is the run's own, a monitor of a run that
            was resumed reads there what came before.

    Attributes:
        warned: The step of the first warning; None before.
        kept: The last step that `keep` was called with whose next step was not warned of; None before.
        scores: The detector's of each step so far.

    Raises:
        UnknownNameError: There is no such action.
        ValueError: The threshold is NaN, or `keep_every` below 1.
        TypeError: `detector` is none, or `keep` no function.
    """

    def __init__(
        self,
        detector: Detector | None = None,
        *,
        threshold: float | None = None,
        action: Literal["warn", "stop"] = "warn",
        keep: Keep | None = None,
        keep_every: int = 1,
        out: str | Path | None = None,
    ) -> None:
        if action not in ACTIONS:
            raise did_you_mean("action", action, ACTIONS)
        if not (keep is None or callable(keep)):
            raise TypeError(f"keep: expected a function of the step, got {keep!r}.")
        if keep_every < 1:
            raise ValueError(f"keep_every: expected a number of steps, 1 or more, got {keep_every!r}.")
        self.detector, self.threshold = _asked(detector, threshold)
        self.action = action
        self.warned: int | None = None
        self.kept: int | None = None
        self.scores: list[float] = []
        self._keep, self._keep_every, self._out = keep, keep_every, None if out is None else Path(out)
        self._saved: int | None = None
        self._metrics: list[Mapping[str, Any]] = []

    def __call__(self, metrics: Mapping[str, Any]) -> bool:
        """Notes a step's metrics, by our agents' names; False where the run should stop.

        Raises:
            ValueError: The step is not after the last one: this is another run's monitor.
            DataError: The run's first metrics have no signal that the detector knows.
        """
        step = int(metrics.get("step", len(self._metrics) + 1))
        if not self._metrics and step > 1:
            self.begin(self._before(step))
        return self.judge({**metrics, "step": step})

    def begin(self, metrics: Metrics) -> None:
        """Is told what came before the first step that it sees, of a run that was resumed."""
        self._metrics, self.scores = list(metrics), self.detector.scores(metrics).tolist() if metrics else []

    def judge(self, metrics: Mapping[str, Any]) -> bool:
        """As a call, for trainers whose metrics do not begin with step 1, or leave steps out."""
        step = int(metrics["step"])
        if self._metrics and step <= self._metrics[-1]["step"]:
            last = self._metrics[-1]["step"]
            raise ValueError(f"Expected a step after {last}, got {step}. A monitor is of one run: make one for each.")
        self._metrics.append(dict(metrics))
        table = table_of(self._metrics, tuple(self.detector.weights))
        if len(self._metrics) == 1:
            refuse_blind(self.detector, table, f"The metrics {', '.join(metrics)}")
        self.scores.append(float(self.detector.scores_of(table)[-1]))
        if self.warned is None and self.scores[-1] > self.threshold:
            self.warned = step
            self._tell(step)
        elif self.warned is None and self._keep is not None:
            self.kept = self._saved
            if len(self._metrics) % self._keep_every == 0:
                self._keep(step)
                self._saved = step
        return self.warned is None or self.action == "warn"

    def for_trl(self) -> Any:
        """This monitor as a callback of TRL's online trainers (GRPO, RLOO ...)."""
        from .callbacks import trl_callback

        return trl_callback(self)

    def for_sb3(self) -> Any:
        """This monitor as a callback of Stable-Baselines3."""
        from .callbacks import sb3_callback

        return sb3_callback(self)

    def _before(self, step: int) -> list[dict[str, Any]]:
        """The metrics before a step from the run's folder, or a warning that they are missing."""
        rows = read_run(self._out) if self._out is not None and (self._out / METRICS).is_file() else []
        before = [row for row in rows if row["step"] < step]
        if not before:
            missing(step)
        return before

    def _tell(self, step: int) -> None:
        most = [(name, part) for name, part in self.detector.parts(self._metrics).items() if part > 0][:3]
        told = "; ".join(f"{SIGNALS[name]} (+{part:.1f})" for name, part in most) or "no one signal"
        text = f"Step {step}: the proxy is probably no longer worth following. What tells: {told}."
        if self._out is not None and environment_number("RANK", 0) == 0:  # of several processes, one
            self._out.mkdir(parents=True, exist_ok=True)
            with (self._out / WARNINGS).open("a", encoding="utf-8") as file:
                signal = most[0][0] if most else ""
                file.write(json.dumps({"step": step, "signal": signal, "text": text}, allow_nan=False) + "\n")
        warn_caller(text, OveroptimizationWarning)


def watch(run: str | Path | Metrics, detector: Detector | None = None, *, threshold: float | None = None) -> int | None:
    """The first step of a finished or running run that its monitor would warn of; None for none.

    Args:
        run: Its folder, its metrics.jsonl, or the metrics of each step.
        detector: As of `Monitor`.
        threshold: As of `Monitor`.

    Raises:
        DataError: There is no such file, no step, or no signal that the detector knows.
    """
    metrics = read_run(run) if isinstance(run, str | Path) else list(run)
    detector, limit = _asked(detector, threshold)
    if not metrics or not all("step" in row for row in metrics):
        raise DataError(f"Expected the metrics of each step, with its number as step; got {metrics[:1]!r}.")
    table = table_of(metrics, tuple(detector.weights))
    refuse_blind(detector, table, str(run) if isinstance(run, str | Path) else "The metrics")
    first, second = metrics[0]["step"], metrics[min(1, len(metrics) - 1)]["step"]
    if first > 1 and second - first < first:  # who logs every tenth step begins with the tenth
        missing(first)
    for row, score in zip(metrics, detector.scores_of(table), strict=True):
        if score > limit:
            return int(row["step"])
    return None


def refuse_blind(detector: Detector, table: Array, who: str) -> None:
    """Refuses signals [K, S] that are all unknown (DataError), and warns where those of KL or proxy are."""
    unknown = [name for name, values in zip(detector.weights, table.T, strict=True) if np.isnan(values).all()]
    if len(unknown) == len(detector.weights):
        raise DataError(f"{who}: expected metrics by our agents' names, such as kl/k1 and score/mean; found none.")
    if lacking := [SIGNALS[name] for name in BASIC if name in unknown]:
        warn_caller(f"{who} lack what tells most: {'; '.join(lacking)}. Warnings without it are worth little.")


def missing(step: int) -> None:
    """Warns that a run's first steps are not known."""
    warn_caller(
        f"A monitor sees this run from step {step} on, and takes that for its start. Give it the whole metrics.jsonl, "
        "or Monitor(out=FOLDER) with the run's own folder."
    )


def _asked(detector: Detector | None, threshold: float | None) -> tuple[Detector, float]:
    """The detector, the shipped one by default, and the score above which it warns."""
    detector = Detector.load() if detector is None else detector
    if not isinstance(detector, Detector):
        raise TypeError(f"detector: expected a Detector (Detector.load reads one from a file), got {detector!r}.")
    limit = detector.threshold if threshold is None else threshold
    if math.isnan(limit):
        raise ValueError("threshold: expected log-odds, got NaN.")
    return detector, limit
