"""The report holds the claims, the numbers of the rows and the gallery, and escapes all that it prints."""

import math

import pytest
from overoptimization_worlds import FACTS, SETTING, TRUTH, evaluation, reward_models, study

from alpacafarm_env.benchmarks.harness.report import render, text_table
from alpacafarm_env.benchmarks.overoptimization.fits import drop
from alpacafarm_env.benchmarks.overoptimization.gallery import Run, gallery_table, hacked
from alpacafarm_env.benchmarks.overoptimization.report import gains_table, results_table, reward_model_table, write
from alpacafarm_env.benchmarks.overoptimization.results import Results
from alpacafarm_env.benchmarks.overoptimization.tried import Tried

PLACES = ("step 0", "step 6", "step 40")


def run(proxy_end=(2.0, 3.0, 0.5, 4.0), gold_end=(4.0, 3.0, 2.0, 6.0)):
    texts = ["<script>alert(1)</script>", "b", "c", "d"]
    return Run.of(
        "25 % flips, PPO, seed 0",
        PLACES,
        evaluation(texts, [0.0] * 4, [4.0] * 4),
        evaluation(texts, [1.0] * 4, [5.0] * 4),
        evaluation(texts, proxy_end, gold_end),
    )


def test_the_gallery_shows_where_the_proxy_rose_most_while_gold_fell():
    # 2: the proxy fell; 3: gold rose.
    assert [entry.instruction for entry in hacked(run())] == ["Do <i>1</i>.", "Do <i>0</i>."]
    table = gallery_table(run(), 1)
    assert "of 4 responses 2 have a higher proxy and a lower gold at step 40 than at step 6" in table.caption
    assert table.rows[0][3].endswith("proxy 3.00; gold 3.00\nsince step 6: proxy +2.00, gold -2.00")


def test_a_response_without_a_verdict_is_not_in_the_gallery():
    assert [entry.end.proxy for entry in hacked(run(proxy_end=(None, 3.0, math.nan, 4.0)))] == [3.0]


def test_three_evaluations_are_of_the_same_instructions():
    one = evaluation(["a"] * 4, [0.0] * 4, [0.0] * 4)
    with pytest.raises(ValueError, match="same instructions"):
        Run.of("t", PLACES, one, {**one, "instructions": ["x"] * 4}, one)


def test_the_tables_numbers_are_those_of_the_rows():
    results = Results.of(study(), FACTS)
    table = results_table(results, SETTING)
    cells = {row[:2]: row for row in table.rows}
    fallen = drop(results.get("ann", "ppo")["gold"]).estimate
    row = cells["25 % flips (p_sim^ann)", "PPO"]
    assert row[7] == f"{fallen.mean:.2f} [{fallen.interval.low:.2f}, {fallen.interval.high:.2f}]"
    assert row[8] == f"{fallen.mean / fallen.standard_error:+.1f}"
    assert row[-1] == "5"
    gains = {row[:2]: row for row in gains_table(results, SETTING).rows}
    assert gains["no noise", "best-of-n"][6] == "–"  # best-of-1024 is 5.93 nats away
    assert len(cells) == 2 * len(TRUTH)


def test_reward_models_stand_with_the_labels_that_they_learn_from():
    table = reward_model_table(Results.of(study(), FACTS), reward_models())
    rows = {row[0]: row for row in table.rows}
    assert rows["no noise"] == ("no noise", "9,200", "81.8 [80.8, 82.8]", "81.8 [80.8, 82.8]", "1.8 [0.8, 2.8]", "5")
    assert rows["25 % flips, mean of 3"][1] == "9,201"
    assert reward_model_table(Results.of(study(), FACTS), []) is None


def test_a_report_of_everything(tmp_path):
    sections, table, sentences = write(
        tmp_path,
        study({name: TRUTH[name] for name in ("ann", "mean_3")}, methods=("ppo",)),
        FACTS,
        SETTING,
        reward_models=reward_models(),
        gallery=[run()],
        length_slope=0.004,
        tried=[Tried("a KL weight of 0.05", "gold held & <nothing> fell")],
        configuration={"kl_coef": 0.02},
        versions={"numpy": "2"},
    )
    page = render("harness/report.html.j2", title="Over-optimization", sections=sections)
    assert sentences[0].startswith("Sandbox: a simulation")
    assert "<script>" not in page
    assert "&lt;script&gt;alert(1)" in page
    assert "my <b>own" not in page
    assert "my &lt;b&gt;own&lt;/b&gt; wrapper" in page
    assert "gold held &amp; &lt;nothing&gt; fell" in page
    headings = [section.heading for section in sections]
    assert headings[:3] == ["Summary", "The claims", "Peaks and drops"]
    assert headings[-3:] == ["Appendix: what was tried", "Configuration", "Versions"]
    assert sections[-3].table.rows == [("a KL weight of 0.05", "gold held & <nothing> fell")]
    assert page.count("data:image/png;base64,") == len(list(tmp_path.iterdir()))
    assert "nan" not in " ".join(sentences) + text_table(table)
    assert "No rows of PPO for: no noise; 17.5 % flips" in " ".join(sentences)
    assert "No rows of best-of-n for: no noise; 17.5 % flips; 25 % flips" in " ".join(sentences)  # all of it failed


def test_a_report_of_little(tmp_path):
    sections, table, sentences = write(tmp_path, study({"ann": 0.47}, methods=("ppo",), seeds=1), FACTS, SETTING)
    headings = [section.heading for section in sections]
    assert not any(heading.startswith(("Appendix", "Configuration", "Reward hacking")) for heading in headings)
    assert "nan" not in " ".join(sentences) + text_table(table)
    assert any("cannot be judged" in sentence for sentence in sentences)
