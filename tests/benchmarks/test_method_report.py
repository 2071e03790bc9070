"""What the ranking says in numbers, tables and words, from made-up rows whose answers are computed by hand."""

import json
import math

import numpy as np
import pytest
from method_worlds import Facts, study, summarize

from alpacafarm_env.benchmarks.harness.estimates import Estimate, frame_of
from alpacafarm_env.benchmarks.harness.report import Provenance, text_table
from alpacafarm_env.benchmarks.method_ranking.page import page_of
from alpacafarm_env.benchmarks.method_ranking.summary import Summary

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
LENGTHS = {"sft": [100.0] * 3, "ppo": [220.0, 230.0, 240.0]}
WHERE = Provenance("sandbox", "sandbox", "sandbox", "surrogate", 200, 805, 3, 0.7)


def told(wins=WINS, methods=METHODS, **options):
    return " ".join(page_of(summarize(wins, methods, **options), WHERE).findings)


def of(feedback):
    """Picks the rows of a study of one feedback: methods that need none stand in both columns."""
    return lambda row: row["feedback"] == feedback or row["method"] in ("gpt4", "chatgpt", "sft")


def columns(table, *places):
    return [tuple(row[place] for place in places) for row in table.rows]


# ------------------------------------------------------------------------------------------------------------- numbers


def test_an_estimate_is_mean_standard_error_and_t_interval():
    found = Estimate.of(np.array([1.0, np.nan, 2.0, 3.0]))
    assert (found.mean, found.num, found.clear) == (2, 3, False)
    assert found.standard_error == pytest.approx(1 / math.sqrt(3))
    assert found.interval.low == pytest.approx(2 - 4.302653 / math.sqrt(3), abs=1e-6)  # t(0.975, 2)
    assert found.ratio == pytest.approx(2 * math.sqrt(3))
    # Of three seeds t(0.975, 2) = 4.30 standard errors are asked: sqrt(3) x for x - 1, x, x + 1.
    assert [Estimate.of(np.array([x - 1, x, x + 1])).clear for x in (2.4, 2.6, -2.6)] == [False, True, True]
    one, none, equal = (Estimate.of(np.array(values)) for values in ([5.0, np.nan], [np.nan], [0.1] * 3))
    assert (one.mean, one.num, one.clear) == (5, 1, False)
    assert (none.num, none.clear) == (0, False)
    assert (equal.standard_error, equal.clear) == (0, True)
    assert all(map(math.isnan, (one.standard_error, none.mean, equal.ratio)))
    assert not Estimate.of(np.zeros(3)).clear


def test_differences_are_paired_by_seed_and_rankings_compared():
    summary = summarize({name: WINS[name] for name in ("sft", "ppo", "dpo", "quark")})
    found = summary.difference("win_rate_simulated", "ppo", "simulated")
    assert (found.mean, found.num) == (pytest.approx(22), 3)  # 60-40, 66-42, 60-38: 20, 24, 22
    assert found.standard_error == pytest.approx(2 / math.sqrt(3))
    assert not summary.lead("dpo", "simulated").clear  # 10, 2, 3: mean 5, sd 4.36, error 2.52
    assert summary.mean("win_rate_human", "ppo", "human").mean == pytest.approx(57)
    assert list(summary.column("simulated")) == ["ppo", "dpo", "sft", "quark"]
    assert list(summary.column("human")) == ["ppo", "quark", "sft", "dpo"]
    # Ranks 1 2 3 4 against 1 4 3 2: 1 - 6 (0 + 4 + 0 + 4) / 60 = 0.2; pairs: 3 agree, 3 differ.
    assert summary.agreement.spearman.value == pytest.approx(0.2)
    assert summary.agreement.kendall.value == pytest.approx(0)
    assert summary.agreement.spearman.low <= 0.2 <= summary.agreement.spearman.high
    # Nothing published is nothing compared.
    assert (summary.with_paper, summary.in_paper, summary.pairs) == ({"simulated": None, "human": None}, None, [])


def test_each_column_is_of_its_own_feedback():
    """The human number is that of the run trained on human labels, not of the other one judged by humans."""
    wins = {**WINS, "other": [(1, 90)] * 3}
    summary = summarize(wins, only=lambda row: (row["method"], row["feedback"]) not in {("other", "simulated")})
    assert "other" not in summary.column("simulated")
    assert next(iter(summary.column("human"))) == "other"


def test_order_against_the_paper():
    paper = {"sft": (40.0, 30.0), "ppo": (50.0, 50.0), "dpo": (39.0, None), "quark": (40.0, 20.0)}
    wins = {name: WINS[name] for name in paper} | {"quark": [(41, 50), (42, 50), (43, 50)]}
    summary = summarize(wins, [Facts(*each) for each in paper.items()])
    names = ("feedback", "higher", "lower")
    found = {tuple(pair[name] for name in names): pair for pair in summary.pairs if pair["reversed"]}
    # Simulated: dpo is above quark and sft here, below in the paper; quark and sft are equal there, so have no order.
    assert set(found) == {("simulated", "sft", "dpo"), ("simulated", "quark", "dpo"), ("human", "sft", "quark")}
    quark = found["human", "sft", "quark"]
    # 44-50, 40-50, 42-50: -6, -10, -8.
    assert (quark["paper"], quark["here"].mean) == (10, pytest.approx(-8))
    assert quark["here"].clear
    assert not found["simulated", "sft", "dpo"]["here"].clear
    assert summary.with_paper["human"].methods == ("ppo", "quark", "sft")
    # Here ppo > quark > sft, there ppo > sft > quark.
    assert summary.with_paper["human"].spearman.value == pytest.approx(0.5)
    assert summary.in_paper.methods == ("sft", "ppo", "quark")
    # Of the simulated column's six pairs sft and quark have no order.
    assert [pair["feedback"] for pair in summary.pairs] == ["simulated"] * 5 + ["human"] * 3


def test_stored_agreements_stand_for_the_verdicts():
    rows, credits = study(WINS)
    summary = Summary(frame_of(rows), credits, METHODS, num_seeds=3)
    stored = json.loads(json.dumps(summary.agreements))
    again = Summary(frame_of(rows), None, METHODS, num_seeds=3, stored=stored)
    assert summary.agreement is not None
    assert (again.agreement, again.with_paper) == (summary.agreement, summary.with_paper)


def test_length_ratio_is_the_mean_of_the_seeds_ratios():
    found = summarize(WINS, lengths={"sft": [100.0, 50.0, 200.0], "ppo": [200.0, 150.0, 400.0]}).length_ratio(
        "ppo", "simulated"
    )
    assert (found.mean, found.standard_error, found.num) == (pytest.approx(7 / 3), pytest.approx(1 / 3), 3)


def test_failed_seeds_are_left_out_and_counted():
    wins = {"sft": WINS["sft"], "ppo": [(60, 55), None, (64, 59)], "dpo": [None, (44, 40), None], "quark": [None] * 3}
    summary = summarize(wins)
    assert summary.mean("gold", "ppo", "simulated").num == 2
    found = summary.lead("ppo", "simulated")  # 60-40, 64-38
    assert (found.mean, found.num) == (pytest.approx(23), 2)
    assert summary.lead("ppo", "simulated", "dpo").num == 0
    assert list(summary.column("simulated")) == ["ppo", "dpo", "sft"]
    assert summary.agreement.methods == ("ppo", "dpo", "sft")
    # Under one feedback only.
    gone = ("ppo", "human", 1)
    summary = summarize(WINS, only=lambda row: (row["method"], row["feedback"], row["seed"]) != gone)
    assert [summary.mean("gold", "ppo", feedback).num for feedback in ("simulated", "human")] == [3, 2]
    assert len(summary.agreement.methods) == 5


def test_a_column_without_trained_methods_is_not_ranked():
    untrained = [Facts(name, needs="nothing") for name in ("sft", "gpt4", "dpo")]
    wins = {method.name: WINS[method.name] for method in untrained}
    for feedbacks in (("simulated",), ("simulated", "human")):
        summary = summarize(
            {**wins, "ppo": WINS["ppo"]},
            [*untrained, Facts("ppo")],
            only=lambda row: (row["method"], row["feedback"]) != ("ppo", "human"),
            feedbacks=feedbacks,
        )
        assert (summary.asked, summary.feedbacks) == (feedbacks, ("simulated",))
        assert list(summary.column("human")) == []
        assert summary.agreement is None
    # Where no method learns from feedback both judges rank the same models.
    summary = summarize(wins, untrained)
    assert summary.feedbacks == ("simulated", "human")
    assert len(summary.agreement.methods) == 3


# ---------------------------------------------------------------------------------------------------- tables and words


def test_the_tables_stand_beside_the_papers():
    page = page_of(summarize(WINS, METHODS, lengths=LENGTHS), WHERE)
    assert list(page.figures) == ["human_against_simulated", "win_rates"]
    cells = {row[0]: row[1:] for row in page.tables["ranking"].rows}
    assert list(cells) == ["GPT4", "PPO", "DPO", "SFT", "QUARK"]
    # sd(60, 66, 60) / sqrt(3) = 2; sd(55, 59, 57) / sqrt(3) = 1.15.
    assert cells["PPO"] == ("62.0 ± 2.0", "46.8", "57.0 ± 1.2", "55.1", "5.70", "230", "12", "1000", "3")
    assert cells["DPO"][2:4] == ("41.0 ± 1.0", "–")
    facts = "simulation", "n = 805", "3 seeds", "0.7", "p_sim^eval", "human raters", "Davinci003", "GPT4: stand-in"
    assert [fact for fact in facts if fact not in page.tables["ranking"].caption] == []
    assert text_table(page.tables["ranking"]).splitlines()[0].split() == (
        ["method", "simulated,", "%", "paper", "human,", "%", "paper", "gold", "length", "seconds", "tokens", "n"]
    )
    differences = {row[:2]: row[2:] for row in page.tables["differences"].rows}
    assert differences["PPO", "simulated"] == ("+22.0", "1.15", "+19.1", "+1.50", "0.23", "2.30 [2.05, 2.55]", "3")
    assert ("SFT", "human") not in differences
    assert page.tables["reversals"].rows == [("human", "SFT", "QUARK", "+34.3", "-8.0", "1.15", "yes", "3")]
    kinds = columns(page.tables["crossed"], 0, 1)
    assert [kind for kind in kinds if kind[0] in ("GPT4", "PPO")] == (
        [("GPT4", "none"), ("PPO", "simulated"), ("PPO", "human")]
    )
    assert "PPO 2.30 [2.05, 2.55] and 2.30 [2.05, 2.55] (the paper's PPO: 2.3)" in " ".join(page.findings)


def test_two_methods_are_not_drawn_against_each_other():
    page = page_of(summarize({name: WINS[name] for name in ("ppo", "sft")}), WHERE)
    text = "Human is not drawn against simulated: 2 methods have both win rates, fewer than 3."
    assert text in page.findings
    assert not page.tables["agreement"].rows
    assert list(page.figures) == ["win_rates"]
