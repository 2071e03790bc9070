"""Made-up studies for the tests of the method ranking: methods, rows, and credits whose means are exactly the rows'."""

from dataclasses import dataclass, replace

import numpy as np

from alpacafarm_env.benchmarks.harness.estimates import frame_of
from alpacafarm_env.benchmarks.method_ranking.page import Summary
from alpacafarm_env.benchmarks.methods.methods import Method, make_feedme

JUDGES = ("win_rate_simulated", "win_rate_human")
NUM = 100
"""Instructions; a win rate is then a whole number of percent."""
SMALL = Method("small", "Small", lambda job: make_feedme(replace(job, one_batch=True)), "preferences")


@dataclass(frozen=True)
class Facts:
    """What a summary reads of a method."""

    name: str
    paper: tuple = (None, None)
    needs: str = "reward"
    trained: bool = True
    paper_note: str = ""

    @property
    def title(self):
        return self.name.upper()


def study(wins, lengths=None):
    """Rows and credits of {method: [(simulated, human) a seed]}: whole percent, the same under both feedbacks.

    A seed that is None has failed. `lengths`: method -> one number a seed.
    """
    rows, credits = [], {"simulated": {}, "human": {}}
    for name, seeds in wins.items():
        for feedback in ("simulated", "human"):
            for seed, values in enumerate(seeds):
                if values is None:
                    continue
                verdicts = {
                    judge: (np.arange(NUM) * 37 % NUM < value).astype(float)
                    for judge, value in zip(JUDGES, values, strict=True)
                }
                credits[feedback].setdefault(name, []).append(verdicts[f"win_rate_{feedback}"])
                length = (lengths or {}).get(name, [100.0] * len(seeds))[seed]
                means = {judge: 100 * verdicts[judge].mean() for judge in JUDGES}
                costs = {"gold": values[1] / 10, "length": length, "seconds": 12.5, "tokens": 1000}
                rows.append({"method": name, "feedback": feedback, "seed": seed, **means, **costs})
    return rows, credits


def summarize(wins, methods=None, *, lengths=None, only=None, **options):
    """The summary and the credits of a made-up study; `only`: what a row must be."""
    rows, credits = study(wins, lengths)
    rows = [row for row in rows if only is None or only(row)]
    return Summary(frame_of(rows), methods or [Facts(name) for name in wins], **options), credits
