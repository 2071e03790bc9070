"""The choice on val, the comparison on eval and the words, from rows whose answers are computed by hand."""

import math

import pytest

from alpacafarm_env.benchmarks.harness.provenance import Provenance
from alpacafarm_env.benchmarks.harness.report import text_table
from alpacafarm_env.benchmarks.win_rate_curve.report import findings, summary_table
from alpacafarm_env.benchmarks.win_rate_curve.summary import Choice, Curves, choose, compare, peak_and_last

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


def test_the_step_is_the_best_on_val_the_earliest_of_equals_and_never_sft():
    choice = choose(Curves.of(rows([[99.0, 50.0, 40.0], [10.0, 45.0, 45.0], [0.0, 1.0, 2.0]])))
    assert choice == Choice((1, 1, 2), "win_rate_simulated")


def test_without_a_simulated_judge_the_proxy_chooses_and_the_words_say_so():
    nan = [[math.nan] * 3] * 2
    curves = Curves.of(rows(nan, proxy=[[0.0, 1.0, 2.0], [0.0, 3.0, 2.0]], gold=nan, win_rate_human=nan))
    choice = choose(curves)
    assert choice == Choice((2, 1), "proxy")
    assert [row.measure for row in compare(curves, choice)] == ["proxy", "kl", "length", "finished"]
    text = " ".join(findings(compare(curves, choice), curves, choice))
    assert "cannot see over-optimization" in text
    assert "gold" not in text
    assert "nan" not in text


def test_nothing_to_choose_by():
    nan = [[math.nan] * 3]
    with pytest.raises(ValueError, match="neither a win rate nor a proxy"):
        choose(Curves.of(rows(nan, proxy=nan)))
    with pytest.raises(ValueError, match="after step 0"):
        choose(Curves.of(rows([[1.0, 2.0, 3.0]])[:1]))


def test_comparison_is_paired_by_seed():
    curves = Curves.of(rows([[40.0, 50.0, 45.0], [30.0, 44.0, 41.0], [50.0, 52.0, 62.0]]))
    (row,) = [
        row for row in compare(curves, Choice((1, 1, 2), "win_rate_simulated")) if row.measure == "win_rate_simulated"
    ]
    # Differences 10, 14, 12: mean 12, sd 2, standard error 2 / sqrt(3). Last minus chosen: -5, -3, 0.
    assert (row.sft.mean, row.chosen.mean, row.last.mean) == pytest.approx((40, 156 / 3, 148 / 3))
    assert row.difference == pytest.approx(12)
    assert row.standard_error == pytest.approx(2 / math.sqrt(3))
    assert row.ratio == pytest.approx(6 * math.sqrt(3))
    assert row.last_minus_chosen == pytest.approx(-8 / 3)
    assert row.chosen.num == 3


def test_one_seed_has_no_error_and_says_so():
    curves = Curves.of(rows([[40.0, 50.0, 45.0]]))
    choice = choose(curves)
    row = compare(curves, choice)[2]
    assert math.isnan(row.standard_error)
    assert math.isnan(row.ratio)
    text = " ".join(findings(compare(curves, choice), curves, choice))
    assert "raised the win rate by p_sim^eval from 40.0 to 50.0 %: +10.0 points (one seed, no standard error)" in text


def test_over_optimization_is_claimed_only_beyond_two_standard_errors():
    simulated = [[40.0, 50.0, 45.0]] * 3
    proxy = [[0.0, 1.0, 2.0], [0.0, 1.0, 2.1], [0.0, 1.0, 1.9]]
    falling = [[0.0, 1.0, 0.1], [0.0, 1.0, 0.0], [0.0, 1.0, -0.1]]
    noisy = [[0.0, 1.0, 2.0], [0.0, 1.0, 0.0], [0.0, 1.0, -2.0]]
    for gold, claim in ((falling, "the proxy rises while a truth falls"), (noisy, "no over-optimization after")):
        curves = Curves.of(rows(simulated, proxy=proxy, gold=gold))
        choice = choose(curves)
        assert claim in findings(compare(curves, choice), curves, choice)[-1]
    assert peak_and_last(curves, "proxy") == (10, pytest.approx(2.0), pytest.approx(2.0))


def test_rows_may_come_in_any_order_but_must_be_whole():
    table = rows([[40.0, 50.0, 45.0], [30.0, 44.0, 41.0]])
    curves = Curves.of(table[::-1])
    assert curves.seeds == (0, 1)
    assert curves.steps == STEPS
    assert curves.values["win_rate_simulated"].tolist() == [[40, 50, 45], [30, 44, 41]]
    with pytest.raises(ValueError, match=r"without \(seed, step\) \[\(1, 5\)\]"):
        Curves.of([row for row in table if (row["seed"], row["step"]) != (1, 5)])
    with pytest.raises(ValueError, match="step 0 among them"):
        Curves.of([row for row in table if row["step"] != 0])
    with pytest.raises(ValueError, match="step 0"):
        Curves.of([])


def test_empty_cells_of_a_table_read_back_are_missing_values():
    curves = Curves.of(rows([["", None, "45.5"]]))
    assert math.isnan(curves.values["win_rate_simulated"][0, 0])
    assert math.isnan(curves.values["win_rate_simulated"][0, 1])
    assert curves.values["win_rate_simulated"][0, 2] == 45.5


def test_the_summary_names_units_n_and_judges():
    curves = Curves.of(rows([[40.0, 50.0, 45.0], [30.0, 44.0, 41.0]], length=[[100.0, 230.0, 250.0]] * 2))
    where = Provenance("sandbox", "sandbox", "sandbox", "surrogate", 200, 805, 2, 0.7)
    table = summary_table(compare(curves, choose(curves)), where)
    cells = {row[0]: row[1:] for row in table.rows}
    assert cells["win rate by p_sim^eval"] == (
        "%",
        "35.0 [3.2, 89.8]",
        "47.0 [16.1, 80.4]",
        "43.0 [21.1, 68.0]",
        "+12.0",
        "2.00",
        "2",
    )
    assert cells["length"][-3] == "+130"
    for fact in (
        "simulation",
        "n = 805",
        "2 seeds",
        "95 %",
        "0.7",
        "p_sim^eval",
        "human raters",
        "Davinci003",
        "surrogate",
    ):
        assert fact in table.caption
    lines = text_table(table).splitlines()
    assert len(lines) == 2 + len(table.rows)
    assert lines[0].startswith("measure")
