"""Jobs of processes of torchrun, or of one alone: `python torchrun_jobs.py commands|methods DATA POLICY REWARD OUT`."""

from __future__ import annotations

import os
import sys
from unittest.mock import patch

from alpacafarm_env.agents import BestOfN
from alpacafarm_env.benchmarks import train
from alpacafarm_env.benchmarks.experiment import evaluation
from alpacafarm_env.benchmarks.win_rate_curve import __main__ as win_rate_curve


def run_commands(data: str, policy: str, reward_model: str, out: str) -> None:
    own = ["--dataset", data, "--policy", policy, "--preset", "sandbox"]
    sizes = {"processes": 1, "seeds": 1, "steps": 2, "evaluate-every": 1, "num-val": 3, "num-eval": 5}
    sizes |= {"rollout-batch-size": 16, "minibatch-size": 8}
    given = [*own, "--reward-model", reward_model, *(f"--{name}={size}" for name, size in sizes.items())]
    options = win_rate_curve.WinRateCurveOptions.parse([*given, "--out", f"{out}/curve"])
    assert win_rate_curve.run(options) == 0
    # Files of two answers each: there is something to share.
    with patch.object(evaluation, "ANSWERED_AT_ONCE", 2), patch.object(BestOfN, "instructions_at_once", 2):
        for method, more in (("dpo", []), ("best_of_16", ["--reward-model", reward_model])):
            given = [method, *own, *more, "--num-eval", "5", "--out", f"{out}/{method}"]
            assert train.run(train.parse(given)) == 0


ONLINE = {"rollout-batch-size": 16, "minibatch-size": 8, "steps": 3, "learning-rate": 1e-4}
OFFLINE = {"epochs": 1, "batch-size": 3, "learning-rate": 1e-4}
METHODS: dict[str, dict[str, object]] = {
    "ppo": ONLINE,
    "quark": ONLINE,
    "dpo": OFFLINE,
    "sft": OFFLINE,
    "binary_feedme": OFFLINE,
    "reward_conditioning": OFFLINE,
    "reward_modeling": OFFLINE,
    "expert_iteration": {"num-instructions": 6, "sample-batch-size": 16, **OFFLINE},
    "best_of_16": {},
}
ADAPTERLESS = ("reward_conditioning", "reward_modeling", "best_of_16")
"""Need embeddings of their own, or train no policy."""
VARIANTS = {"plain": [], "lora": ["--lora", "2"], "shards": ["--sharding", "full"]}
RUNS = {
    f"{method}-{variant}": [method, *options, *(f"--{name}={value}" for name, value in METHODS[method].items())]
    for method in METHODS
    for variant, options in VARIANTS.items()
    if (variant == "plain" or method != "best_of_16") and (variant != "lora" or method not in ADAPTERLESS)
}
"""Name -> the command's arguments."""
RUNS_FOR_EVER = ["ppo", "--sharding", "full", "--rollout-batch-size=16", "--minibatch-size=8", f"--steps={10**6}"]


def run_methods(data: str, policy: str, reward_model: str, out: str, *names: str) -> None:
    for name in names or RUNS:
        given = RUNS.get(name, RUNS_FOR_EVER)
        method, models = given[0], ["--policy", policy, "--preset", "sandbox"]
        models += [] if method == "reward_modeling" else ["--num-eval", "3"]
        if method in ("ppo", "quark", "expert_iteration", "best_of_16"):
            models += ["--reward-model", reward_model]
        given = [*given, "--dataset", data, *models, "--out", f"{out}/{name}"]
        assert train.run(train.parse(given)) == 0, name
        if os.environ.get("RANK", "0") == "0":
            print("finished", name, flush=True)


if __name__ == "__main__":
    {"commands": run_commands, "methods": run_methods}[sys.argv[1]](*sys.argv[2:])
