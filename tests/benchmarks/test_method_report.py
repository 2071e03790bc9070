"""The ranking in tables and words: every sentence says what the made-up numbers say."""

from html import unescape

import pytest
from method_worlds import Facts, study

from alpacafarm_env.benchmarks.harness.provenance import Provenance
from alpacafarm_env.benchmarks.harness.report import Section, text_table, write_report
from alpacafarm_env.benchmarks.method_ranking.report import findings, summary_table, write
from alpacafarm_env.benchmarks.method_ranking.summary import summarize

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
    return " ".join(findings(summarize(*study(wins, methods=methods, **options)), methods))


def test_the_table_stands_beside_the_papers():
    table = summary_table(summarize(*study(WINS, methods=METHODS, lengths=LENGTHS)), METHODS, WHERE)
    cells = {row[0]: row[1:] for row in table.rows}
    assert list(cells) == ["GPT4", "PPO", "DPO", "SFT", "QUARK"]
    # sd(60, 66, 60) / sqrt(3) = 2; sd(55, 59, 57) / sqrt(3) = 1.15.
    assert cells["PPO"] == ("62.0 ± 2.0", "46.8", "57.0 ± 1.2", "55.1", "5.70", "230", "12", "1000", "3")
    assert cells["DPO"][2:4] == ("41.0 ± 1.0", "–")
    for fact in (
        "simulation",
        "n = 805",
        "3 seeds",
        "0.7",
        "p_sim^eval",
        "human raters",
        "Davinci003",
        "GPT4: stand-in",
    ):
        assert fact in table.caption
    assert text_table(table).splitlines()[0].split() == (
        ["method", "simulated,", "%", "paper", "human,", "%", "paper", "gold", "length", "seconds", "tokens", "n"]
    )


def test_methods_are_sorted_by_two_standard_errors_from_sft():
    sentences = findings(summarize(*study(WINS, methods=METHODS)), METHODS)
    simulated, human = (line for line in sentences if line.startswith("Win rate in points over SFT"))
    # PPO +22 ± 1.2; DPO +5 ± 2.5 (10, 2, 3); QUARK -19 ± 0.6 (-20, -20, -17: ± 1.0).
    assert (
        "clearly above (more than 2 standard errors): PPO (+22.0 ± 1.2); clearly below: QUARK (-19.0 ± 1.0)"
        in simulated
    )
    assert simulated.endswith("not clearly apart: DPO (+5.0 ± 2.5).")
    # 11, 19, 15 and 6, 10, 8 over SFT; DPO -1, 0, -2.
    assert "above (more than 2 standard errors): PPO (+15.0 ± 2.3), QUARK (+8.0 ± 1.2); clearly below: none" in human
    assert "GPT4" not in simulated + human


def test_the_first_is_the_best_of_the_trained_ones():
    text = told()
    assert "First among the trained methods in the simulated column: PPO (62.0 ± 2.0 %), clearly before DPO" in text
    assert "First among the trained methods in the human column: PPO (57.0 ± 1.2 %), clearly before QUARK (50.0" in text
    close = {**WINS, "dpo": [(61, 43), (67, 40), (56, 40)]}
    assert "simulated column: PPO (62.0 ± 2.0 %), not clearly before DPO (61.3 ± 3.2 %)" in told(close)


def test_correlations_stand_with_their_intervals_and_the_papers():
    text = told()
    # Simulated gpt4 ppo dpo sft quark; human gpt4 ppo quark sft dpo: 1 - 6 * (4 + 4) / 120 = 0.6.
    assert "Simulated and human ranking: Spearman 0.60 [" in text
    assert "over 5 methods (the paper: Spearman 0.98)." in text
    assert "The human ranking here and the published one: Spearman 0.80 [" in text


def test_where_the_order_differs_from_the_papers():
    text = told()
    # PPO and DPO are equal there, 46.8: of the ten pairs nine have an order.
    assert "Order in the simulated column: 0 of 9 pairs of methods differ from the paper, 0 of them clearly" in text
    assert (
        "Order in the human column: 1 of 6 pairs of methods differ from the paper, 1 of them clearly (more than 2 "
        "standard errors): QUARK above SFT by 8.0 ± 1.2 points (there 34.3 below)." in text
    )


def test_lengths_stand_beside_the_papers():
    assert "PPO 2.30 [2.05, 2.55] and 2.30 [2.05, 2.55] (the paper's PPO: 2.3)" in told(lengths=LENGTHS)


def test_failed_cells_are_named():
    text = told({**WINS, "ppo": [(60, 55), None, (64, 59)], "dpo": [None] * 3})
    assert (
        "seeds found: PPO (simulated) 2 of 3, DPO (simulated) 0 of 3, PPO (human) 2 of 3, DPO (human) 0 of 3." in text
    )
    assert "Not all cells" not in told()
    assert "nan" not in text


def test_a_pair_without_a_common_seed_is_not_counted():
    text = told({**WINS, "quark": [(20, 50), None, None], "dpo": [None, (44, 40), (41, 40)]})
    # Nine pairs have an order there; DPO and QUARK share no seed here.
    assert "Order in the simulated column: 0 of 8 pairs" in text


def only(feedback, rows, methods=METHODS):
    """The rows of a study of one feedback: methods that need none stand in both columns."""
    needs = {method.name: method.needs for method in methods}
    return [row for row in rows if row["feedback"] == feedback or needs[row["method"]] == "nothing"]


@pytest.mark.parametrize(("here", "other"), [("simulated", "human"), ("human", "simulated")])
def test_of_a_feedback_that_was_not_asked_for_nothing_is_told(tmp_path, here, other):
    chatgpt = Facts("chatgpt", (61.4, 52.9), "nothing", trained=False)
    methods, wins = [*METHODS, chatgpt], {**WINS, "chatgpt": [(70, 60)] * 3}
    rows, credits, _ = study(wins)
    (tmp_path / "human_against_simulated.png").write_bytes(b"of an earlier call")
    sections, table, sentences = write(
        tmp_path, only(here, rows, methods), credits, methods, WHERE, feedbacks=(here,), num_seeds=3
    )
    text = " ".join(sentences)
    assert "Not all cells" not in text
    assert "failed" not in text
    assert "Simulated and human ranking agree" not in text
    for told_of in ("Order in the", "First among the trained methods in the"):
        assert f"{told_of} {here} column" in text
        assert f"{told_of} {other} column" not in text
    assert f"There are {here} labels only: no {other} ranking to compare with" in text
    assert table.header == ("method", f"{here}, %", "paper", "gold", "length", "seconds", "tokens", "n")
    assert other not in table.caption.split("Paper:")[0].replace("human raters", "")
    assert "nan" not in text + text_table(table)
    by_heading = {section.heading: section for section in sections}
    assert "Agreement of the rankings" not in by_heading
    (row,) = by_heading["Agreement with the paper's ranking"].table.rows
    assert row[0] == f"{here} here and in the paper"
    assert {row[1] for row in by_heading["Difference to SFT"].table.rows} == {here}
    assert {row[1] for row in by_heading["Each feedback and judge"].table.rows} == {here, "none"}
    assert [path.name for path in tmp_path.iterdir()] == ["win_rates.png"]
    assert len(by_heading["Result"].figures) == 1
    assert f"best {here} one on top" in by_heading["Result"].figures[0].caption


def test_a_column_that_failed_is_told_and_not_ranked(tmp_path):
    rows, credits, methods = study(WINS, methods=METHODS)
    _, table, sentences = write(tmp_path, only("simulated", rows), credits, methods, WHERE, num_seeds=3)
    assert "Every cell trained on human feedback failed." in sentences
    assert "human, %" not in table.header
    text = " ".join(sentences)
    assert "Simulated and human ranking agree" not in text
    assert "Not all cells" not in text
    _, _, sentences = write(tmp_path, only("", rows), credits, methods, WHERE)
    assert "Every cell trained on simulated or human feedback failed." in sentences


def test_a_seed_that_failed_is_told(tmp_path):
    wins = {name: [None, *seeds[:2], None] for name, seeds in WINS.items()}
    wins["ppo"] = [None, (60, 55), None, None]
    rows, credits, methods = study(wins, methods=METHODS)
    _, _, sentences = write(tmp_path, rows, credits, methods, WHERE, num_seeds=4)
    assert "Every cell of seeds 0, 3 failed." in sentences
    # What failed with its whole seed is not told once more of every method.
    assert "Not all cells are there; seeds found: PPO (simulated) 1 of 4, PPO (human) 1 of 4." in sentences
    _, _, sentences = write(tmp_path, *study(WINS, methods=METHODS), WHERE, num_seeds=3)
    assert not any("failed" in sentence for sentence in sentences)


def test_a_method_that_needs_no_feedback_is_missing_once():
    assert "seeds found: GPT4 2 of 3." in told({**WINS, "gpt4": [(80, 70), None, (80, 69)]})


def test_two_methods_are_not_drawn_against_each_other(tmp_path):
    methods = [METHODS[1], METHODS[3]]
    study_of_two = study({"ppo": WINS["ppo"], "sft": WINS["sft"]}, methods=methods)
    sections, _, sentences = write(tmp_path, *study_of_two, WHERE)
    assert "Human is not drawn against simulated: 2 methods have both win rates, fewer than 3." in sentences
    assert not any(section.heading.startswith("Agreement") for section in sections)
    assert [path.name for path in tmp_path.iterdir()] == ["win_rates.png"]


def test_one_seed_has_no_errors_and_nothing_is_clear(tmp_path):
    wins = {name: seeds[:1] for name, seeds in WINS.items()}
    text = told(wins)
    assert "PPO (60.0 %), before DPO (50.0 %), by one seed." in text
    assert "p_sim^eval, with one seed, so without a standard error: PPO (+20.0), DPO (+10.0), QUARK (-20.0)." in text
    assert "Order in the human column: 1 of 6 pairs of methods differ from the paper; with one seed there is no" in text
    for wrong in ("nan", "clearly", "±"):
        assert wrong not in text
    sections, _, _ = write(tmp_path, *study(wins, methods=METHODS), WHERE)
    by_heading = {section.heading: section for section in sections}
    assert by_heading["Order other than the paper's"].table.rows[0][5:] == ("–", "–", "1")
    assert all("one seed, no bars" in figure.caption for figure in by_heading["Result"].figures)


def test_a_method_of_one_seed_among_others_has_no_verdict():
    text = told({**WINS, "dpo": [(50, 43), None, None]})
    assert "not clearly apart: none; with one seed, so without a standard error: DPO (+10.0)." in text


def test_what_seconds_leave_out_is_said(tmp_path):
    sections, table, _ = write(tmp_path, *study(WINS, methods=METHODS), WHERE)
    (meanings,) = [" ".join(each.paragraphs) for each in sections if each.heading == "What the columns mean"]
    for text in (table.caption, meanings):
        assert "Not in seconds: the training of the SFT policy" in text
        assert "the reward model, which all methods that need one share in a feedback and seed" in text


def test_write_returns_what_the_command_needs(tmp_path):
    rows, credits, methods = study(WINS, methods=METHODS, lengths=LENGTHS)
    extra = Section("Mine", ["last"])
    sections, table, sentences = write(tmp_path, rows, credits, methods, WHERE, [extra])
    assert sections[-1] is extra
    assert sections[0].table is table
    assert sentences[0].startswith("Sandbox: a simulation")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["human_against_simulated.png", "win_rates.png"]
    by_heading = {section.heading: section for section in sections}
    differences = {row[:2]: row[2:] for row in by_heading["Difference to SFT"].table.rows}
    assert differences["PPO", "simulated"] == ("+22.0", "1.15", "+19.1", "+1.50", "0.23", "2.30 [2.05, 2.55]", "3")
    assert ("SFT", "human") not in differences
    (reversal,) = by_heading["Order other than the paper's"].table.rows
    assert reversal == ("human", "SFT", "QUARK", "+34.3", "-8.0", "1.15", "yes", "3")
    kinds = [row[:2] for row in by_heading["Each feedback and judge"].table.rows]
    assert ("GPT4", "none") in kinds
    assert ("PPO", "human") in kinds
    assert ("GPT4", "human") not in kinds
    page = write_report(tmp_path / "report.html", "Ranking", sections).read_text(encoding="utf-8")
    assert page.count("data:image/png;base64,") == 2
    for sentence in sentences[1:]:
        assert sentence.split(":")[0] in unescape(page)


def test_without_sft_nothing_is_compared_with_it(tmp_path):
    wins = {name: seeds for name, seeds in WINS.items() if name != "sft"}
    methods = [method for method in METHODS if method.name != "sft"]
    sections, _, sentences = write(tmp_path, *study(wins, methods=methods), WHERE)
    assert "Difference to SFT" not in [section.heading for section in sections]
    assert not any("over SFT" in sentence for sentence in sentences)


@pytest.mark.parametrize("level", ["recorded", "live"])
def test_only_the_sandbox_is_called_a_simulation(tmp_path, level):
    where = Provenance(level, "mine", "policy", "rm", 200, 805, 3, 0.7)
    _, table, sentences = write(tmp_path, *study(WINS, methods=METHODS), where)
    assert "simulation" not in sentences[0]
    assert level in table.caption
