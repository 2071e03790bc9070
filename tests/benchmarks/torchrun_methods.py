"""Every method by the `train` command, by full weights, LoRA and in shards: one process, or those of torchrun.

`python torchrun_methods.py DATA POLICY REWARD OUT [NAME...]`
"""

from __future__ import annotations

import os
import sys

from alpacafarm_env.benchmarks import train

ONLINE = {"rollout-batch-size": 16, "minibatch-size": 8, "steps": 3, "learning-rate": 1e-4}
OFFLINE = {"epochs": 1, "batch-size": 3, "learning-rate": 1e-4}
METHODS: dict[str, dict[str, object]] = {
    "ppo": ONLINE,
    "quark": ONLINE,
    "quark_all_quantiles": ONLINE,
    "dpo": OFFLINE,
    "fine_tuning": OFFLINE,
    "binary_feedme": OFFLINE,
    "reward_conditioning": OFFLINE,
    "reward_modeling": OFFLINE,
    "expert_iteration": {"num-instructions": 6, "sample-batch-size": 16, **OFFLINE},
    "best_of_16": {},
}
ADAPTERLESS = ("quark_all_quantiles", "reward_conditioning", "reward_modeling", "best_of_16")
"""Need embeddings of their own, or train no policy."""
VARIANTS = {"plain": [], "lora": ["--lora", "2"], "shards": ["--sharding", "full"]}
RUNS = {
    f"{method}-{variant}": [method, *options, *(f"--{name}={value}" for name, value in METHODS[method].items())]
    for method in METHODS
    for variant, options in VARIANTS.items()
    if (variant == "plain" or method != "best_of_16") and (variant != "lora" or method not in ADAPTERLESS)
}
"""Name -> the command's arguments."""
ENDLESS = {
    "endless": [
        "ppo",
        "--sharding",
        "full",
        *(f"--{name}={value}" for name, value in (ONLINE | {"steps": 10**6}).items()),
    ]
}


def main(data: str, policy: str, reward_model: str, out: str, *names: str) -> None:
    for name in names or RUNS:
        method = {**RUNS, **ENDLESS}[name][0]
        models = [
            "--policy",
            policy,
            "--preset",
            "sandbox",
            *([] if method == "reward_modeling" else ["--num-eval", "3"]),
        ]
        if method in ("ppo", "quark", "quark_all_quantiles", "expert_iteration", "best_of_16"):
            models += ["--reward-model", reward_model]
        given = [*{**RUNS, **ENDLESS}[name], "--dataset", data, *models, "--out", f"{out}/{name}"]
        assert train.run(train.parse(given)) == 0, name
        if os.environ.get("RANK", "0") == "0":
            print("finished", name, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
