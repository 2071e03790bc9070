"""The ranking in tables and words: what they say is what the made-up numbers say."""

from html import unescape

import pytest
from method_worlds import Facts, study

from alpacafarm_env.benchmarks.harness.report import Provenance, render, text_table
from alpacafarm_env.benchmarks.method_ranking.figures import write_figures
from alpacafarm_env.benchmarks.method_ranking.report import report_values
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
    return " ".join(report_values(summarize(*study(wins, methods=methods, **options)), WHERE)["findings"])


def page_of(rows, credits, methods, folder, *, where=WHERE, **options):
    """The tables and findings of a study, and the page that they fill."""
    values = report_values(summarize(rows, credits, methods, **options), where)
    values["figures"] = write_figures(folder, values["summary"], where)
    shown = {**values, "settings": values["ranking"], "title": "Ranking"}
    return values, unescape(render("method_ranking/report.html.j2", **shown))


def columns(table, *places):
    return [tuple(row[place] for place in places) for row in table.rows]


def test_the_table_stands_beside_the_papers(tmp_path):
    values, page = page_of(*study(WINS, methods=METHODS, lengths=LENGTHS), tmp_path)
    table = values["ranking"]
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
        assert fact in page
    assert text_table(table).splitlines()[0].split() == (
        ["method", "simulated,", "%", "paper", "human,", "%", "paper", "gold", "length", "seconds", "tokens", "n"]
    )


def test_differences_and_reversals_stand_in_tables(tmp_path):
    values, page = page_of(*study(WINS, methods=METHODS, lengths=LENGTHS), tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["human_against_simulated.png", "win_rates.png"]
    assert page.count("data:image/png;base64,") == 2
    differences = {row[:2]: row[2:] for row in values["differences"].rows}
    assert differences["PPO", "simulated"] == ("+22.0", "1.15", "+19.1", "+1.50", "0.23", "2.30 [2.05, 2.55]", "3")
    assert ("SFT", "human") not in differences
    assert values["reversals"].rows == [("human", "SFT", "QUARK", "+34.3", "-8.0", "1.15", "yes", "3")]
    kinds = columns(values["crossed"], 0, 1)
    assert ("GPT4", "none") in kinds
    assert ("PPO", "human") in kinds
    assert ("GPT4", "human") not in kinds
    assert all(sentence in page for sentence in values["findings"])


def test_methods_are_sorted_by_two_standard_errors_from_sft():
    sentences = report_values(summarize(*study(WINS, methods=METHODS)), WHERE)["findings"]
    simulated, human = (line for line in sentences if line.startswith("Win rate in points over SFT"))
    # PPO +22 ± 1.2; DPO +5 ± 2.5 (10, 2, 3); QUARK -19 ± 0.6 (-20, -20, -17: ± 1.0).
    assert (
        "clearly above (more than 2 standard errors): PPO (+22.0 ± 1.2); clearly below: QUARK (-19.0 ± 1.0)"
        in simulated
    )
    assert simulated.endswith("not clearly apart: DPO (+5.0 ± 2.5).")
    # 11, 19, 15 and 6, 10, 8 over SFT; DPO -1, 0, -2.
    assert "above (more than 2 standard errors): PPO (+15.0 ± 2.3), QUARK (+8.0 ± 1.2); not" in human
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
    assert "Rankings, simulated and human, here: Spearman 0.60 [" in text
    assert "over 5 methods (the paper: Spearman 0.98)." in text
    assert "human, here and in the paper: Spearman 0.80 [" in text


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
    rows = only(here, rows, methods)
    values, page = page_of(rows, credits, methods, tmp_path, feedbacks=(here,), num_seeds=3)
    text = " ".join(values["findings"])
    for absent in ("Not all cells", "failed", "simulated and human, here", f"{other} column", "nan"):
        assert absent not in text
    for told_of in ("Order in the", "First among the trained methods in the"):
        assert f"{told_of} {here} column" in text
    assert f"There are {here} labels only" in text
    assert values["ranking"].header == ("method", f"{here}, %", "paper", "gold", "length", "seconds", "tokens", "n")
    assert "nan" not in text_table(values["ranking"])
    assert list(values["agreements"]) == [f"{here}, here and in the paper"]
    assert set(columns(values["differences"], 1)) == {(here,)}
    assert set(columns(values["crossed"], 1)) == {(here,), ("none",)}
    assert [path.name for path in tmp_path.iterdir()] == ["win_rates.png"]
    assert f"best {here} one on top" in values["figures"][0].caption
    assert page.count("data:image/png;base64,") == 1


def test_columns_and_seeds_that_failed_are_told_and_not_ranked(tmp_path):
    rows, credits, methods = study(WINS, methods=METHODS)
    values, _ = page_of(only("simulated", rows), credits, methods, tmp_path, num_seeds=3)
    assert "Every cell trained on human feedback failed." in values["findings"]
    assert "human, %" not in values["ranking"].header
    assert "Not all cells" not in " ".join(values["findings"])
    values, _ = page_of(only("", rows), credits, methods, tmp_path)
    assert "Every cell trained on simulated or human feedback failed." in values["findings"]
    wins = {name: [None, *seeds[:2], None] for name, seeds in WINS.items()}
    wins["ppo"] = [None, (60, 55), None, None]
    values, _ = page_of(*study(wins, methods=METHODS), tmp_path, num_seeds=4)
    assert "Every cell of seeds 0, 3 failed." in values["findings"]
    # What failed with its whole seed is not told once more of every method.
    assert "Not all cells are there; seeds found: PPO (simulated) 1 of 4, PPO (human) 1 of 4." in values["findings"]


def test_a_method_that_needs_no_feedback_is_missing_once():
    assert "seeds found: GPT4 2 of 3." in told({**WINS, "gpt4": [(80, 70), None, (80, 69)]})


def test_two_methods_are_not_drawn_against_each_other(tmp_path):
    methods = [METHODS[1], METHODS[3]]
    values, page = page_of(*study({"ppo": WINS["ppo"], "sft": WINS["sft"]}, methods=methods), tmp_path)
    assert "Human is not drawn against simulated: 2 methods have both win rates, fewer than 3." in page
    assert not values["agreements"]
    assert "Agreement of the rankings" not in page
    assert [path.name for path in tmp_path.iterdir()] == ["win_rates.png"]


def test_one_seed_has_no_errors_and_nothing_is_clear(tmp_path):
    wins = {name: seeds[:1] for name, seeds in WINS.items()}
    values, _ = page_of(*study(wins, methods=METHODS), tmp_path)
    text = " ".join(values["findings"])
    assert "PPO (60.0 %), before DPO (50.0 %), by one seed." in text
    assert "PPO (+20.0), DPO (+10.0), QUARK (-20.0)." in text
    assert "Order in the human column: 1 of 6 pairs of methods differ from the paper; with one seed there is no" in text
    for wrong in ("nan", "clearly", "0 ±"):
        assert wrong not in text
    assert values["reversals"].rows[0][5:] == ("–", "–", "1")
    assert all("one seed, no bars" in figure.caption for figure in values["figures"])


def test_a_method_of_one_seed_among_others_has_no_verdict():
    text = told({**WINS, "dpo": [(50, 43), None, None]})
    assert "with one seed, so without an error: DPO (+10.0)." in text
    assert "not clearly apart: DPO" not in text


def test_without_sft_nothing_is_compared_with_it(tmp_path):
    wins = {name: seeds for name, seeds in WINS.items() if name != "sft"}
    methods = [method for method in METHODS if method.name != "sft"]
    values, page = page_of(*study(wins, methods=methods), tmp_path)
    assert not values["differences"].rows
    assert "over SFT" not in " ".join(values["findings"])
    assert "Difference to SFT" not in page


@pytest.mark.parametrize("level", ["recorded", "live"])
def test_only_the_sandbox_is_called_a_simulation(tmp_path, level):
    where = Provenance(level, "mine", "policy", "rm", 200, 805, 3, 0.7)
    _, page = page_of(*study(WINS, methods=METHODS), tmp_path, where=where)
    assert "simulation" not in page
    assert f"Level: {level}" in page
