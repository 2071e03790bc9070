"""The figures of the ranking: the numbers behind the ink, and labels that cover nothing."""

import math
from itertools import combinations

import numpy as np
import pytest
from matplotlib.text import Annotation
from method_worlds import Facts, summarize

from alpacafarm_env.benchmarks.harness.plots import png
from alpacafarm_env.benchmarks.method_ranking.page import draw_scatter, draw_win_rates

WINS = {
    "sft": [(43, 44), (44, 45), (45, 43)],
    "binary_reward_conditioning": [(42, 44), (41, 43), (43, 45)],
    "binary_feedme": [(43, 45), (43, 43), (42, 44)],
    "quark": [(45, 44), (43, 46), (44, 45)],
    "sft_52k": [(45, 45), (46, 44), (44, 44)],
    "expert_iteration": [(57, 57), (57, 56), (58, 57)],
    "best_of_16": [(66, 62), (67, 63), (66, 62)],
    "best_of_n": [(68, 64), (67, 63), (68, 63)],
    "ppo": [(69, 64), (67, 62), (68, 63)],
    "base": [(1, 1), (0, 1), (1, 2)],
    "gpt4": [(99, 100), (100, 99), (99, 98)],
}
METHODS = [Facts(name, (50.0, None) if name == "ppo" else (None, None)) for name in WINS]
CROWDED = {name: [(44, 46), (45, 44), (43, 45)] if i % 2 else [(46, 44)] * 3 for i, name in enumerate(WINS)}
"""All methods at two points, one of them with bars."""


def overlap(one, two):
    return max(0, min(one.x1, two.x1) - max(one.x0, two.x0)) * max(0, min(one.y1, two.y1) - max(one.y0, two.y0))


@pytest.mark.parametrize("wins", [WINS, CROWDED])
def test_labels_are_beside_their_points_or_tied_to_them_and_cover_nothing(wins):
    figure = draw_scatter(summarize(wins, METHODS), "n = 100")
    assert figure.get_suptitle().endswith("over seeds")
    figure.draw_without_rendering()
    titles = [method.title for method in METHODS]
    labels = {text.get_text(): text.get_window_extent() for text in figure.texts if text.get_text() in titles}
    assert set(labels) == set(titles)
    (axis,) = figure.axes
    points = axis.transData.transform(axis.containers[0].lines[0].get_xydata())
    ends = [(line.xy, line.xyann) for line in axis.texts if isinstance(line, Annotation)]
    far = 0
    for title, (x, y) in zip(titles, points, strict=True):
        box = labels[title]
        if math.hypot(max(box.x0 - x, x - box.x1, 0), max(box.y0 - y, y - box.y1, 0)) > 20 * figure.dpi / 72:
            far += 1
            tied = [start == pytest.approx((x, y)) and box.padded(1).contains(*end) for start, end in ends]
            assert any(tied), f"{title} is far from its point, without a line"
    assert far > 0 or wins is WINS
    if wins is CROWDED:
        return
    for one, two in combinations(labels.values(), 2):
        assert overlap(one, two) == 0
    frame = axis.get_window_extent()
    diagonal = axis.transData.transform(np.linspace([0, 0], [100, 100], 2000))
    for box in labels.values():
        assert not any(box.contains(x, y) for x, y in (*diagonal, *points))
        assert overlap(box, frame) == pytest.approx(box.width * box.height)


def test_points_and_bars_are_means_and_standard_errors():
    (axis,) = draw_scatter(summarize({"sft": WINS["sft"]}), "").axes
    bars = axis.containers[0]
    assert bars.lines[0].get_xydata().tolist() == [[44.0, 44.0]]
    (segment,) = bars.lines[2][0].get_segments()
    assert segment[:, 0] == pytest.approx([44 - 1 / math.sqrt(3), 44 + 1 / math.sqrt(3)])


def test_win_rates_best_first_with_intervals_and_published_values():
    summary = summarize(WINS, METHODS)
    figure = draw_win_rates(summary, "n = 100")
    (axis,) = figure.axes
    names = [label.get_text() for label in axis.get_yticklabels()]
    assert names == [name.upper() for name in summary.column("simulated")]
    simulated, human = axis.containers
    place = names.index("PPO")
    assert simulated.lines[0].get_xdata()[place] == pytest.approx(68)
    assert human.lines[0].get_xdata()[place] == pytest.approx(63)
    # 68 -+ 2.484, taken on the logit scale: longer towards 50 %.
    assert simulated.lines[2][0].get_segments()[place][:, 0] == pytest.approx([65.4667, 70.4314], abs=1e-3)
    published = next(line for line in axis.lines if line.get_label().startswith("the paper's simulated"))
    assert np.flatnonzero(np.isfinite(published.get_xdata())).tolist() == [place]
    assert figure.get_supxlabel() == "n = 100"
    assert figure.get_suptitle().endswith("over seeds")
    figure.draw_without_rendering()
    legend = axis.get_legend().get_window_extent()
    assert overlap(figure._suptitle.get_window_extent(), legend) == overlap(axis.get_window_extent(), legend) == 0

    (alone,) = draw_win_rates(summarize(WINS, METHODS, feedbacks=("human",)), "").axes
    (bars,) = alone.containers
    assert [text.get_text() for text in alone.get_legend().get_texts()] == [
        "the paper's human win rate (LLaMA 7B)",
        "human: trained on and judged by human raters",
    ]
    assert bars.lines[0].get_color() == human.lines[0].get_color()
    assert alone.get_yticklabels()[0].get_text() == "GPT4"
    assert bars.lines[0].get_xdata()[0] == pytest.approx(99)


def test_one_seed_and_missing_methods_are_drawn_without_bars():
    summary = summarize({"sft": [(43, 44)], "ppo": [(60, 61)], "dpo": [None]})
    figure, scatter = draw_win_rates(summary, ""), draw_scatter(summary, "")
    assert "of 2 methods" in figure.get_suptitle()  # those that are drawn, not all that there are
    assert all(each.get_suptitle().endswith("one seed, no bars") for each in (figure, scatter))
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["PPO", "SFT"]
    assert png(scatter) == png(draw_scatter(summary, ""))
