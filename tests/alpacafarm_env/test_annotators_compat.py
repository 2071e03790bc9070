"""Compat mode of the whole pool on the published instructions: allocation, order and noise of the released code."""

import numpy as np
import pytest
from test_annotators_draws import POOL, needs_data, records

from alpacafarm_env.annotators import AnnotatorPool, JudgeServer, make_pool
from alpacafarm_env.instructions import Instruction


@pytest.fixture(scope="module")
def server():
    with JudgeServer(anyway=True) as running:
        yield running


@pytest.fixture
def common(server, tmp_path):
    return {"base_url": server.base_url, "ledger": tmp_path / "ledger.sqlite", "compat": "alpacafarm"}


def column(name):
    return [record["output"] for record in records(f"extras/alpacafarm_selfinstruct252_{name}")]


@needs_data
def test_the_two_logged_runs_one_after_the_other(common):
    """The authors asked about SFT's outputs, then about PPO's; two of those were answered already, here as there."""
    rows = records("extras/alpacafarm_selfinstruct252_baseline")
    instructions = [Instruction(row["instruction"], row["input"]) for row in rows]
    pool = AnnotatorPool("alpaca_farm", "sandbox", **common)

    def allocation(name):
        details = pool.judge(instructions, column("baseline"), column(name)).details
        asked = details["annotator"][~details["cached"]].tolist()
        return [asked.count(annotator) for annotator in POOL], int(details["cached"].sum())

    assert allocation("sft") == ([18, 20, 19, 19, 14, 23, 31, 14, 19, 10, 17, 14, 24], 0)
    assert allocation("rlhf") == ([19, 19, 20, 19, 14, 24, 31, 14, 20, 10, 18, 15, 26], 2)


@needs_data
def test_order_and_noise_of_the_805(common):
    instructions = [Instruction(row["instruction"], row["input"]) for row in records("eval_instructions")]
    a, b = ["One."] * 805, ["Two."] * 805
    shown = make_pool("greedy", models="sandbox", **common).judge(instructions, a, b).details["shown_first"]
    assert (shown == "b").sum() == 406
    verdicts = make_pool("greedy", models="sandbox", flip=0.25, **common).judge(instructions, a, b)
    noised = verdicts.details["noised"]
    assert [(~noised).sum(), (verdicts.scores[noised] == 0).sum(), (verdicts.scores[noised] == 1).sum()] == [
        402,
        198,
        205,
    ]
    # What was asked without noise is not asked again with it.
    assert verdicts.details["cached"][~noised].all()
    assert not np.isnan(verdicts.scores).any()
