"""The choice on val, the comparison on eval, the words and the samples, from rows computed by hand."""

import json
import math

import pytest

from alpacafarm_env.benchmarks.harness.report import Provenance
from alpacafarm_env.benchmarks.methods.job import Job
from alpacafarm_env.benchmarks.win_rate_curve import page
from alpacafarm_env.benchmarks.win_rate_curve.plan import RunPlan
from alpacafarm_env.benchmarks.win_rate_curve.summary import (
    Choice,
    after_peak,
    choose,
    compare,
    curves_of,
    over_optimization,
)
from alpacafarm_env.errors import DataError

WHERE = Provenance("sandbox", "sandbox", "sandbox", "surrogate", 200, 805, 2, 0.7)
STEPS = (0, 5, 10)
NONE = [[math.nan] * 3] * 2


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
    return " ".join(page.findings(compare(curves, choice), curves, choice, WHERE, {"win_rate_human": 24}))


def test_the_step_is_the_best_on_val_the_earliest_of_equals_and_never_sft():
    choice = choose(curves_of(rows([[99.0, 50.0, 40.0], [10.0, 45.0, 45.0], [0.0, 1.0, 2.0]])))
    assert choice == Choice({0: 5, 1: 5, 2: 10}, "win_rate_simulated")


def test_without_a_simulated_judge_the_proxy_chooses_and_the_words_say_so():
    table = rows(NONE, proxy=[[0.0, 1.0, 2.0], [0.0, 3.0, 2.0]], gold=NONE, win_rate_human=NONE)
    curves = curves_of(table)
    choice = choose(curves)
    assert choice == Choice({0: 10, 1: 5}, "proxy")
    assert list(compare(curves, choice)) == ["proxy", "kl", "length", "finished"]
    _, text = told(table).split("Step chosen")
    assert "cannot see over-optimization" in text
    assert "gold" not in text
    assert "nan" not in text

    with pytest.raises(ValueError, match="neither a win rate nor a proxy"):
        choose(curves_of(rows(NONE, proxy=NONE)))


def test_comparison_is_paired_by_seed():
    curves = curves_of(rows([[40.0, 50.0, 45.0], [30.0, 44.0, 41.0], [50.0, 52.0, 62.0]]))
    row = compare(curves, Choice({0: 5, 1: 5, 2: 10}, "win_rate_simulated"))["win_rate_simulated"]
    # Differences 10, 14, 12: mean 12, sd 2, standard error 2 / sqrt(3). Last minus chosen: -5, -3, 0.
    assert (row.sft.mean, row.chosen.mean, row.last.mean) == pytest.approx((40, 156 / 3, 148 / 3))
    assert row.difference.mean == pytest.approx(12)
    assert row.difference.standard_error == pytest.approx(2 / math.sqrt(3))
    assert row.after.mean == pytest.approx(-8 / 3)
    assert row.num == 3


def test_a_seed_without_a_value_leaves_no_mean_of_the_others():
    human = [[1.0, 2.0, 3.0], [1.0, None, 3.0]]
    curves = curves_of(rows([[40.0, 50.0, 45.0], [30.0, 44.0, 41.0]], win_rate_human=human))
    row = compare(curves, choose(curves))["win_rate_human"]
    assert math.isnan(row.chosen.mean)
    assert math.isnan(row.difference.mean)
    assert (row.sft.mean, row.num) == (1, 1)


def test_one_seed_has_no_error_and_says_so():
    expected = "raised the win rate by p_sim^eval from 40.0 to 50.0 %: +10.0 points (one seed, no interval)"
    assert expected in told(rows([[40.0, 50.0, 45.0]]))


def test_over_optimization_is_claimed_only_beyond_two_standard_errors():
    proxy = [[0.0, 1.0, 2.0], [0.0, 1.0, 2.1], [0.0, 1.0, 1.9]]
    falling = [[0.0, 1.0, 0.1], [0.0, 1.0, 0.0], [0.0, 1.0, -0.1]]
    noisy = [[0.0, 1.0, 2.0], [0.0, 1.0, 0.0], [0.0, 1.0, -2.0]]
    for gold, holds in ((falling, True), (noisy, False)):
        curves = curves_of(rows([[40.0, 50.0, 45.0]] * 3, proxy=proxy, gold=gold))
        choice = choose(curves)
        found = over_optimization(compare(curves, choice), curves, choice)
        assert found.holds is holds
        assert found.numbers["peaks"][0][1:4] == (5, 1.0, pytest.approx(0))
        assert found.numbers["moves"]["proxy"].mean == pytest.approx(1)
    last = Choice(dict.fromkeys(range(3), 10), "")
    assert over_optimization(compare(curves, choice), curves, last).holds is None


def test_a_change_is_not_called_unclear_beside_many_standard_errors():
    """Of two seeds the interval holds 0 far beyond two standard errors: the sentence says so by the interval alone."""
    unclear = told(rows([[40.0, 60.0, 60.0], [40.0, 65.0, 65.0]]))
    assert "+22.5 points [-9.3, +54.3]" in unclear  # t(.975, 1) = 12.706 standard errors of 2.5: 9 of them
    assert "PPO raised the win rate by p_sim^eval" not in unclear
    assert "PPO raised the win rate by p_sim^eval" in told(rows([[40.0, 60.0, 60.0], [40.0, 60.5, 60.5]]))


def test_a_fall_of_gold_before_the_chosen_step_is_told():
    wins = [[40.0, 50.0, 60.0 + seed] for seed in range(3)]
    falling = [[4.0, 5.0, 4.5 + 0.01 * seed] for seed in range(3)]
    for gold, holds in ((falling, True), ([[*row[:2], 6.0] for row in falling], False)):
        curves = curves_of(rows(wins, gold=gold))
        found = after_peak(curves, choose(curves))
        assert found.holds is holds
    found = after_peak(curves_of(rows(wins, gold=falling)), choose(curves)).numbers
    assert found["step"] == 5
    assert [found[name].mean for name in ("fall", "lost", "won")] == pytest.approx([0.49, 0.49, 11.0])
    one = curves_of(rows(wins[:1], gold=falling[:1]))
    assert after_peak(one, choose(one)) is None


def test_rows_may_come_in_any_order():
    table = rows([[40.0, 50.0, 45.0], [30.0, 44.0, 41.0]])
    simulated = curves_of(table[::-1])["win_rate_simulated"].unstack("step")
    assert (list(simulated.index), list(simulated.columns)) == ([0, 1], list(STEPS))
    assert simulated.to_numpy().tolist() == [[40, 50, 45], [30, 44, 41]]


def test_the_tables_name_units_seeds_and_steps():
    curves = curves_of(rows([[40.0, 50.0, 45.0], [30.0, 44.0, 41.0]], length=[[100.0, 230.0, 250.0]] * 2))
    choice = choose(curves)
    cells = {row[0]: row[1:] for row in page.summary_table(compare(curves, choice)).rows}
    means = ("35.0 [3.2, 89.8]", "47.0 [16.1, 80.4]", "43.0 [21.1, 68.0]")
    assert cells["win rate by p_sim^eval"] == ("%", *means, "+12.0", "2.00", "2")
    assert cells["length"][-3] == "+130"
    table = page.run_table(curves, curves, choice)
    assert table.header[:3] == ("seed", "chosen step", "val: win rate by p_sim^eval")
    assert [tuple(row[:3]) for row in table.rows] == [("0", "5", "50.0"), ("1", "5", "44.0")]


@pytest.fixture
def plan(tmp_path, tiny_dataset, monkeypatch):
    """A finished run of twelve responses at steps 0 and 4, the last of them cut."""
    monkeypatch.setattr(Job, "data", tiny_dataset)
    plan = RunPlan(out=tmp_path, preset="sandbox", steps=4, evaluate_every=4, num_val=1, num_eval=12, seed=3)
    plan.evaluation_file(0).parent.mkdir(parents=True)
    for step in (0, 4):
        scores = {"proxy": step / 8, "gold": 1.0 - step, "win_rate_simulated": 0.25, "win_rate_human": None}
        found = {name: [value] * 12 for name, value in scores.items()}
        found["instructions"] = list(map(str, tiny_dataset.instructions("eval")))
        found |= {"responses": [f"at {step}" + "!" * step] * 12, "finished": [1.0] * 11 + [0.0]}
        unscored = {"val": {"proxy": 0, "win_rate_human": 0}, "eval": {"proxy": 0, "win_rate_human": 12}}
        content = {"rows": [], "eval": found, "unscored": unscored}
        plan.evaluation_file(step).write_text(json.dumps(content), encoding="utf-8")
    return plan


def test_samples_are_the_same_instructions_with_scores_and_reference(plan, tiny_dataset):
    rows = page.samples(plan, 4)
    assert list(rows[0]) == ["instruction", "SFT (step 0)", "PPO (step 4, seed 3)", "reference"]
    assert [row["instruction"] for row in rows] == [
        str(tiny_dataset.instructions("eval")[i]) for i in (0, 2, 4, 6, 8, 10)
    ]
    assert rows[0]["SFT (step 0)"] == "at 0\n\ngold 1.00; proxy 0.00; win by p_sim^eval 0.25"
    assert rows[0]["PPO (step 4, seed 3)"] == "at 4!!!!\n\ngold -3.00; proxy 0.50; win by p_sim^eval 0.25"
    assert rows[1]["reference"] == "Reference for 102."
    cut = page.describe_response(page.read_evaluation(plan, 0)["eval"], 11)
    assert cut.startswith("at 0 [cut at the length limit]\n")


def test_without_references_samples_have_none(plan, tiny_dataset, monkeypatch):
    def none(split):
        raise DataError("none")

    monkeypatch.setattr(tiny_dataset, "references", none)
    assert list(page.samples(plan, 4)[0]) == ["instruction", "SFT (step 0)", "PPO (step 4, seed 3)"]


def test_responses_without_a_verdict_are_counted_where_there_is_a_judge(plan):
    assert page.unscored([plan], "sandbox") == {"win_rate_human": 24}
    assert page.unscored([plan], "live") == {}
