"""The report holds the claims, the numbers of the rows and the gallery, and escapes all that it prints."""

import math

import pytest
from overoptimization_worlds import FACTS, SETTING, TRUTH, evaluation, reward_models, study

from alpacafarm_env.benchmarks.harness.report import text_table
from alpacafarm_env.benchmarks.overoptimization import analyse
from alpacafarm_env.benchmarks.overoptimization.analyse import Results
from alpacafarm_env.benchmarks.overoptimization.report import gallery_table, results_table, write_page

PLACES = ("step 0", "step 6", "step 40")


def gallery(proxy_end=(2.0, 3.0, 0.5, 4.0), gold_end=(4.0, 3.0, 2.0, 6.0)):
    texts = ["<script>alert(1)</script>", "b", "c", "d"]
    ends = [([0.0] * 4, [4.0] * 4), ([1.0] * 4, [5.0] * 4), (proxy_end, gold_end)]
    return gallery_table("25 % flips, PPO, seed 0", PLACES, [evaluation(texts, *end) for end in ends])


def test_the_gallery_shows_where_the_proxy_rose_most_while_gold_fell():
    # 2: the proxy fell; 3: gold rose.
    table = gallery()
    assert [row[0] for row in table.rows] == ["Do <i>1</i>.", "Do <i>0</i>."]
    for number in ("3.00", "+2.00", "-2.00"):
        assert number in table.rows[0][3]


def test_a_response_without_a_verdict_is_not_in_the_gallery():
    assert [row[0] for row in gallery(proxy_end=(None, 3.0, math.nan, 4.0)).rows] == ["Do <i>1</i>."]


def test_three_evaluations_are_of_the_same_instructions():
    one = evaluation(["a"] * 4, [0.0] * 4, [0.0] * 4)
    with pytest.raises(ValueError, match="same instructions"):
        gallery_table("t", PLACES, [one, {**one, "instructions": ["x"] * 4}, one])


def test_the_tables_numbers_are_those_of_the_rows():
    results = Results(study(), FACTS)
    cells = {row[:2]: row for row in results_table(results, SETTING).rows}
    fallen = results.stories["ann", "ppo"].drop
    row = cells["25 % flips (p_sim^ann)", "PPO"]
    assert row[7] == f"{fallen.mean:.2f} [{fallen.interval.low:.2f}, {fallen.interval.high:.2f}]"
    assert row[8] == f"{fallen.mean / fallen.standard_error:+.1f}"
    assert row[-1] == "5"
    *known, last = analyse.gains(results.curves["none", "best_of_n"])
    assert all(gain.num == 5 for gain in known)
    assert last is None  # best-of-1024 is 5.93 nats away
    assert len(cells) == 2 * len(TRUTH)


def test_a_report_of_everything(tmp_path):
    table, findings = write_page(
        tmp_path,
        Results(study({name: TRUTH[name] for name in ("ann", "mean_3")}), FACTS),
        SETTING,
        models=reward_models(),
        galleries={"one run": gallery()},
        length_slope=0.004,
        configuration={"kl_coef": 0.02},
    )
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "<script>" not in page
    assert "&lt;script&gt;alert(1)" in page
    assert "my <b>own" not in page
    assert "my &lt;b&gt;own&lt;/b&gt; wrapper" in page
    # Reward models stand with the labels that they learn from.
    for number in ("9,200", "81.8 [80.8, 82.8]", "1.8 [0.8, 2.8]", "9,201"):
        assert f'<td class="number">{number}</td>' in page
    assert page.count("data:image/png;base64,") == len(list(tmp_path.glob("*.png"))) > 5
    assert "nan" not in " ".join(findings) + text_table(table)
    assert any("17.5 % flips" in finding for finding in findings)  # which is missing


def test_a_report_of_little(tmp_path):
    results = Results(study({"ann": 0.47}, methods=("ppo",), seeds=1), FACTS)
    table, findings = write_page(tmp_path, results, SETTING)
    assert "Reward hacking" not in (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "nan" not in " ".join(findings) + text_table(table)
