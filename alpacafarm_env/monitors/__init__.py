"""Monitors of a run: numbers from its metrics, without gold, that tell when the proxy is no longer worth following.

    monitor = Monitor(action="stop")
    agent.learn(callback=monitor)          # one of ours
    GRPOTrainer(..., callbacks=[monitor.for_trl()])
    PPO(...).learn(20_000, monitor.for_sb3())
    watch("results/train/ppo-ann-0")

`wrappers.RewardAudit` adds what needs the responses' texts: repetition, and second opinions on some of them.
"""

from .detector import Detector, Past, table_of
from .monitor import Monitor, OveroptimizationWarning, watch
from .runs import read_run
from .signals import SIGNALS, agreement, repetition, signals

__all__ = [
    "SIGNALS",
    "Detector",
    "Monitor",
    "OveroptimizationWarning",
    "Past",
    "agreement",
    "read_run",
    "repetition",
    "signals",
    "table_of",
    "watch",
]
