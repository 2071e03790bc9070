"""Curves with bands: the numbers behind the ink, and what is written on the axes."""

import numpy as np
import pytest

from alpacafarm_env.benchmarks.harness.plots import (
    Curve,
    Panel,
    band,
    draw,
    looks,
    place_labels,
    png,
    remove_drawn,
    write_png,
)

STEPS = np.array([0.0, 5.0, 10.0])
VALUES = np.array([[1.0, 4.0, 0.0], [2.0, 4.0, 1.0], [3.0, 4.0, 5.0]])


def panel(values=VALUES, **options):
    return Panel("PPO step", "win rate (%)", [Curve("simulated", STEPS, values)], **options)


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
    figure = draw([panel(level=50.0, marks=(5.0, 5.0, 10.0))], "Title", "n = 9")
    (axis,) = figure.axes
    assert (axis.get_xlabel(), axis.get_ylabel()) == ("PPO step", "win rate (%)")
    assert axis.get_legend_handles_labels()[1] == ["simulated"]
    assert figure.get_suptitle() == "Title"
    assert figure.get_supxlabel() == "n = 9"
    bold = next(line for line in axis.lines if line.get_label() == "simulated")
    assert bold.get_ydata().tolist() == [2, 4, 2]
    assert len(axis.collections) == 1
    assert len(axis.lines) == 3 + 1 + 1 + 2  # seeds, mean, level, marks


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


def test_names_stand_in_a_column_by_height():
    figure = draw([panel()], "t")
    (axis,) = figure.axes
    place_labels(axis, {"low": (0.0, 1.0), "same": (5.0, 4.0), "here": (5.0, 4.0)})
    figure.draw_without_rendering()
    boxes = {text.get_text(): text.get_window_extent() for text in axis.texts}
    assert [text.xy for text in axis.texts] == [(0.0, 1.0), (5.0, 4.0), (5.0, 4.0)]
    assert boxes["low"].y1 < boxes["same"].y0 < boxes["same"].y1 < boxes["here"].y0
