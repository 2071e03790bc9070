"""A judge by rule, a small folder of the sandbox's assets, and how the tests run the study of annotators on it."""

import numpy as np

from alpacafarm_env.benchmarks.annotators.command import main
from alpacafarm_env.oracles.base import Verdicts
from alpacafarm_env.sandbox import tasks, writers
from alpacafarm_env.sandbox.dataset import write_rows
from alpacafarm_env.seeding import keyed_rng


class Fake:
    """A preference oracle by rule: the response shown first wins, which is a for even seeds, b for odd ones."""

    name = "fake"

    def __init__(self, seed, fails=None):
        self.seed, self.fails = seed, fails

    def compare(self, instructions, a, b):
        return self.judge(instructions, a, b).scores

    def judge(self, instructions, a, b):
        if self.fails is not None:
            raise self.fails
        size, odd = len(a), self.seed % 2
        scores = np.full(size, float(odd))
        scores[0] = np.nan
        details = {
            "annotator": np.array(["ann", "bob"], dtype=object)[np.arange(size) % 2],
            "shown_first": np.full(size, "ab"[odd]),
            "cost_usd": np.full(size, 0.002),
            "cached": np.arange(size) == 1,
        }
        return Verdicts(scores, details)


def make_assets(folder):
    """A folder with 150 instructions and two responses of the crowd to each, the last pair equal, and 30 of eval."""
    rng = keyed_rng(0, "test calibration")
    drawn = [tasks.draw(rng, tasks.TEMPLATES[k % len(tasks.TEMPLATES)]) for k in range(150)]
    texts = [f"{instruction}\n\n{given}" if given else instruction for instruction, given in drawn]
    outputs = [[writers.write(writers.CROWD, text, rng) for _ in range(2)] for text in texts]
    outputs[-1][1] = outputs[-1][0]
    rows = [{"instruction": x, "input": y} for x, y in drawn]
    write_rows(folder / "data" / "preference.jsonl.gz", rows)
    write_rows(folder / "data" / "eval.jsonl.gz", rows[:30])
    write_rows(folder / "data" / "davinci003_stand_in.jsonl.gz", [{"output": a} for a, _ in outputs[:30]])
    write_rows(folder / "data" / "pairs.jsonl.gz", [{"output_1": a, "output_2": b} for a, b in outputs])
    return folder


def shut_off(monkeypatch, tmp_path):
    """No recorded judgements, and a ledger of the test's own."""
    monkeypatch.delenv("ALPACAFARM_DATA", raising=False)
    monkeypatch.setenv("ALPACAFARM_LEDGER", str(tmp_path / "own.sqlite"))


def run(assets, out, *more):
    return main(["--sandbox", str(assets), "--out", str(out), "--seeds", "2", *more])


def by_key(rows):
    return {(row["judge"], row["figure"]): row for row in rows}
