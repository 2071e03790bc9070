"""The ranking in numbers, tables, words and figures, from made-up rows whose answers are computed by hand."""

import json
import math

import numpy as np
import pytest
from method_worlds import Facts, summarize

from alpacafarm_env.benchmarks.harness.plots import png
from alpacafarm_env.benchmarks.harness.report import Provenance
from alpacafarm_env.benchmarks.method_ranking.page import (
    agreements_of,
    draw_scatter,
    draw_win_rates,
    page_of,
    reversal_table,
)

WINS = {
    "gpt4": [(80, 70), (80, 71), (80, 69)],
    "ppo": [(60, 55), (66, 59), (60, 57)],
    "dpo": [(50, 43), (44, 40), (41, 40)],
    "sft": [(40, 44), (42, 40), (38, 42)],
    "quark": [(20, 50), (22, 50), (21, 50)],
}
METHODS = [
    Facts("gpt4", (79.0, 69.8), "nothing", trained=False, paper_note="stand-in"),
    Facts("ppo", (46.8, 55.1)),
    Facts("dpo", (46.8, None), "preferences"),
    Facts("sft", (36.7, 44.3), "nothing", trained=False),
    Facts("quark", (35.6, 10.0)),
]
WHERE = Provenance("sandbox", "sandbox", "sandbox", "surrogate", 200, 805, 3, 0.7)


def page(wins=WINS, methods=METHODS, **options):
    summary, credits = summarize(wins, methods, **options)
    return page_of(summary, agreements_of(summary, credits), WHERE)


def test_differences_are_paired_by_seed_and_rankings_compared():
    summary, credits = summarize({name: WINS[name] for name in ("sft", "ppo", "dpo", "quark")})
    lead = summary.lead("ppo", "simulated")
    assert (lead.mean, lead.num) == (pytest.approx(22), 3)  # 60-40, 66-42, 60-38: 20, 24, 22
    assert lead.standard_error == pytest.approx(2 / math.sqrt(3))
    assert not summary.lead("dpo", "simulated").clear  # 10, 2, 3: mean 5, sd 4.36, error 2.52
    assert list(summary.columns["simulated"]) == ["ppo", "dpo", "sft", "quark"]
    assert list(summary.columns["human"]) == ["ppo", "quark", "sft", "dpo"]
    # Ranks 1 2 3 4 against 1 4 3 2: 1 - 6 (0 + 4 + 0 + 4) / 60 = 0.2; pairs: 3 agree, 3 differ.
    agreements = agreements_of(summary, credits)
    rho, tau = agreements["both"]["spearman"], agreements["both"]["kendall"]
    assert (rho.mean, tau.mean) == (pytest.approx(0.2), pytest.approx(0))
    assert rho.low <= 0.2 <= rho.high
    # Nothing published is nothing compared.
    assert (agreements["simulated"], agreements["human"], summary.pairs("human")) == (None, None, [])


def test_each_column_is_of_its_own_feedback():
    """The human number is that of the run trained on human labels, not of the other one judged by humans."""
    wins = {**WINS, "other": [(1, 90)] * 3}
    summary, _ = summarize(wins, only=lambda row: (row["method"], row["feedback"]) != ("other", "simulated"))
    assert "other" not in summary.columns["simulated"]
    assert next(iter(summary.columns["human"])) == "other"


def test_order_against_the_paper():
    paper = {"sft": (40.0, 30.0), "ppo": (50.0, 50.0), "dpo": (39.0, None), "quark": (40.0, 20.0)}
    wins = {name: WINS[name] for name in paper} | {"quark": [(41, 50), (42, 50), (43, 50)]}
    summary, credits = summarize(wins, [Facts(*each) for each in paper.items()])
    pairs = {feedback: summary.pairs(feedback) for feedback in summary.feedbacks}
    # Of the simulated column's six pairs sft and quark have no order.
    assert [len(each) for each in pairs.values()] == [5, 3]
    # Simulated: dpo is above quark and sft here, below in the paper.
    rows = {row[:3]: row[3:] for row in map(tuple, reversal_table(summary, pairs, "").rows)}
    assert set(rows) == {("simulated", "SFT", "DPO"), ("simulated", "QUARK", "DPO"), ("human", "SFT", "QUARK")}
    # 44-50, 40-50, 42-50: -6, -10, -8.
    assert rows["human", "SFT", "QUARK"] == ("+10.0", "-8.0", "1.15", "yes", "3")
    assert rows["simulated", "SFT", "DPO"][3] == "no"
    # Here ppo > quark > sft, there ppo > sft > quark.
    assert agreements_of(summary, credits)["human"]["spearman"].mean == pytest.approx(0.5)


def test_failed_seeds_are_left_out_and_counted():
    wins = {"sft": WINS["sft"], "ppo": [(60, 55), None, (64, 59)], "dpo": [None, (44, 40), None], "quark": [None] * 3}
    summary, credits = summarize(wins)
    assert (summary.lead("ppo", "simulated").mean, summary.lead("ppo", "simulated").num) == (23, 2)  # 60-40, 64-38
    assert summary.lead("ppo", "simulated", "dpo").num == 0
    assert list(summary.columns["simulated"]) == ["ppo", "dpo", "sft"]
    assert agreements_of(summary, credits)["both"]["spearman"].num == 3


def test_the_tables_stand_beside_the_papers():
    made = page(lengths={"sft": [100.0] * 3, "ppo": [220.0, 230.0, 240.0]})
    assert list(made.figures) == ["human_against_simulated", "win_rates"]
    cells = {row[0]: tuple(row[1:]) for row in made.tables["ranking"].rows}
    assert list(cells) == ["GPT4", "PPO", "DPO", "SFT", "QUARK"]
    # sd(60, 66, 60) / sqrt(3) = 2; sd(55, 59, 57) / sqrt(3) = 1.15.
    assert cells["PPO"] == ("62.0 ± 2.0", "46.8", "57.0 ± 1.2", "55.1", "5.70", "230", "12", "1000", "3")
    assert cells["DPO"][2:4] == ("41.0 ± 1.0", "–")
    assert [list(row) for row in made.tables["reversals"].rows] == (
        [["human", "SFT", "QUARK", "+34.3", "-8.0", "1.15", "yes", "3"]]
    )
    assert "nan" not in " ".join(made.findings)


def test_one_seed_or_two_methods_have_a_page():
    made = page({name: WINS[name][:1] for name in ("ppo", "sft")}, METHODS[1:4:2])
    assert list(made.figures) == ["win_rates"]
    assert "nan" not in " ".join([*made.findings, json.dumps(made.tables["ranking"].rows)])


def test_points_and_bars_are_means_and_standard_errors():
    summary, _ = summarize({name: WINS[name] for name in ("sft", "ppo")})
    (axis,) = draw_scatter(summary, "").axes
    bars = axis.containers[0]
    assert bars.lines[0].get_xydata().tolist() == [[40.0, 42.0], [62.0, 57.0]]
    assert bars.lines[2][0].get_segments()[0][:, 0] == pytest.approx([40 - 2 / math.sqrt(3), 40 + 2 / math.sqrt(3)])
    assert [text.get_text() for text in axis.texts] == ["SFT", "PPO"]
    assert [text.xy for text in axis.texts] == [(40.0, 42.0), (62.0, 57.0)]
    assert png(draw_scatter(summary, "")) == png(draw_scatter(summary, ""))


def test_win_rates_best_first_with_intervals_and_published_values():
    (axis,) = draw_win_rates(summarize(WINS, METHODS)[0], "n = 100").axes
    names = [label.get_text() for label in axis.get_yticklabels()]
    assert names == ["GPT4", "PPO", "DPO", "SFT", "QUARK"]
    simulated, human = axis.containers
    assert simulated.lines[0].get_xdata()[1] == pytest.approx(62)
    assert human.lines[0].get_xdata()[1] == pytest.approx(57)
    published = next(line for line in axis.lines if line.get_label().startswith("the paper's human"))
    assert np.flatnonzero(np.isnan(published.get_xdata())).tolist() == [2]
    (alone,) = draw_win_rates(summarize(WINS, METHODS, feedbacks=("human",))[0], "").axes
    (bars,) = alone.containers
    assert bars.lines[0].get_color() == human.lines[0].get_color()
