"""The figures hold what the rows say, and which of them are drawn depends on the rows."""

import numpy as np
import pytest
from overoptimization_worlds import FACTS, SETTING, TRUTH, reward_models, study

from alpacafarm_env.benchmarks.overoptimization import figures as overoptimization_figures
from alpacafarm_env.benchmarks.overoptimization.drawings import draw_drops, draw_fits, draw_reward_models, draw_warnings
from alpacafarm_env.benchmarks.overoptimization.figures import Setting, write_figures
from alpacafarm_env.benchmarks.overoptimization.fits import drop, gain_at
from alpacafarm_env.benchmarks.overoptimization.results import Results
from alpacafarm_env.benchmarks.overoptimization.writing import remove_earlier


@pytest.fixture(scope="module")
def results():
    return Results.of(study(), FACTS)


def test_drops_stand_at_their_flips_with_their_seeds(results):
    figure = draw_drops(results, "title", "n = 201")
    (axis,) = figure.axes
    bars = axis.containers[0]
    fallen = [drop(results.get(name, "ppo")["gold"]) for name in ("none", "flip_175", "ann", "flip_35")]
    assert bars.lines[0].get_ydata() == pytest.approx([each.estimate.mean for each in fallen])
    assert bars.lines[0].get_xdata() == pytest.approx([0, 17.5, 25, 35], abs=0.5)
    dots = [line.get_ydata() for line in axis.lines if line.get_linestyle() == "None" and len(line.get_ydata()) == 5]
    assert any(np.allclose(each, fallen[2].per_seed) for each in dots)
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
    results = Results.of(rows, FACTS)
    points, *fits = draw_fits(results, "title", "").axes[0].lines
    assert points.get_xdata()[-1] == pytest.approx(np.sqrt(20))
    gains = gain_at(results.get("ann", "ppo")["kl_exact"], results.get("ann", "ppo")["gold"], points.get_xdata())
    assert points.get_ydata() == pytest.approx(gains.mean(axis=0))
    assert [line.get_xdata()[-1] for line in fits] == [points.get_xdata()[-1]] * 2


def test_reward_models_are_in_percent(results):
    figure = draw_reward_models(results, reward_models(), "title", "")
    left = figure.axes[0].containers[0].lines[0].get_ydata()
    assert left[0] == pytest.approx(82, abs=1)
    assert left[-1] < left[0]


def test_warnings_are_marked_at_their_step(results):
    figure = draw_warnings(results, [results.get("mean_3", "ppo")], "title", "")
    labels = figure.axes[0].get_legend_handles_labels()[1]
    assert labels[0].startswith("peak: step ")
    assert labels[1] == "warning: step 2"


def test_what_is_drawn_follows_the_rows(tmp_path):
    truth = {name: TRUTH[name] for name in ("none", "ann", "labels_10000", "mine")}
    found = write_figures(tmp_path, Results.of(study(truth, methods=("ppo",)), FACTS), SETTING)
    names = {path.stem for path in tmp_path.iterdir()}
    assert {"flips_against_kl_ppo", "sizes_against_kl_ppo", "own_win_rates_ppo", "fits", "drop_against_flips"} <= names
    assert not any(name.endswith("best_of_n") or "length" in name or "ensembles" in name for name in names)
    assert "reward_models" not in names
    assert sum(len(each) for each in found.values()) == len(names)
    caption = found["against KL"][0].caption
    for fact in ("simulation", "n = 201", "5 seeds", "95 %", "Gold: the sandbox's true reward"):
        assert fact in caption


def test_figures_of_an_earlier_call_do_not_stay(tmp_path):
    """Whatever is drawn of all that can be, is gone when a call after it does not draw it; what is not ours stays."""
    everything = Results.of(study(), FACTS)
    write_figures(tmp_path, everything, SETTING, reward_models=reward_models(), length_slope=0.004)
    drawn = {file.name for file in tmp_path.iterdir()}
    assert {"own_length_best_of_n.png", "disagreement_ppo.png", "reward_models.png", "fits.png"} <= drawn
    assert {name.partition("_")[0] for name in drawn} >= {"flips", "labellers", "sizes", "ensembles", "own", "drop"}
    for name in ("mine.png", "own_1_win_rates_ppo.png"):  # the second is of a fourth treatment of one's own
        (tmp_path / name).write_bytes(b"earlier")
    remove_earlier(tmp_path)
    assert drawn < {file.name for file in tmp_path.iterdir()}  # no report yet: somebody else's
    (tmp_path / "report.html").touch()
    remove_earlier(tmp_path)
    write_figures(tmp_path, Results.of(study({"ann": 0.47}, methods=("ppo",)), FACTS), SETTING)
    left = {file.name for file in tmp_path.iterdir()}
    assert left == {
        "mine.png",
        "report.html",
        "fits.png",
        *(f"flips_{section}_ppo.png" for section in ("against_kl", "along_optimization", "win_rates")),
    }


def test_one_treatment_of_one_seed_is_drawn(tmp_path):
    results = Results.of(study({"ann": 0.47}, methods=("ppo",), seeds=1), FACTS)
    found = write_figures(tmp_path, results, Setting({"ppo": 8}, 1), length_slope=0.004)
    assert "1 seed, no interval" in found["against KL"][0].caption
    assert "noise" not in found


def test_no_two_figures_show_the_same_treatments(tmp_path):
    truth = {name: TRUTH[name] for name in ("none", "ann", "uwo_3")}
    found = write_figures(tmp_path, Results.of(study(truth, methods=("ppo",)), FACTS), SETTING)
    # "Who labels" would be flips again, and "number of labels" a part of both.
    assert [figure.caption.split(":")[0] for figure in found["against KL"]] == ["Share of flipped labels", "Ensembles"]
    alone = write_figures(tmp_path, Results.of(study({"ann": 0.47}), FACTS), SETTING)
    assert len(alone["against KL"]) == 2  # one a method


def test_groups_hold_what_belongs_together(tmp_path, monkeypatch):
    drawn = {}
    monkeypatch.setattr(overoptimization_figures, "draw", lambda panels, title, note: drawn.update({title: panels}))
    monkeypatch.setattr(overoptimization_figures, "write_png", lambda path, figure: b"\x89PNG\r\n\x1a\n")
    write_figures(tmp_path, Results.of(study(methods=("ppo",)), FACTS), SETTING)
    labels = {title.split(":")[0]: [curve.label for curve in panels[0].curves] for title, panels in drawn.items()}
    assert any("own utility" in label for label in labels["Who labels"])
    assert len(labels["Ensembles"]) == 4
    assert len(labels["Who labels"]) == 5


def test_a_method_without_flips_is_no_bar_among_the_drops(results):
    rows = study({name: TRUTH[name] for name in ("none", "ann")}, methods=("ppo",))
    rows += study({"gpt4": 0.02}, methods=("best_of_n",))
    (axis,) = draw_drops(Results.of(rows, FACTS), "title", "").axes
    assert axis.get_legend_handles_labels()[1] == ["PPO"]
