"""The figures of the ranking: the numbers behind the ink, and labels that cover nothing."""

import math
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import pytest
from matplotlib.text import Annotation
from method_worlds import Facts, study

from alpacafarm_env.benchmarks.harness.plots import png
from alpacafarm_env.benchmarks.method_ranking.figures import draw_scatter, draw_win_rates
from alpacafarm_env.benchmarks.method_ranking.summary import summarize

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


def labels(figure):
    """Label -> its box in pixels, as drawn."""
    return {text.get_text(): text.get_window_extent() for text in figure.texts if text.get_text() in titles()}


def titles():
    return {method.title for method in METHODS}


def overlap(one, two):
    return max(0, min(one.x1, two.x1) - max(one.x0, two.x0)) * max(0, min(one.y1, two.y1) - max(one.y0, two.y0))


def test_labels_cover_neither_each_other_nor_a_point_nor_the_diagonal_and_stay_inside():
    summary = summarize(*study(WINS, methods=METHODS))
    figure = draw_scatter(summary, "n = 100")
    figure.draw_without_rendering()
    found = labels(figure)
    assert set(found) == titles()
    for one, two in combinations(found.values(), 2):
        assert overlap(one, two) == 0
    (axis,) = figure.axes
    frame = axis.get_window_extent()
    points = axis.transData.transform(axis.containers[0].lines[0].get_xydata())
    assert len(points) == len(WINS)
    diagonal = axis.transData.transform(np.linspace([0, 0], [100, 100], 2000))
    for box in found.values():
        assert not any(box.contains(x, y) for x, y in diagonal)
        assert not any(box.contains(x, y) for x, y in points)
        assert overlap(box, frame) == pytest.approx(box.width * box.height)


CROWDED = {name: [(44, 46), (45, 44), (43, 45)] if i % 2 else [(46, 44)] * 3 for i, name in enumerate(WINS)}
"""All methods at two points, one of them with bars."""


@pytest.mark.parametrize("wins", [WINS, CROWDED])
def test_a_label_is_beside_its_point_or_tied_to_it_by_a_line(wins):
    summary = summarize(*study(wins, methods=METHODS))
    figure = draw_scatter(summary, "n = 100")
    (axis,) = figure.axes
    points = dict(zip(wins, axis.transData.transform(axis.containers[0].lines[0].get_xydata()), strict=True))
    ends = [(line.xy, line.xyann) for line in axis.texts if isinstance(line, Annotation)]
    far = 0
    for name, (x, y) in points.items():
        box = labels(figure)[name.upper()]
        if math.hypot(max(box.x0 - x, x - box.x1, 0), max(box.y0 - y, y - box.y1, 0)) > 20 * figure.dpi / 72:
            far += 1
            assert any(start == pytest.approx((x, y)) and box.padded(1).contains(*end) for start, end in ends), (
                f"{name} is far from its point, without a line"
            )
    assert far > 0 or wins is WINS


def test_points_and_bars_are_means_and_standard_errors():
    methods = METHODS[:1]
    summary = summarize(*study({"sft": WINS["sft"]}, methods=methods))
    (axis,) = draw_scatter(summary, "").axes
    bars = axis.containers[0]
    assert bars.lines[0].get_xydata().tolist() == [[44.0, 44.0]]
    (segment,) = bars.lines[2][0].get_segments()
    assert segment[:, 0] == pytest.approx([44 - 1 / math.sqrt(3), 44 + 1 / math.sqrt(3)])


def test_win_rates_best_first_with_intervals_and_published_values():
    summary = summarize(*study(WINS, methods=METHODS))
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


def test_legend_and_title_do_not_overlap():
    figure = draw_win_rates(summarize(*study(WINS, methods=METHODS)), "n = 100")
    figure.draw_without_rendering()
    (axis,) = figure.axes
    assert overlap(figure._suptitle.get_window_extent(), axis.get_legend().get_window_extent()) == 0
    assert overlap(axis.get_window_extent(), axis.get_legend().get_window_extent()) == 0


def test_one_seed_and_missing_methods_are_drawn_without_bars():
    wins = {"sft": [(43, 44)], "ppo": [(60, 61)], "dpo": [None]}
    methods = [Facts(name) for name in wins]
    summary = summarize(*study(wins, methods=methods))
    figure = draw_win_rates(summary, "")
    assert "of 2 methods" in figure.get_suptitle()  # those that are drawn, not all that there are
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["PPO", "SFT"]
    assert png(draw_scatter(summary, "")).startswith(b"\x89PNG")


def test_figures_are_reproducible():
    summary = summarize(*study(WINS, methods=METHODS))
    first, second = (png(draw_scatter(summary, "n")) for _ in range(2))
    assert first == second


def test_one_column_is_drawn_alone_and_in_its_color():
    rows, credits, methods = study(WINS, methods=METHODS)
    rows = [row for row in rows if row["feedback"] == "human"]
    both = draw_win_rates(summarize(*study(WINS, methods=METHODS)), "")
    (axis,) = draw_win_rates(summarize(rows, credits, methods, feedbacks=("human",)), "").axes
    (human,) = axis.containers
    assert [text.get_text() for text in axis.get_legend().get_texts()] == [
        "the paper's human win rate (LLaMA 7B)",
        "human: trained on and judged by human raters",
    ]
    assert human.lines[0].get_color() == both.axes[0].containers[1].lines[0].get_color()
    assert axis.get_yticklabels()[0].get_text() == "GPT4"
    assert human.lines[0].get_xdata()[0] == pytest.approx(99)


def test_long_titles_stay_inside_the_figure():
    @dataclass(frozen=True)
    class Titled(Facts):
        @property
        def title(self):
            return f"{self.name}, a stand-in here"

    methods = [Titled(name) for name in WINS]
    summary = summarize(*study(WINS, methods=methods))
    figure = draw_win_rates(summary, "n = 100")
    figure.draw_without_rendering()
    boxes = [label.get_window_extent() for label in figure.axes[0].get_yticklabels()]
    assert all(box.x0 >= 0 and box.x1 <= figure.axes[0].get_window_extent().x0 for box in boxes)


def test_the_title_of_one_seed_speaks_of_no_bars():
    wins = {name: seeds[:1] for name, seeds in WINS.items()}
    for seeds, words in ((WINS, "over seeds"), (wins, "one seed, no bars")):
        summary = summarize(*study(seeds, methods=METHODS))
        for draw in (draw_win_rates, draw_scatter):
            assert draw(summary, "").get_suptitle().endswith(words)
