"""The choice on val, the comparison on eval, the words and the samples, from rows computed by hand."""

import math

import pandas as pd
import pytest

from alpacafarm_env.benchmarks.experiment.engine import Experiment, write_evaluation
from alpacafarm_env.benchmarks.methods.job import Job
from alpacafarm_env.benchmarks.win_rate_curve import page
from alpacafarm_env.benchmarks.win_rate_curve.page import (
    Choice,
    after_peak,
    choose,
    compare,
    curves_of,
)
from alpacafarm_env.errors import DataError

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
    choice = choose(curves_of(rows([[99.0, 50.0, 40.0], [10.0, 45.0, 45.0], [0.0, 1.0, 2.0]])))
    assert choice == Choice({0: 5, 1: 5, 2: 10}, "win_rate_simulated")


def test_comparison_is_paired_by_seed():
    curves = curves_of(rows([[40.0, 50.0, 45.0], [30.0, 44.0, 41.0], [50.0, 52.0, 62.0]]))
    row = compare(curves, Choice({0: 5, 1: 5, 2: 10}, "win_rate_simulated"))["win_rate_simulated"]
    # Differences 10, 14, 12: mean 12, sd 2, standard error 2 / sqrt(3).
    assert tuple(row[name].mean for name in ("sft", "chosen", "last")) == pytest.approx((40, 156 / 3, 148 / 3))
    assert row["difference"].mean == pytest.approx(12)
    assert row["difference"].standard_error == pytest.approx(2 / math.sqrt(3))


def test_a_seed_without_a_value_leaves_no_mean_of_the_others():
    human = [[1.0, 2.0, 3.0], [1.0, None, 3.0]]
    curves = curves_of(rows([[40.0, 50.0, 45.0], [30.0, 44.0, 41.0]], win_rate_human=human))
    row = compare(curves, choose(curves))["win_rate_human"]
    assert math.isnan(row["chosen"].mean)
    assert math.isnan(row["difference"].mean)
    assert (row["sft"].mean, row["chosen"].num) == (1, 0)


def test_a_fall_of_gold_before_the_chosen_step_is_told():
    wins = [[40.0, 50.0, 60.0 + seed] for seed in range(3)]
    falling = [[4.0, 5.0, 4.5 + 0.01 * seed] for seed in range(3)]
    for gold, falls in ((falling, True), ([[*row[:2], 6.0] for row in falling], False)):
        curves = curves_of(rows(wins, gold=gold))
        assert (after_peak(curves, choose(curves))["fall"].low > 0) is falls
    fallen = after_peak(curves_of(rows(wins, gold=falling)), choose(curves))
    assert (fallen["truth"], fallen["step"]) == ("gold", 5)
    assert [fallen[name].mean for name in ("fall", "lost", "won")] == pytest.approx([0.49, 0.49, 11.0])
    one = curves_of(rows(wins[:1], gold=falling[:1]))
    assert after_peak(one, choose(one)) is None


def test_the_tables_name_units_seeds_and_steps():
    curves = curves_of(rows([[40.0, 50.0, 45.0], [30.0, 44.0, 41.0]], length=[[100.0, 230.0, 250.0]] * 2))
    choice = choose(curves)
    cells = {row[0]: tuple(row[1:]) for row in page.summary_table(compare(curves, choice), "").rows}
    means = ("35.0 [3.2, 89.8]", "47.0 [16.1, 80.4]", "43.0 [21.1, 68.0]")
    assert cells["win rate by p_sim^eval"] == ("%", *means, "+12.0", "2.00", "2")
    assert cells["length"][-3] == "+130"
    table = page.seeds_table(curves, curves, choice)
    assert table.header[:3] == ("seed", "chosen step", "val: win rate by p_sim^eval")
    assert [tuple(row[:3]) for row in table.rows] == [("0", "5", "50.0"), ("1", "5", "44.0")]


@pytest.fixture
def plan(tmp_path, tiny_dataset, monkeypatch):
    """A finished run of twelve responses at steps 0 and 4, the last of them cut."""
    monkeypatch.setattr(Job, "data", tiny_dataset)
    splits = ("val", 1), ("eval", 12)
    plan = Experiment(cell="seed 3", agent="ppo", out=tmp_path, seed=3, places=(0, 4), splits=splits)
    for step in plan.places:
        scores = {"proxy": step / 8, "gold": 1.0 - step, "win_rate_simulated": 0.25, "win_rate_human": None}
        values = {name: [value] * 12 for name, value in scores.items()}
        values["instructions"] = list(map(str, tiny_dataset.instructions("eval")))
        values |= {"responses": [f"at {step}" + "!" * step] * 12, "finished": [1.0] * 11 + [0.0]}
        val = {"instructions": [""], "responses": [""], "proxy": [1.0], "win_rate_human": [1.0]}
        write_evaluation(plan, step, [], {"val": val, "eval": values})
    return plan


def test_samples_are_the_same_instructions_with_scores_and_reference(plan, tiny_dataset):
    rows = page.samples(plan, 4)
    assert list(rows) == ["instruction", "SFT (step 0)", "PPO (step 4, seed 3)", "reference"]
    assert rows.instruction.tolist() == [str(tiny_dataset.instructions("eval")[i]) for i in (0, 2, 4, 6, 8, 10)]
    scores = "proxy reward 0.00; gold reward 1.00; win rate by p_sim^eval 0.25"
    assert rows["SFT (step 0)"].iloc[0] == f"at 0\n\n{scores}"
    assert rows["PPO (step 4, seed 3)"].iloc[0].startswith("at 4!!!!\n\nproxy reward 0.50; gold reward -3.00;")
    assert rows.reference.iloc[1] == "Reference for 102."
    told = page.describe(pd.DataFrame(page.read_evaluation(plan, 0)["splits"]["eval"]))
    assert told[11].startswith("at 0 [cut at the length limit]\n")


def test_without_references_samples_have_none(plan, tiny_dataset, monkeypatch):
    def none(split):
        raise DataError("none")

    monkeypatch.setattr(tiny_dataset, "references", none)
    assert list(page.samples(plan, 4)) == ["instruction", "SFT (step 0)", "PPO (step 4, seed 3)"]


def test_responses_without_a_verdict_are_counted_where_there_is_a_judge(plan):
    assert page.unscored([plan], "sandbox") == {"win_rate_human": 24}
    assert page.unscored([plan], "live") == {}
