"""A monitor: asks a detector at each step of a run, warns, and where that is wanted stops the run or keeps its best."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, Literal

from ..arguments import environment_number
from ..errors import did_you_mean, warn_caller
from .detector import Detector, Metrics
from .runs import WARNINGS, read_run
from .signals import SIGNALS

ACTIONS: Final = ("warn", "stop")
Keep = Callable[[], object]


class OveroptimizationWarning(UserWarning):
    """The proxy is probably no longer worth following."""


class Monitor:
    """Is given each step's metrics, and says whether the run should go on: a callback of `learn`.

    Args:
        detector: Fitted on other runs; see `Detector.fit`. None: the shipped one, of runs of the sandbox.
        threshold: Log-odds above which it warns; None: the detector's.
        action: "stop" ends the run with its first warning; "warn" lets it go on.
        keep: Is called after each step until the first warning, to save the policy: what it wrote last is the policy
            before gold's fall. Such as `partial(agent.save, "best")`.
        keep_every: Steps between its calls.
        out: Folder of a warnings.jsonl, a line a warning; None: none.

    Attributes:
        warned: The step of the first warning; None before.
        kept: The step that was kept last; None before.
        scores: The detector's of each step so far.

    Raises:
        UnknownNameError: There is no such action.
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
        self.detector, self.action = detector or Detector.load(), action
        self.threshold = self.detector.threshold if threshold is None else threshold
        self.warned: int | None = None
        self.kept: int | None = None
        self.scores: list[float] = []
        self._keep, self._keep_every, self._out = keep, keep_every, None if out is None else Path(out)
        self._metrics: list[Mapping[str, Any]] = []

    def __call__(self, metrics: Mapping[str, Any]) -> bool:
        """Notes a step's metrics, by our agents' names; False where the run should stop."""
        self._metrics.append(dict(metrics))
        step = int(metrics.get("step", len(self._metrics)))
        self.scores.append(float(self.detector.scores(self._metrics)[-1]))
        if self.warned is None and self.scores[-1] > self.threshold:
            self.warned = step
            self._tell(step)
        elif self.warned is None and self._keep is not None and len(self._metrics) % self._keep_every == 0:
            self._keep()
            self.kept = step
        return self.warned is None or self.action == "warn"

    def for_trl(self) -> Any:
        """This monitor as a callback of TRL's online trainers (GRPO, RLOO ...)."""
        from .callbacks import trl_callback

        return trl_callback(self)

    def for_sb3(self) -> Any:
        """This monitor as a callback of Stable-Baselines3."""
        from .callbacks import sb3_callback

        return sb3_callback(self)

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
    """
    metrics = read_run(run) if isinstance(run, str | Path) else run
    detector = detector or Detector.load()
    limit = detector.threshold if threshold is None else threshold
    for row, score in zip(metrics, detector.scores(metrics), strict=True):
        if score > limit:
            return int(row["step"])
    return None
