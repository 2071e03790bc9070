"""Commands as processes of torchrun, or one alone, run them: `python torchrun_commands.py DATA POLICY REWARD OUT`."""

from __future__ import annotations

import sys
from unittest.mock import patch

from alpacafarm_env.agents import BestOfN
from alpacafarm_env.benchmarks import train
from alpacafarm_env.benchmarks.experiment import answering
from alpacafarm_env.benchmarks.win_rate_curve import plan as win_rate_curve


def main(data: str, policy: str, reward_model: str, out: str) -> None:
    own = ["--dataset", data, "--policy", policy, "--preset", "sandbox"]
    sizes = {"processes": 1, "seeds": 1, "steps": 2, "evaluate-every": 1, "num-val": 3, "num-eval": 5}
    sizes |= {"rollout-batch-size": 16, "minibatch-size": 8}
    given = [*own, "--reward-model", reward_model, *(f"--{name}={size}" for name, size in sizes.items())]
    options = win_rate_curve.WinRateCurveOptions.parse([*given, "--out", f"{out}/curve"])
    assert win_rate_curve.run(options) == 0
    # Files of two answers each: there is something to share.
    with patch.object(answering, "ANSWERED_AT_ONCE", 2), patch.object(BestOfN, "instructions_at_once", 2):
        for method, more in (("dpo", []), ("best_of_16", ["--reward-model", reward_model])):
            given = [method, *own, *more, "--num-eval", "5", "--out", f"{out}/{method}"]
            assert train.run(train.parse(given)) == 0


if __name__ == "__main__":
    main(*sys.argv[1:])
