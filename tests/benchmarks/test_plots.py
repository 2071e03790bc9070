"""Curves with bands: the numbers behind the ink, and what is written on the axes."""

import numpy as np
import pytest

from alpacafarm_env.benchmarks.harness.plots import Curve, Panel, band, draw, looks, png, remove_drawn, write_png

STEPS = np.array([[0.0, 5.0, 10.0]] * 3)
VALUES = np.array([[1.0, 4.0, 0.0], [2.0, 4.0, 1.0], [3.0, 4.0, 5.0]])


def panel(values=VALUES, **options):
    x = STEPS[: len(values)]
    return Panel("PPO step", "win rate (%)", [Curve("simulated", x, values)], **options)


def test_band_is_the_t_interval_over_seeds():
    mean, low, high = band(VALUES)
    # t(0.975, 2) = 4.302653; sd(1, 2, 3) = 1, over sqrt(3).
    assert mean.tolist() == [2, 4, 2]
    assert low[0] == pytest.approx(2 - 4.302653 / np.sqrt(3), abs=1e-6)
    assert high[0] == pytest.approx(2 + 4.302653 / np.sqrt(3), abs=1e-6)
    assert low[1] == high[1] == 4


def test_one_seed_has_no_band():
    mean, low, high = band(VALUES[:1])
    assert mean.tolist() == [1, 4, 0]
    assert np.isnan(low).all()
    assert np.isnan(high).all()
    gap = VALUES.copy()
    gap[1, 2] = np.nan
    assert np.isnan(band(gap)[0]).tolist() == [False, False, True]


def test_labels_have_one_color_whatever_is_beside_them():
    noisy, clean, mine = looks(["ann", "none", "mine"])
    assert looks(["mine", "none", "gpt4", "ann"])[1::2] == [clean, noisy]
    assert looks(["sim_ann"]) == looks(["reward_model"]) == looks(["simulated"]) == [noisy]  # whose labels they are
    assert len({noisy, clean, mine}) == 3
    assert len(looks(map(str, range(20)))) == 20  # of one's own, more than there are colors


def test_axes_carry_labels_marks_and_level():
    figure = draw(
        [panel(level=50.0, level_label="no preference", marks=(5.0, 5.0, 10.0), marks_label="chosen")], "Title", "n = 9"
    )
    (axis,) = figure.axes
    assert (axis.get_xlabel(), axis.get_ylabel()) == ("PPO step", "win rate (%)")
    assert axis.get_legend_handles_labels()[1] == ["simulated", "no preference", "chosen"]
    assert figure.get_suptitle() == "Title"
    assert figure.get_supxlabel() == "n = 9"
    bold = next(line for line in axis.lines if line.get_label() == "simulated")
    assert bold.get_ydata().tolist() == [2, 4, 2]
    assert len(axis.collections) == 1


def test_a_measure_without_values_is_missing():
    (axis,) = draw([panel(np.full((2, 3), np.nan))], "t").axes
    assert axis.get_title() == "no value at this level: simulated"
    assert not axis.lines


def test_only_what_was_drawn_there_is_removed(tmp_path):
    assert write_png(tmp_path / "a.png", draw([panel()], "t")) == (tmp_path / "a.png").read_bytes()
    (tmp_path / "kept.png").write_bytes((tmp_path / "a.png").read_bytes())
    (tmp_path / "mine.png").write_bytes(png(draw([panel()], "t")))
    (tmp_path / "odd.png").write_bytes(b"no image")
    remove_drawn(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"kept.png", "mine.png", "odd.png"}


@pytest.mark.parametrize("values", [np.ones((2, 3)), np.array([[1.0, 0.9, 0.0], [1.0, 0.8, 0.1]])])
def test_the_axis_ends_where_shares_end(values):
    (axis,) = draw([Panel("x", "y", [Curve("c", STEPS[:2], values, bounds=(0.0, 1.0))])], "t").axes
    low, high = axis.get_ylim()
    assert 0 <= low < high == 1
