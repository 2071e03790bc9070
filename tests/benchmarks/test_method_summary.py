"""What the ranking says, from made-up rows whose answers are computed by hand."""

import math

import numpy as np
import pytest
from method_worlds import Facts, study

from alpacafarm_env.benchmarks.harness.estimates import Estimate
from alpacafarm_env.benchmarks.method_ranking.summary import summarize

WINS = {
    "sft": [(40, 44), (42, 40), (38, 42)],
    "ppo": [(60, 55), (66, 59), (60, 57)],
    "dpo": [(50, 43), (44, 40), (41, 40)],
    "quark": [(41, 50), (42, 50), (43, 50)],
}


def test_an_estimate_is_mean_standard_error_and_t_interval():
    found = Estimate.of(np.array([1.0, np.nan, 2.0, 3.0]))
    assert (found.mean, found.num) == (2, 3)
    assert found.standard_error == pytest.approx(1 / math.sqrt(3))
    # t(0.975, 2) = 4.302653.
    assert found.interval.low == pytest.approx(2 - 4.302653 / math.sqrt(3), abs=1e-6)
    assert found.ratio == pytest.approx(2 * math.sqrt(3))
    assert found.clear


def test_one_seed_or_none_or_equal_ones():
    one, none, equal = (
        Estimate.of(np.array([5.0, np.nan])),
        Estimate.of(np.array([np.nan])),
        Estimate.of(np.full(3, 0.1)),
    )
    assert (one.mean, one.num, one.clear) == (5, 1, False)
    assert math.isnan(one.standard_error)
    assert (none.num, none.clear) == (0, False)
    assert math.isnan(none.mean)
    assert equal.standard_error == 0
    assert equal.clear
    assert math.isnan(equal.ratio)
    assert not Estimate.of(np.zeros(3)).clear


def test_two_standard_errors_are_not_more_than_two():
    # Mean 2, sd 2 sqrt(0.5), standard error 1: exactly at the bound.
    assert not Estimate.of(np.array([1.0, 3.0])).clear
    assert Estimate.of(np.array([1.01, 3.0])).clear


def test_differences_are_paired_by_seed():
    summary = summarize(*study(WINS))
    found = summary.difference("win_rate_simulated", "ppo", "simulated")
    # 60-40, 66-42, 60-38: 20, 24, 22.
    assert (found.mean, found.num) == (pytest.approx(22), 3)
    assert found.standard_error == pytest.approx(2 / math.sqrt(3))
    assert found.ratio == pytest.approx(11 * math.sqrt(3))
    dpo = summary.difference("win_rate_simulated", "dpo", "simulated")  # 10, 2, 3: mean 5, sd 4.36, error 2.52
    assert dpo.mean == pytest.approx(5)
    assert not dpo.clear
    assert summary.mean("win_rate_human", "ppo", "human").mean == pytest.approx(57)


def test_rankings_and_their_agreement():
    summary = summarize(*study(WINS))
    assert list(summary.column("simulated")) == ["ppo", "dpo", "quark", "sft"]
    assert list(summary.column("human")) == ["ppo", "quark", "sft", "dpo"]
    # Ranks 1 2 3 4 against 1 4 2 3: 1 - 6 (0 + 4 + 1 + 1) / 60 = 0.4; pairs: 4 agree, 2 differ.
    assert summary.agreement.spearman.value == pytest.approx(0.4)
    assert summary.agreement.kendall.value == pytest.approx(1 / 3)
    assert summary.agreement.spearman.low <= 0.4 <= summary.agreement.spearman.high


def test_each_column_is_of_its_own_feedback():
    """The human number is that of the run trained on human labels, not of the other one judged by humans."""
    rows, credits, methods = study(WINS)
    better, _, _ = study({"dpo": [(1, 90)] * 3})
    _, verdicts, _ = study({"dpo": [(1, 90)] * 3})
    rows = [row for row in rows if (row["method"], row["feedback"]) != ("dpo", "human")]
    rows += [row for row in better if row["feedback"] == "human"]
    credits |= {key: value for key, value in verdicts.items() if key[1] == "human"}
    summary = summarize(rows, credits, methods)
    assert list(summary.column("simulated")) == ["ppo", "dpo", "quark", "sft"]
    assert list(summary.column("human")) == ["dpo", "ppo", "quark", "sft"]


def test_order_against_the_paper():
    methods = [
        Facts("sft", (40.0, 30.0)),
        Facts("ppo", (50.0, 50.0)),
        Facts("dpo", (39.0, None)),
        Facts("quark", (40.0, 20.0)),
    ]
    rows, credits, _ = study(WINS)
    summary = summarize(rows, credits, methods)
    found = {
        tuple(each.numbers[name] for name in ("feedback", "higher", "lower")): each.numbers
        for each in summary.compared
        if not each.holds
    }
    # Simulated: dpo is above quark and sft here, below in the paper; quark and sft are equal there, so have no order.
    assert set(found) == {
        ("simulated", "sft", "dpo"),
        ("simulated", "quark", "dpo"),
        ("human", "sft", "quark"),
    }
    quark = found["human", "sft", "quark"]
    # 44-50, 40-50, 42-50: -6, -10, -8.
    assert quark["paper"] == 10
    assert quark["here"].mean == pytest.approx(-8)
    assert quark["here"].standard_error == pytest.approx(2 / math.sqrt(3))
    assert quark["here"].clear
    assert not found["simulated", "sft", "dpo"]["here"].clear
    assert summary.with_paper["human"].methods == ("ppo", "quark", "sft")
    # Here ppo > quark > sft, there ppo > sft > quark.
    assert summary.with_paper["human"].spearman.value == pytest.approx(0.5)
    assert summary.in_paper.methods == ("sft", "ppo", "quark")
    # Of the simulated column's six pairs sft and quark have no order.
    assert [each.numbers["feedback"] for each in summary.compared].count("simulated") == 5
    assert len(summary.compared) == 8


def test_nothing_published_is_nothing_compared():
    summary = summarize(*study(WINS))
    assert summary.with_paper == {"simulated": None, "human": None}
    assert summary.in_paper is None
    assert summary.compared == []


def test_length_ratio_is_the_mean_of_the_seeds_ratios():
    lengths = {"sft": [100.0, 50.0, 200.0], "ppo": [200.0, 150.0, 400.0]}
    summary = summarize(*study(WINS, lengths=lengths))
    found = summary.length_ratio("ppo", "simulated")
    assert found.mean == pytest.approx(7 / 3)
    assert found.standard_error == pytest.approx(1 / 3)
    assert found.num == 3


def test_failed_seeds_are_left_out_and_counted():
    wins = {**WINS, "ppo": [(60, 55), None, (64, 59)], "dpo": [None, (44, 40), None], "quark": [None] * 3}
    methods = [Facts(name) for name in wins]
    summary = summarize(*study(wins, methods=methods))
    assert summary.mean("gold", "ppo", "simulated").num == 2
    found = summary.difference("win_rate_simulated", "ppo", "simulated")  # 60-40, 64-38
    assert (found.mean, found.num) == (pytest.approx(23), 2)
    assert summary.difference("win_rate_simulated", "ppo", "simulated", "dpo").num == 0
    assert list(summary.column("simulated")) == ["ppo", "dpo", "sft"]
    assert summary.agreement.methods == ("ppo", "dpo", "sft")


def test_a_seed_may_have_failed_under_one_feedback_only():
    rows, credits, methods = study(WINS)
    gone = ("ppo", "human", 1)
    rows = [row for row in rows if (row["method"], row["feedback"], row["seed"]) != gone]
    summary = summarize(rows, {key: value for key, value in credits.items() if key != gone}, methods)
    assert [summary.mean("gold", "ppo", feedback).num for feedback in ("simulated", "human")] == [3, 2]
    assert next(iter(summary.column("human"))) == "ppo"
    assert len(summary.agreement.methods) == 4


def test_without_judges_there_is_no_ranking():
    rows, credits, methods = study(WINS)
    rows = [{**row, "win_rate_simulated": math.nan, "win_rate_human": None} for row in rows]
    credits = {key: {judge: [None] * 4 for judge in values} for key, values in credits.items()}
    summary = summarize(rows, credits, methods)
    assert list(summary.column("simulated")) == []
    assert summary.agreement is None
    assert not summary.has_baseline


def test_equal_calls_give_equal_intervals_and_the_seed_decides_them():
    rng = np.random.default_rng(0)
    wins = {f"m{i}": [tuple(rng.integers(40, 60, 2)) for _ in range(3)] for i in range(8)}
    first, second, other = (summarize(*study(wins), seed=seed).agreement for seed in (1, 1, 2))
    assert first == second
    assert first.spearman.value == other.spearman.value
    assert first != other


def test_rows_and_credits_must_be_whole_and_of_each_other():
    rows, credits, methods = study(WINS)
    with pytest.raises(ValueError, match="at least one row"):
        summarize([], {}, methods)
    with pytest.raises(
        ValueError, match=r"row \('ppo', 'simulated', 0\): expected one row a cell, a method of \('sft'"
    ):
        summarize(rows, credits, [method for method in methods if method.name != "ppo"])
    with pytest.raises(ValueError, match="expected one row a cell"):
        summarize([*rows, rows[0]], credits, methods)
    with pytest.raises(ValueError, match="a feedback of"):
        summarize([*rows, {**rows[0], "feedback": "gpt4"}], credits, methods)
    with pytest.raises(ValueError, match=r"row \('sft', 'simulated', 0\): expected its credits"):
        summarize(rows, {key: value for key, value in credits.items() if key != ("sft", "simulated", 0)}, methods)
    with pytest.raises(ValueError, match=r"expected credits of mean win_rate_simulated = 40.0, got 60"):
        summarize(rows, {**credits, ("sft", "simulated", 0): credits["ppo", "simulated", 0]}, methods)
    twice = {judge: np.tile(values, 2) for judge, values in credits["sft", "simulated", 0].items()}
    with pytest.raises(ValueError, match=r"same instructions \[B\], got shapes \[\(100,\), \(200,\)\]"):
        summarize(rows, {**credits, ("sft", "simulated", 0): twice}, methods)
    for feedbacks in ((), ("gpt4",)):
        with pytest.raises(ValueError, match=r"feedbacks: expected one or more of \('simulated', 'human'\), got"):
            summarize(rows, credits, methods, feedbacks=feedbacks)
    with pytest.raises(ValueError, match=r"num_seeds: expected rows of seeds 0 to 1, got seeds \(0, 1, 2\)"):
        summarize(rows, credits, methods, num_seeds=2)


def test_a_column_without_trained_methods_is_not_ranked():
    methods = [Facts("sft", needs="nothing"), Facts("gpt4", needs="nothing"), Facts("base", needs="nothing")]
    untrained = {"sft": WINS["sft"], "gpt4": WINS["ppo"], "base": WINS["dpo"]}
    rows, credits, _ = study({**untrained, "ppo": WINS["ppo"]})
    rows = [row for row in rows if (row["method"], row["feedback"]) != ("ppo", "human")]
    for feedbacks in (("simulated",), ("simulated", "human")):
        summary = summarize(rows, credits, [*methods, Facts("ppo")], feedbacks=feedbacks)
        assert (summary.asked, summary.feedbacks) == (feedbacks, ("simulated",))
        assert list(summary.column("human")) == []
        assert summary.agreement is None
    # Where no method learns from feedback both judges rank the same models.
    summary = summarize(*study(untrained, methods=methods))
    assert summary.feedbacks == ("simulated", "human")
    assert len(summary.agreement.methods) == 3
