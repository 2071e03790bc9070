"""Evaluation of responses, with oracles whose answers are known."""

import math

import numpy as np
import pytest

from alpacafarm_env.benchmarks.experiment.evaluation import SCORES, evaluate, judges_of, missing_at, subset
from alpacafarm_env.oracles.base import Constant, OracleError


class Fixed:
    def __init__(self, *values):
        self.name, self.values, self.calls = "fixed", values, 0

    def score(self, instructions, responses):
        self.calls += 1
        return np.array(self.values, dtype=np.float64)


RESPONSES = ("a", "äö", "🙂🙂🙂")


def test_values_and_means():
    values = (1.0, 2.0, 6.0), (-1.0, 0.0, 1.0), (1.0, 0.5, 0.0), (1.0, 1.0, 0.25)
    judges = {name: Fixed(*each) for name, each in zip(SCORES, values, strict=True)}
    found = evaluate(("i", "j", "k"), RESPONSES, judges, {"finished": [True, True, False]})
    assert found.means() == {
        "proxy": 3.0,
        "gold": 0.0,
        "win_rate_simulated": 50.0,
        "win_rate_human": 75.0,
        "length": 2.0,
        "finished": pytest.approx(2 / 3),
    }
    assert found.values["length"].tolist() == [1, 2, 3]  # code points, not bytes
    assert found.values["proxy"].tolist() == [1, 2, 6]
    assert [oracle.calls for _, oracle in judges.items()] == [1, 1, 1, 1]
    assert len(found) == 3


def test_a_missing_verdict_is_counted_and_left_out_of_the_mean():
    found = evaluate(("i", "j", "k"), RESPONSES, {"win_rate_human": Fixed(1.0, math.nan, 0.0)})
    assert found.means()["win_rate_human"] == 50.0
    assert found.per_response()["win_rate_human"] == [1.0, None, 0.0]


def test_a_judge_that_does_not_exist_gives_nan_never_a_number():
    means = evaluate(("i",), ("r",), dict.fromkeys(SCORES)).means()
    assert all(math.isnan(means[name]) for name in (*SCORES, "finished"))
    assert means["length"] == 1.0
    nothing = evaluate((), (), {"proxy": Fixed()}, {"finished": []})
    assert all(math.isnan(value) for value in nothing.means().values())


def test_wrong_lengths_and_wrong_answers_are_told():
    with pytest.raises(ValueError, match=r"\(2, 1, 1\)"):
        evaluate(("i", "j"), ("r",), {})
    with pytest.raises(ValueError, match=r"\(1, 1, 2\)"):
        evaluate(("i",), ("r",), {}, {"finished": [True, False]})
    with pytest.raises(OracleError):
        evaluate(("i",), ("r",), {"gold": Fixed(1.0, 2.0)})


def test_outside_the_sandbox_there_is_a_proxy_only(tiny_dataset):
    judges = judges_of(tiny_dataset, proxy=Constant(2.0))
    assert [name for name, oracle in judges.items() if oracle is None] == list(missing_at("recorded"))
    assert missing_at("sandbox") == ()
    assert evaluate(("i",), ("r",), judges).means()["proxy"] == 2.0


def test_subset_of_the_eval_sources_has_each_of_them_in_proportion():
    sources = [252, 188, 129, 80, 156]
    bounds = np.cumsum(sources)
    chosen = np.searchsorted(bounds, subset(805, 200), side="right")
    assert np.abs(np.bincount(chosen) - np.array(sources) * 200 / 805).max() <= 1
    assert (subset(10, 5), subset(3, 9), subset(7, 3)) == ([0, 2, 4, 6, 8], [0, 1, 2], [0, 2, 4])
    with pytest.raises(ValueError, match="got 0"):
        subset(10, 0)
