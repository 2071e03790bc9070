"""A monitor as a callback of other trainers, their metrics by our names. Each loads its library when it is made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..errors import warn_caller

Monitor = Any
"""A `monitor.Monitor`, which imports this module."""

TRL_NAMES = {
    "reward": "score/mean",
    "reward_std": "score/std",
    "entropy": "entropy",
    "completions/mean_length": "tokens/mean",
}
"""TRL's name -> ours, where they mean the same."""


def from_trl(logs: Mapping[str, Any]) -> dict[str, float]:
    """A line of TRL's log as our agents' metrics; {} of one that says nothing of samples.

    Its KL is a token's mean, ours a response's. With beta 0 it has none.
    """
    metrics = {ours: float(logs[theirs]) for theirs, ours in TRL_NAMES.items() if theirs in logs}
    if "completions/clipped_ratio" in logs:
        metrics["finished"] = 1 - float(logs["completions/clipped_ratio"])
    if "kl" in logs and "tokens/mean" in metrics:
        metrics["kl/k1"] = float(logs["kl"]) * metrics["tokens/mean"]
    return metrics if "score/mean" in metrics else {}


def trl_callback(monitor: Monitor) -> Any:
    """A `TrainerCallback` that gives a monitor what TRL's online trainers log, and stops the trainer for it."""
    from transformers import TrainerCallback

    class MonitorCallback(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            metrics = from_trl(logs or {})
            if metrics and not monitor.scores:  # a trainer that was resumed has its log
                earlier = [row for row in state.log_history if row["step"] < state.global_step]
                monitor.begin([{**known, "step": row["step"]} for row in earlier if (known := from_trl(row))])
            if metrics and not monitor.judge({**metrics, "step": state.global_step}):
                control.should_training_stop = True

    return MonitorCallback()


def sb3_callback(monitor: Monitor) -> Any:
    """A `BaseCallback` that gives a monitor what each rollout says, and stops the learning for it.

    The KL is that of `agents.sb3.KLRolloutBuffer`; the rest is of `VecMonitor`, with each of its `info_keywords`.
    """
    from stable_baselines3.common.callbacks import BaseCallback

    class MonitorCallback(BaseCallback):
        goes_on = True

        def _on_step(self) -> bool:
            return self.goes_on

        def _on_rollout_end(self) -> None:
            episodes = list(self.model.ep_info_buffer or ())
            if not episodes:
                warn_caller(
                    f"The monitor has seen no episode that ended within {self.num_timesteps} steps. It reads those of "
                    "VecMonitor: wrap the environments in it."
                )
                return
            named = {"r": "score/mean", "l": "tokens/mean"}
            keys = {key for episode in episodes for key in episode} - {"t"}
            known = {key: [each[key] for each in episodes if each[key] == each[key]] for key in keys}
            metrics = {named.get(key, f"info/{key}"): float(np.mean(own)) for key, own in known.items() if own}
            metrics["score/std"] = float(np.std([episode["r"] for episode in episodes]))
            if (kl := getattr(self.locals.get("rollout_buffer"), "kl_per_response", None)) is not None:
                metrics["kl/k1"] = float(kl)
            entropy = self.logger.name_to_value.get("train/entropy_loss")  # of the rollout before
            metrics |= {} if entropy is None else {"entropy": -float(entropy)}
            self.goes_on = self.goes_on and monitor.judge({**metrics, "step": self.num_timesteps})

    return MonitorCallback()
