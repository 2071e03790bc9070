"""The win-rate curve: the command on a user's own data with tiny random models, and its page by hand."""

import json
import math
from dataclasses import replace

import pytest
from written import rows_of

from alpacafarm_env.agents import PPOConfig
from alpacafarm_env.benchmarks.experiment.engine import Experiment, write_evaluation
from alpacafarm_env.benchmarks.harness.study import run_command
from alpacafarm_env.benchmarks.methods.job import Job
from alpacafarm_env.benchmarks.win_rate_curve import page
from alpacafarm_env.benchmarks.win_rate_curve.__main__ import WinRateCurveOptions, make_plans, run
from alpacafarm_env.benchmarks.win_rate_curve.page import (
    Choice,
    after_peak,
    choose,
    compare,
    curves_of,
)
from alpacafarm_env.errors import CheckpointError, DataError

COLUMNS = ["seed", "step", "proxy", "gold", "win_rate_simulated", "win_rate_human", "kl", "length", "finished"]


@pytest.fixture
def options(options):
    """Three steps, evaluated after 0, 2 and 3 steps, two seeds."""
    return replace(options, seeds=2, steps=3, evaluate_every=2, learning_rate=3e-3, max_response_tokens=6)


def test_the_whole_command(options, capsys, monkeypatch):
    assert run(options) == 0
    out = options.out
    table = rows_of(out)
    assert list(table[0]) == list(rows_of(out, "val.csv")[0]) == COLUMNS
    assert [(row["seed"], row["step"]) for row in table] == [(s, t) for s in "01" for t in "023"]
    for row in table:
        assert all(math.isnan(float(row[name])) for name in ("gold", "win_rate_simulated", "win_rate_human"))
        assert all(math.isfinite(float(row[name])) for name in ("proxy", "kl", "length", "finished"))
    assert all(abs(float(row["kl"])) < 1e-4 for row in table if row["step"] == "0")
    assert all(abs(float(row["kl"])) > 1e-3 for row in table if row["step"] == "3")
    manifest = json.loads((out / "manifest.json").read_text(encoding="utf-8"))
    assert manifest["complete"]
    assert set(manifest["contents"]) == {"--dataset", "--policy", "--reward-model"}
    assert manifest["facts"]["level"] == "live"
    assert set(manifest["facts"]["chosen_steps"]) == {"0", "1"}
    page = (out / "report.html").read_text(encoding="utf-8")
    assert page.count("data:image/png;base64,") == len(list(out.glob("*.png"))) == 1  # no win rate, no figure of it
    assert "&lt;b&gt;now&lt;/b&gt;" in page
    assert "<b>now</b>" not in page
    printed = capsys.readouterr()
    assert "KL from SFT" in printed.out
    assert "no gold reward" in printed.out
    assert "seed 1, step 3 of 3: proxy" in printed.err

    # A second call trains nothing and changes no table.
    monkeypatch.setattr(Experiment, "settings", None)
    before = (out / "table.csv").read_bytes()
    assert run(options) == 0
    assert (out / "table.csv").read_bytes() == before


def test_a_folder_has_one_setting_and_the_instructions_there_are(options):
    run(replace(options, seeds=1, steps=1, num_eval=100_000))
    manifest = json.loads((options.out / "manifest.json").read_text(encoding="utf-8"))
    assert (manifest["config"]["num_val"], manifest["config"]["num_eval"]) == (4, 16)
    assert run(replace(options, seeds=1, steps=1, num_eval=805)) == 0  # the same study
    with pytest.raises(CheckpointError, match=r"steps was 1, is 2; ppo\.total_steps was 1, is 2\. Choose"):
        run(replace(options, seeds=1, steps=2, num_eval=805))


def test_a_damaged_evaluation_is_named(options):
    options = replace(options, seeds=1, steps=1)
    assert run(options) == 0
    file = make_plans(options)[0].evaluation_file(1)
    for content in ("", "[1]", "{}", '{"rows": [{"a": 1}], "splits": {}}', None):
        file.unlink() if content is None else file.write_text(content, encoding="utf-8")
        with pytest.raises(CheckpointError, match=r"step-00001\.json.*remove .*seed-0"):
            run(options)


def test_a_plan_follows_its_options(own_models):
    own = WinRateCurveOptions.parse(["--policy", str(own_models[0]), "--steps", "7", "--evaluate-every", "3"])
    (plan, *_) = make_plans(own)
    assert plan.preset == "sandbox"  # by its size
    assert (plan.places, plan.config(PPOConfig).total_steps) == ((0, 3, 6, 7), 7)
    assert WinRateCurveOptions.parse(["--dataset", "x"]).data == WinRateCurveOptions.parse(["--data", "x"]).data == "x"


def test_what_training_leaves_out_is_answered(options):
    with pytest.warns(UserWarning, match=r"16 prompts .* more than 45 tokens"):
        assert run(replace(options, seeds=1, steps=1, max_prompt_tokens=45)) == 0
    evaluation = json.loads((options.out / "runs" / "seed-0" / "evaluations" / "step-00001.json").read_text())
    assert [row["split"] for row in evaluation["rows"] if row["length"] > 0] == ["val", "eval"]


@pytest.mark.parametrize("option", ["policy", "reward_model"])
@pytest.mark.parametrize("kind", ["absent", "empty"])
def test_a_missing_model_is_refused_before_anything_is_written(options, tmp_path, capsys, option, kind):
    wrong = tmp_path / kind
    if kind == "empty":
        wrong.mkdir()
    assert run_command(lambda: run(replace(options, **{option: str(wrong)}))) == 2
    assert str(wrong) in capsys.readouterr().err
    assert not options.out.exists()


def test_own_data_needs_own_models(own_data):
    with pytest.raises(DataError, match="--policy and --reward-model"):
        make_plans(WinRateCurveOptions(data=str(own_data), policy="p"))
    with pytest.raises(ValueError, match="--policy"):
        WinRateCurveOptions(template="alpaca")


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


def test_samples_are_the_same_instructions_with_their_reference(plan, tiny_dataset):
    rows = page.samples(plan, 4)
    assert list(rows) == ["instruction", "SFT (step 0)", "PPO (step 4, seed 3)", "reference"]
    assert rows.instruction.tolist() == [str(tiny_dataset.instructions("eval")[i]) for i in (0, 2, 4, 6, 8, 10)]
    assert rows["SFT (step 0)"].tolist() == ["at 0"] * 6
    assert rows["PPO (step 4, seed 3)"].tolist() == ["at 4!!!!"] * 6
    assert rows.reference.iloc[1] == "Reference for 102."


def test_responses_without_a_verdict_are_counted_where_there_is_a_judge(plan):
    assert page.unscored([plan], "sandbox") == {"win_rate_human": 24}
    assert page.unscored([plan], "live") == {}
