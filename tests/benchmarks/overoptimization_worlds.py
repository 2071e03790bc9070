"""Made-up studies of over-optimization whose truth is known: rows as the command's table has them."""

import math

import numpy as np

from alpacafarm_env.benchmarks.experiment.treated import Sizes
from alpacafarm_env.benchmarks.experiment.treatments import TREATMENTS, Treatment

TINY = Sizes(
    num_labels=64, num_val=40, num_fresh=16, num_prompts=3, num_samples=6, num_eval=6,
    steps=(0, 1, 3), rollouts=8,
)  # fmt: skip
STEPS = (0, 2, 4, 6, 8, 10, 15, 20, 25, 30, 35, 40)
NS = tuple(2**power for power in range(11))
FACTS = (*TREATMENTS, Treatment("mine", "my <b>own</b> wrapper", flip=0.25))
TRUTH = {
    "none": 0.05,
    "flip_175": 0.36,
    "ann": 0.47,
    "flip_35": 0.58,
    "gpt4": 0.02,
    "human": 0.44,
    "labels_10000": 0.4,
    "mean_3": 0.42,
    "wco_3": 0.3,
    "uwo_3": 0.33,
    "mine": 0.4,
    "layers_1": 0.62,
}
"""Treatment -> b of PPO's d(0.8 - b log d); best-of-n's is d(0.9 - 0.35 b d)."""
START = 4.5


def kls(method):
    """The true KLs: PPO's grows with the step, best-of-n's is known."""
    if method == "ppo":
        return 0.5 * np.array(STEPS, dtype=float)
    return np.array([math.log(n) - (n - 1) / n for n in NS])


def true_gain(method, b):
    """R(d) of the forms of Gao et al."""
    d = np.sqrt(kls(method))
    if method == "best_of_n":
        return d * (0.9 - 0.35 * b * d)
    return d * (0.8 - b * np.log(np.where(d > 0, d, 1)))


def study(truth=TRUTH, *, methods=("ppo", "best_of_n"), seeds=5, noise=0.06, stalled=(), salt=0):
    """Rows of all treatments; `noise` is the spread of the seeds' gold. The proxies of `stalled` do not rise."""
    rows = []
    members = {facts.name: facts.members for facts in FACTS}
    for number, (name, b) in enumerate(truth.items()):
        for method in methods:
            gain, kl = true_gain(method, b), kls(method)
            for seed in range(seeds):
                rng = np.random.default_rng([salt, number, seed, method == "ppo"])
                spread = 0.3 if members[name] > 1 else math.nan
                for k, place in enumerate(STEPS if method == "ppo" else NS):
                    jitter = rng.normal(0, noise, 4)
                    d = math.sqrt(kl[k])
                    rows.append(
                        {
                            "treatment": name,
                            "method": method,
                            "seed": seed,
                            "step": place if method == "ppo" else None,
                            "n": place if method == "best_of_n" else None,
                            "kl_exact": kl[k] * (1 + (0.05 * jitter[1] if method == "ppo" else 0)),
                            "proxy": (0.0 if name in stalled else 0.8 * d) + 0.5 * jitter[1],
                            "gold": START + gain[k] + (jitter[0] if k else 0) + 0.02 * seed,
                            "win_rate_simulated": 40 + 12 * gain[k] + 10 * jitter[2],
                            "win_rate_human": 42 + 11 * gain[k] + 10 * jitter[3],
                            "length": 230 + 60 * d + 20 * jitter[2],
                            "disagreement": spread * (1 + 0.3 * d + 0.3 * jitter[1]),
                        }
                    )
    return rows


def reward_models(seeds=5):
    """Rows of accuracy and calibration; ensembles have a row a member."""
    rows = []
    for facts in FACTS[:-1]:
        for seed in range(seeds):
            for member in range(facts.members):
                wobble = 0.01 * ((seed + member) % 3 - 1)
                accuracy = 0.82 - 0.3 * facts.flip + wobble
                rows.append(
                    {
                        "treatment": facts.name,
                        "seed": seed,
                        "num_trained": 9000 + 100 * seed + member,
                        "accuracy_gold": accuracy,
                        "accuracy_judge": 0.5 + (accuracy - 0.5) * (1 - 2 * facts.flip),
                        "calibration_error": 0.02 + 0.2 * facts.flip + wobble,
                    }
                )
    return rows
