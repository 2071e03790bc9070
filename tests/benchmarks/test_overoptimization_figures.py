"""The figures hold what the rows say, and which of them are drawn depends on the rows."""

import numpy as np
import pytest
from overoptimization_worlds import FACTS, SETTING, TRUTH, reward_models, study

from alpacafarm_env.benchmarks.overoptimization import analyse
from alpacafarm_env.benchmarks.overoptimization.analyse import Results
from alpacafarm_env.benchmarks.overoptimization.curves import gain_at
from alpacafarm_env.benchmarks.overoptimization.figures import (
    draw_all,
    draw_drops,
    draw_fits,
    draw_reward_models,
    draw_warnings,
    groups,
)
from alpacafarm_env.benchmarks.overoptimization.report import Setting, remove_earlier


@pytest.fixture(scope="module")
def results():
    return Results(study(), FACTS)


def drawn(results, models=(), slope=None, where=SETTING):
    """File name -> section, note."""
    found = draw_all(results, where.label, analyse.reward_models(models), slope)
    return {name: (section, note) for section, name, _, note, _ in found}


def test_drops_stand_at_their_flips_with_their_seeds(results):
    figure = draw_drops(results, "title", "n = 201")
    (axis,) = figure.axes
    bars = axis.containers[0]
    stories = [results.stories[name, "ppo"] for name in ("none", "flip_175", "ann", "flip_35")]
    assert bars.lines[0].get_ydata() == pytest.approx([each.drop.mean for each in stories])
    assert bars.lines[0].get_xdata() == pytest.approx([0, 17.5, 25, 35], abs=0.5)
    dots = [line.get_ydata() for line in axis.lines if line.get_linestyle() == "None" and len(line.get_ydata()) == 5]
    assert any(np.allclose(each, stories[2].drops) for each in dots)
    assert "n = 201" in figure._supxlabel.get_text()


def test_fits_have_both_methods_on_the_same_axes(results):
    figure = draw_fits(results, "title", "")
    assert [axis.get_title() for axis in figure.axes][1] == "25 % flips (p_sim^ann)"
    labels = figure.axes[1].get_legend_handles_labels()[1]
    assert labels[0] == "PPO"
    forms = ["d(a - b d)", "d(a - b log d)"]
    assert [label.partition(", R² ")[0] for label in labels] == ["PPO", *forms, "best-of-n", *forms]
    styles = [line.get_linestyle() for line in figure.axes[1].lines]
    assert styles == ["None", ":", "--", "None", "--", ":"]
    assert len({axis.get_ylim() for axis in figure.axes}) == 1


def test_a_fit_is_drawn_through_the_points_that_it_was_made_from():
    rows = study({"ann": 0.47}, methods=("ppo",), noise=0.0)
    for row in rows:  # seeds that are unequally far: seed 0 sets how far all of them get
        row["kl_exact"] *= 1 + row["seed"]
    results = Results(rows, FACTS)
    points, *fits = draw_fits(results, "title", "").axes[0].lines
    assert points.get_xdata()[-1] == pytest.approx(np.sqrt(20))
    gains = gain_at(results.curves["ann", "ppo"], points.get_xdata())
    assert points.get_ydata() == pytest.approx(gains.mean(axis=0))
    assert [line.get_xdata()[-1] for line in fits] == [points.get_xdata()[-1]] * 2


def test_reward_models_are_in_percent(results):
    figure = draw_reward_models(results, analyse.reward_models(reward_models()), "title", "")
    left = figure.axes[0].containers[0].lines[0].get_ydata()
    assert left[0] == pytest.approx(82, abs=1)
    assert left[-1] < left[0]


def test_warnings_are_marked_at_their_step(results):
    figure = draw_warnings(results, [("mean_3", "ppo")], "title", "")
    labels = figure.axes[0].get_legend_handles_labels()[1]
    assert labels[0].startswith("peak: step ")
    assert labels[1] == "warning: step 2"


def test_what_is_drawn_follows_the_rows():
    truth = {name: TRUTH[name] for name in ("none", "ann", "labels_10000", "mine")}
    found = drawn(Results(study(truth, methods=("ppo",)), FACTS))
    assert {"flips_against_kl_ppo", "sizes_against_kl_ppo", "own_win_rates_ppo", "fits", "drop_against_flips"} <= {
        *found
    }
    assert not any(name.endswith("best_of_n") or "length" in name or "ensembles" in name for name in found)
    assert "reward_models" not in found
    section, note = found["flips_against_kl_ppo"]
    assert section == "against KL"
    for fact in ("n = 201", "5 seeds"):
        assert fact in note


def test_figures_of_an_earlier_call_do_not_stay(tmp_path, results):
    """Whatever is drawn of all that can be, is removed by a call after it; what is not ours stays."""
    found = drawn(results, reward_models(), 0.004)
    assert {"own_length_best_of_n", "disagreement_ppo", "reward_models", "fits", "drop_against_flips"} <= {*found}
    files = {f"{name}.png" for name in (*found, "own_1_win_rates_ppo", "mine")}  # of a fourth treatment of one's own
    for name in files:
        (tmp_path / name).write_bytes(b"earlier")
    remove_earlier(tmp_path)
    assert files == {file.name for file in tmp_path.iterdir()}  # no report yet: somebody else's
    (tmp_path / "report.html").touch()
    remove_earlier(tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {"mine.png", "report.html"}


def test_one_treatment_of_one_seed_is_drawn():
    results = Results(study({"ann": 0.47}, methods=("ppo",), seeds=1), FACTS)
    found = drawn(results, slope=0.004, where=Setting({"ppo": 8}, 1))
    assert {section for section, _ in found.values()} == {
        "against KL",
        "along optimization",
        "win rates",
        "length",
        "fits",
    }


def test_no_two_figures_show_the_same_treatments(results):
    truth = {name: TRUTH[name] for name in ("none", "ann", "uwo_3")}
    # "Who labels" would be flips again, and "number of labels" a part of both.
    assert list(groups(Results(study(truth, methods=("ppo",)), FACTS), "ppo")) == ["flips", "ensembles"]
    assert list(groups(Results(study({"ann": 0.47}), FACTS), "ppo")) == ["flips"]
    sizes = {name: len(names) for name, (_, names) in groups(results, "ppo").items()}
    assert sizes == {"flips": 4, "labellers": 5, "sizes": 3, "ensembles": 4, "own": 2}


def test_a_method_without_flips_is_no_bar_among_the_drops():
    rows = study({name: TRUTH[name] for name in ("none", "ann")}, methods=("ppo",))
    rows += study({"gpt4": 0.02}, methods=("best_of_n",))
    (axis,) = draw_drops(Results(rows, FACTS), "title", "").axes
    assert axis.get_legend_handles_labels()[1] == ["PPO"]
