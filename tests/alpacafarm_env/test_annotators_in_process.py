"""The pool over HTTP against the judge server, and the sandbox's own in this process: one verdict, seed for seed."""

import numpy as np
import pytest
from judge_twins import draw_by_request
from pool_worlds import cut, unequal_pairs

from alpacafarm_env import sandbox
from alpacafarm_env.annotators import JudgeServer, make_pool
from alpacafarm_env.judge_server.faults import Faults
from alpacafarm_env.oracles import compare

NUM = 250
SAME_DETAILS = ("annotator", "shown_first", "cost_usd")
JUDGES = {"eval": "sim_eval", "ann": "sim_ann"}


@pytest.fixture(scope="module")
def pairs():
    """Pairs of unequal responses: instructions, a, b."""
    return cut(unequal_pairs(), NUM)


@pytest.fixture(scope="module")
def server():
    """Its own seed is another: it is the pool's that counts."""
    with JudgeServer(seed=99) as server:
        yield server


def live(server, folder, pool, seed):
    folder.mkdir()
    return make_pool(pool, models="sandbox", base_url=server.base_url, ledger=folder / "ledger.sqlite", seed=seed)


def check_same(judge, own, pairs, sizes=(NUM,)):
    """Exactly, and in all they have in common; the pairs are asked about in several calls."""
    ends = np.cumsum(sizes).tolist()
    for start, end in zip([0, *ends], ends, strict=False):
        rows = [column[start:end] for column in pairs]
        got, wanted = compare(judge, *rows), compare(own, *rows)
        np.testing.assert_array_equal(got.scores, wanted.scores)
        assert set(wanted.details) == {*SAME_DETAILS, *({"noised"} & set(got.details))}
        for detail in wanted.details:
            np.testing.assert_array_equal(got.details[detail], wanted.details[detail])


@pytest.mark.parametrize(("pool", "seed"), [("eval", 0), ("ann", 1)])
def test_verdicts_in_one_call(server, tmp_path, pairs, pool, seed):
    asked = server.stats()["requests"]
    check_same(live(server, tmp_path / "all", pool, seed), sandbox.judge(JUDGES[pool], seed), pairs)
    assert server.stats()["requests"] > asked + 30


@pytest.mark.parametrize(("step", "swap", "sizes"), [(1, False, (60, 60, 130)), (-1, True, (1, 7, 92, 150))])
@pytest.mark.parametrize(
    ("pool", "seed"), [("ann", 0), *(pytest.param(p, s, marks=pytest.mark.slow) for p in JUDGES for s in (0, 1))]
)
def test_verdicts_in_other_calls_and_orders(server, tmp_path, pairs, pool, seed, step, swap, sizes):
    """Each with a ledger of its own, so that every pair is asked about anew, among other neighbours."""
    instructions, *ab = (column[::step] for column in pairs)
    arranged = [instructions, *(ab[::-1] if swap else ab)]
    check_same(live(server, tmp_path / "all", pool, seed), sandbox.judge(JUDGES[pool], seed), arranged, sizes)


def test_faults_change_no_verdict(tmp_path, pairs):
    """A request that failed is asked again as it was. (A reply without a verdict is asked for with another seed.)"""
    few = [column[:120] for column in pairs]
    with JudgeServer(faults=Faults({"cut_json": 0.1, "null_content": 0.05, "server_error": 0.05})) as server:
        check_same(live(server, tmp_path / "all", "eval", 0), sandbox.judge("sim_eval", 0), few, (120,))
        assert len(server.stats()["by_fault"]) == 3


def test_the_check_fails_where_verdicts_depend_on_neighbours(tmp_path, pairs, monkeypatch):
    draw_by_request(monkeypatch)
    few = [column[:100] for column in pairs]
    with JudgeServer(seed=99) as server, pytest.raises(AssertionError, match="Mismatched elements"):
        check_same(live(server, tmp_path / "all", "eval", 0), sandbox.judge("sim_eval", 0), few, (100,))


def test_the_greedy_pool_shows_pairs_as_the_sandboxs_and_gives_the_likelier_verdict(server, tmp_path, pairs):
    """Over HTTP it is asked at temperature 0; in this process it draws."""
    got = compare(live(server, tmp_path / "all", "greedy", 0), *pairs)
    own = compare(sandbox.judge("sim_gpt4", 0), *pairs)
    np.testing.assert_array_equal(got.details["shown_first"], own.details["shown_first"])
    assert 0.75 < np.mean(got.scores == own.scores) < 1
