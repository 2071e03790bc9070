"""Tables, sentences and the figure of the annotators' study, from rows made by hand."""

import numpy as np
import pytest

from alpacafarm_env.benchmarks.annotators import report
from alpacafarm_env.benchmarks.annotators.sandbox import Question
from alpacafarm_env.benchmarks.annotators.votes import COST, SPENT, TARGETS, Pairs, Target, make_row
from alpacafarm_env.benchmarks.harness.frames import frame_of
from alpacafarm_env.benchmarks.harness.report import text_table


def row(judge, name, value, level="sandbox", *, num=200, seeds=(), target=None):
    return make_row(judge, name, value, (max(0, value - 0.05), min(1, value + 0.05)), num, level, seeds, target)


def live(name, value, num=200):
    return row("live eval", name, value, "live", num=num, target=TARGETS["sim_eval"].get(name))


LIVE = [live("agreement", 0.66), live("variance", 0.40), live(COST, 3.0), live(SPENT, 0.5, 800)]
MEMBERS = [
    row(f"live {name}", name_of, value, "live", num=num)
    for name, value, num in (("gpt4_1", 1.0, 18), ("mine", 0.5, 4))
    for name_of in ("agreement", "prefers_first", COST)
]


def findings(rows):
    return report.findings(frame_of(rows))


def test_a_live_pools_annotators_are_told_apart_from_the_pool():
    assert report.is_member(frame_of(LIVE + MEMBERS)).tolist() == [False] * len(LIVE) + [True] * len(MEMBERS)
    assert report.is_member(frame_of([row("gpt4_1", "agreement", 0.7), *LIVE])).tolist() == [True] + [False] * len(LIVE)


def test_one_line_for_each_annotator_says_of_how_many_pairs():
    table = report.member_table(frame_of(MEMBERS))
    assert table.header == ("annotator", "agreement", "prefers_first", COST)
    assert list(table.rows) == [
        ("gpt4_1", *["1.000 (18)"] * 3),
        ("mine", *["0.500 (4)"] * 3),
    ]
    assert max(map(len, text_table(table).splitlines())) < 80


def test_the_sandboxs_annotators_cost_nothing_and_are_about_the_same_pairs():
    table = report.member_table(frame_of([row("gpt4_1", name, 0.5) for name in ("agreement", COST)]))
    assert (table.header, list(table.rows)) == (("annotator", "agreement"), [("gpt4_1", "0.500")])


def test_the_live_sentence_counts_and_names_what_is_outside():
    said = findings(LIVE + MEMBERS)
    assert said[0] == (
        "Live: 1 of 2 within tolerance of the paper's figures. Outside: live eval variance 0.400 [0.350 to 0.450] "
        "(paper 0.26, off by 0.140, allowed 0.05)."
    )
    assert said[1].startswith("Live: intervals wider than the tolerance: agreement; ")  # 0.1 wide, +-0.03 and +-0.05
    assert said[2] == "Live: eval cost $0.5000 for this study ($3.00 per 1,000)."
    assert findings([row("live mine", SPENT, 0.0, "live")])[0] == (
        "Live: the paper has no figures for a pool like mine."
    )


@pytest.mark.parametrize(
    ("seeds", "said"),
    [
        ((0.3,), None),
        ((0.28, 0.29), "Each of the 2 seeds alone gives the same answers."),
        ((0.28, 0.35), "In some of the 2 seeds the answer is another for: sim_eval variance."),
    ],
)
def test_seeds_are_spoken_of_where_there_are_several(seeds, said):
    target = TARGETS["sim_eval"]["variance"]
    told = findings([row("sim_eval", "variance", float(np.mean(seeds)), seeds=seeds, target=target)])
    assert told[1:] == ([said] if said else [])


@pytest.mark.parametrize(("num_seeds", "said"), [(1, "on each in 1 seed."), (3, "on each in each of 3 seeds.")])
def test_the_note_is_about_the_levels_it_is_asked_for(num_seeds, said):
    question = Question(Pairs(("x",) * 9, ("a",) * 9, ("b",) * 9), Pairs((), (), ()), num_seeds=num_seeds)
    assert (
        report.note(["sandbox"], question, 5) == f"Level sandbox: a simulation, 9 preference pairs, 4 opinions {said}"
    )
    both = report.note(["live", "sandbox"], question, 5)
    assert both.index("Level sandbox") < both.index("Level live: a judge behind an API, on 5 pairs")
    assert "recorded" not in both


def test_fewer_pairs_with_a_known_order_are_explained():
    rows = [row("sim_ann", "agreement", 0.6, num=9680), row("sim_ann", "prefers_first", 0.5, num=9100)]
    assert findings(rows)[0].startswith("sim_ann prefers_first counts 9100 of 9680 pairs: on the others all")
    assert findings([rows[0], row("sim_ann", "prefers_first", 0.5, num=9680)]) == []


RECORDED = [
    row("gpt4_b1", "variance", 0.15, "recorded", target=Target(0.14)),
    row("gpt4_b1", "agreement", 0.7, "recorded"),
]


def test_the_figure_draws_every_level_that_has_a_published_value():
    sandbox = [
        row("sim_eval", name, 0.5, seeds=(0.5,), target=TARGETS["sim_eval"][name]) for name in ("variance", COST)
    ]
    rows = frame_of([*sandbox, *RECORDED, *LIVE, *MEMBERS])
    names = [(found.figure, found.judge) for found in report.drawn(rows).itertuples()]
    assert names == [
        ("agreement", "live eval"),
        ("variance", "sim_eval"),
        ("variance", "gpt4_b1"),
        ("variance", "live eval"),
    ]
    left, right = report.draw(rows, "note").axes
    assert [label.get_text() for label in left.get_yticklabels()][::-1] == [
        "agreement: live eval",
        "variance: sim_eval",
        "variance: gpt4_b1 (recorded)",
        "variance: live eval",
    ]
    legend = [text.get_text() for text in left.get_legend().get_texts()]
    assert {"sandbox, 95 % interval", "recorded, 95 % interval", "live, 95 % interval"} < set(legend)
    assert "live eval" in [text.get_text() for text in right.texts]
    assert report.drawn_levels(rows) == ["sandbox", "recorded", "live"]
    assert report.drawn_levels(frame_of([*sandbox, RECORDED[1]])) == [
        "sandbox"
    ]  # a recorded figure without a published value


def test_a_figure_of_nothing_published_has_no_left_half():
    assert report.draw(frame_of(RECORDED[1:]), "").axes[0].get_legend() is None
