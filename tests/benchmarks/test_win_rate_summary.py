"""The choice on val, the comparison on eval and the words, from rows whose answers are computed by hand."""

import math

import pytest

from alpacafarm_env.benchmarks.harness.report import Provenance, text_table
from alpacafarm_env.benchmarks.win_rate_curve import report
from alpacafarm_env.benchmarks.win_rate_curve.summary import Choice, choose, compare, curves_of

WHERE = Provenance("sandbox", "sandbox", "sandbox", "surrogate", 200, 805, 2, 0.7)
STEPS = (0, 5, 10)


def rows(simulated, **others):
    """Rows of every seed and step; each measure is given as one list a seed, the others are 1."""
    measures = {"win_rate_simulated": simulated, **others}
    filled = dict.fromkeys(("proxy", "gold", "win_rate_human", "kl", "length", "finished"), 1.0)
    return [
        {"seed": seed, "step": step, **filled, **{name: table[seed][column] for name, table in measures.items()}}
        for seed in range(len(simulated))
        for column, step in enumerate(STEPS)
    ]


def told(table):
    """What is said of rows that are those of val and of eval."""
    curves = curves_of(table)
    choice = choose(curves)
    return report.findings(compare(curves, choice), curves, choice, WHERE, {"win_rate_human": 24})


def test_the_step_is_the_best_on_val_the_earliest_of_equals_and_never_sft():
    choice = choose(curves_of(rows([[99.0, 50.0, 40.0], [10.0, 45.0, 45.0], [0.0, 1.0, 2.0]])))
    assert choice == Choice({0: 5, 1: 5, 2: 10}, "win_rate_simulated")


def test_without_a_simulated_judge_the_proxy_chooses_and_the_words_say_so():
    nan = [[math.nan] * 3] * 2
    table = rows(nan, proxy=[[0.0, 1.0, 2.0], [0.0, 3.0, 2.0]], gold=nan, win_rate_human=nan)
    curves = curves_of(table)
    choice = choose(curves)
    assert choice == Choice({0: 10, 1: 5}, "proxy")
    assert list(compare(curves, choice)) == ["proxy", "kl", "length", "finished"]
    text = " ".join(told(table)[1:])
    assert "cannot see over-optimization" in text
    assert "gold" not in text
    assert "nan" not in text


def test_nothing_to_choose_by():
    nan = [[math.nan] * 3]
    with pytest.raises(ValueError, match="neither a win rate nor a proxy"):
        choose(curves_of(rows(nan, proxy=nan)))
    with pytest.raises(ValueError, match="after step 0"):
        choose(curves_of(rows([[1.0, 2.0, 3.0]])[:1]))


def test_comparison_is_paired_by_seed():
    curves = curves_of(rows([[40.0, 50.0, 45.0], [30.0, 44.0, 41.0], [50.0, 52.0, 62.0]]))
    row = compare(curves, Choice({0: 5, 1: 5, 2: 10}, "win_rate_simulated"))["win_rate_simulated"]
    # Differences 10, 14, 12: mean 12, sd 2, standard error 2 / sqrt(3). Last minus chosen: -5, -3, 0.
    assert (row.sft.mean, row.chosen.mean, row.last.mean) == pytest.approx((40, 156 / 3, 148 / 3))
    assert row.difference.mean == pytest.approx(12)
    assert row.difference.standard_error == pytest.approx(2 / math.sqrt(3))
    assert row.difference.ratio == pytest.approx(6 * math.sqrt(3))
    assert row.after.mean == pytest.approx(-8 / 3)
    assert row.num == 3


def test_a_seed_without_a_value_leaves_no_mean_of_the_others():
    curves = curves_of(
        rows([[40.0, 50.0, 45.0], [30.0, 44.0, 41.0]], win_rate_human=[[1.0, 2.0, 3.0], [1.0, None, 3.0]])
    )
    row = compare(curves, choose(curves))["win_rate_human"]
    assert math.isnan(row.chosen.mean)
    assert math.isnan(row.difference.mean)
    assert (row.sft.mean, row.num) == (1, 1)


def test_one_seed_has_no_error_and_says_so():
    text = " ".join(told(rows([[40.0, 50.0, 45.0]])))
    assert "raised the win rate by p_sim^eval from 40.0 to 50.0 %: +10.0 points (one seed, no standard error)" in text


def test_over_optimization_is_claimed_only_beyond_two_standard_errors():
    simulated = [[40.0, 50.0, 45.0]] * 3
    proxy = [[0.0, 1.0, 2.0], [0.0, 1.0, 2.1], [0.0, 1.0, 1.9]]
    falling = [[0.0, 1.0, 0.1], [0.0, 1.0, 0.0], [0.0, 1.0, -0.1]]
    noisy = [[0.0, 1.0, 2.0], [0.0, 1.0, 0.0], [0.0, 1.0, -2.0]]
    for gold, holds in ((falling, True), (noisy, False)):
        curves = curves_of(rows(simulated, proxy=proxy, gold=gold))
        choice = choose(curves)
        found = report.over_optimization(compare(curves, choice), curves, choice)
        assert found.holds is holds
        assert found.numbers["peaks"][0][1:4] == (5, 1.0, pytest.approx(0))
        assert found.numbers["moves"]["proxy"].mean == pytest.approx(1)
    assert (
        report.over_optimization(compare(curves, choice), curves, Choice(dict.fromkeys(range(3), 10), "")).holds is None
    )


def test_rows_may_come_in_any_order_but_must_be_whole():
    table = rows([[40.0, 50.0, 45.0], [30.0, 44.0, 41.0]])
    simulated = curves_of(table[::-1])["win_rate_simulated"].unstack("step")
    assert (list(simulated.index), list(simulated.columns)) == ([0, 1], list(STEPS))
    assert simulated.to_numpy().tolist() == [[40, 50, 45], [30, 44, 41]]
    with pytest.raises(ValueError, match="seed, step"):
        curves_of([row for row in table if (row["seed"], row["step"]) != (1, 5)])
    for faulty in ([row for row in table if row["step"] != 0], []):
        with pytest.raises(ValueError, match="step 0 among them"):
            curves_of(faulty)


def test_the_summary_names_units_and_n():
    curves = curves_of(rows([[40.0, 50.0, 45.0], [30.0, 44.0, 41.0]], length=[[100.0, 230.0, 250.0]] * 2))
    table = report.summary_table(compare(curves, choose(curves)))
    cells = {row[0]: row[1:] for row in table.rows}
    means = ("35.0 [3.2, 89.8]", "47.0 [16.1, 80.4]", "43.0 [21.1, 68.0]")
    assert cells["win rate by p_sim^eval"] == ("%", *means, "+12.0", "2.00", "2")
    assert cells["length"][-3] == "+130"
    lines = text_table(table).splitlines()
    assert len(lines) == 2 + len(table.rows)
    assert lines[0].startswith("measure")
