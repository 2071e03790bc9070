"""Commands as processes of torchrun, or one alone, run them: `python torchrun_commands.py DATA POLICY REWARD OUT`."""

from __future__ import annotations

import sys
from dataclasses import replace
from unittest.mock import patch

from alpacafarm_env.agents import BestOfN, PPOConfig
from alpacafarm_env.benchmarks import train
from alpacafarm_env.benchmarks.experiment import runs as method_runs
from alpacafarm_env.benchmarks.win_rate_curve import command as win_rate_curve
from alpacafarm_env.benchmarks.win_rate_curve.plan import RunPlan


def small(plan: RunPlan) -> PPOConfig:
    """A preset for models that know 128 positions."""
    return replace(
        PPOConfig.sandbox(),
        rollout_batch_size=16,
        minibatch_size=8,
        max_response_tokens=8,
        total_steps=plan.steps,
        save_every=plan.evaluate_every,
    )


def main(data: str, policy: str, reward_model: str, out: str) -> None:
    own = ["--dataset", data, "--policy", policy, "--preset", "sandbox"]
    with patch.object(RunPlan, "ppo_config", small):
        sizes = {"processes": 1, "seeds": 1, "steps": 2, "evaluate-every": 1, "num-val": 3, "num-eval": 5}
        models = [*own, "--reward-model", reward_model]
        options = win_rate_curve.WinRateCurveOptions.parse(
            [*models, *(f"--{name}={size}" for name, size in sizes.items()), "--out", f"{out}/curve"]
        )
        assert win_rate_curve.run(options) == 0
    # Files of two answers each: there is something to share.
    with patch.object(method_runs, "ANSWERED_AT_ONCE", 2), patch.object(BestOfN, "instructions_at_once", 2):
        for method, more in (("dpo", []), ("best_of_16", ["--reward-model", reward_model])):
            given = [method, *own, *more, "--num-eval", "5", "--out", f"{out}/{method}"]
            assert train.run(train.parse(given)) == 0


if __name__ == "__main__":
    main(*sys.argv[1:])
