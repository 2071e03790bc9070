"""The report and its figures hold what the rows say, and escape all that they print.

Two tests look at the report in a real browser: Chromium or Chrome, skipped where there is none.
"""

import html
import json
import math
import re
import shutil
import subprocess

import numpy as np
import pytest
from overoptimization_worlds import FACTS, START, TRUTH, evaluation, reward_models, study, true_gain

from alpacafarm_env.benchmarks.harness.study import write_csv
from alpacafarm_env.benchmarks.overoptimization import figures
from alpacafarm_env.benchmarks.overoptimization.analyse import Results
from alpacafarm_env.benchmarks.overoptimization.curves import COLUMNS, gain_at
from alpacafarm_env.benchmarks.overoptimization.page import NOWHERE, UNJUDGED, page, page_of, under
from alpacafarm_env.benchmarks.overoptimization.plans import Sizes
from alpacafarm_env.benchmarks.overoptimization.ranges import Along, cost
from alpacafarm_env.benchmarks.overoptimization.report import gallery_table, remove_earlier, write_page

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
needs_browser = pytest.mark.skipif(BROWSER is None, reason="needs Chromium or Chrome")
PROBE = """<script>window.onload = () => {
  const found = {
    images: [...document.images].map(i => {
      const r = i.getBoundingClientRect();
      return {loaded: i.complete && i.naturalWidth > 0, width: r.width, height: r.height, left: r.left, right: r.right};
    }),
    width: document.documentElement.clientWidth,
    cells: [...document.querySelectorAll('td')].map(cell => cell.innerText),
  };
  document.body.innerText = 'PROBE' + JSON.stringify(found) + 'END';
};</script>"""
PLACES = ("step 0", "step 6", "step 40")


@pytest.fixture(scope="module")
def results():
    return Results(study(), FACTS)


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """A report of everything: its HTML, how many PNG files, the page."""
    folder = tmp_path_factory.mktemp("report")
    shown = {name: TRUTH[name] for name in ("none", "ann", "gpt4", "mean_3", "mine")}
    found = page_of(Results(study(shown), FACTS), reward_models(), Sizes())
    write_page(folder, found, found.findings, {"one run": gallery()}, {"kl_coef": 0.02})
    return (folder / "report.html").read_text(encoding="utf-8"), len(list(folder.glob("*.png"))), found


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
    without_verdicts = gallery(proxy_end=(None, 3.0, math.nan, 4.0))
    assert [row[0] for row in without_verdicts.rows] == ["Do <i>1</i>."]


def test_a_report_of_everything(report):
    page, num_figures, found = report
    assert "<script>" not in page
    assert "&lt;script&gt;alert(1)" in page
    assert "my <b>own" not in page
    assert "my &lt;b&gt;own&lt;/b&gt; wrapper" in page
    # Reward models stand with the labels that they learn from.
    for number in ("9,200", "81.8 [80.7, 82.8]", "1.8 [1.0, 3.2]", "9,201"):
        assert f'<td class="number">{number}</td>' in page
    assert page.count("data:image/png;base64,") == num_figures > 5
    assert "nan" not in " ".join(found.findings)


def test_one_treatment_and_one_seed_have_a_page_without_intervals(tmp_path):
    found = page_of(Results(study({"ann": 0.47}, methods=("ppo",), seeds=1), FACTS), (), Sizes())
    assert "nan" not in " ".join([*found.findings, *(cell for row in found.tables["falls"].rows for cell in row)])
    assert {*found.figures} == {"flips_against_kl_ppo"}
    (row,) = found.tables["falls"].rows
    assert row[8] == UNJUDGED


@pytest.mark.parametrize("falling", [True, False])
def test_whether_the_papers_figure_comes_out_is_read_from_win_rates(falling):
    """Win rates of the made-up studies follow gold, but for noise; without noise they fall where gold does."""
    rows = study({name: TRUTH[name] for name in ("none", "ann", "gpt4")}, noise=0.001)
    for row in rows:
        row["win_rate_simulated"] += 0 if falling else 100 * row["kl_exact"]
    told = " ".join(page_of(Results(rows, FACTS), (), Sizes()).findings)
    assert ("does not come out" in told) != falling


def test_clean_labels_that_fall_are_named_under_the_figure():
    rows = study({"none": 0.47, "ann": 0.47}, noise=0.001)
    for row in rows:
        if row["method"] == "best_of_n":
            row["gold"] = START + row["kl_exact"]  # it rises to the end
    results = Results(rows, FACTS)
    assert (under(results, "none", fallen=True), under(results, "none", fallen=False)) == ("PPO", "best-of-n")
    assert "PPO" in page_of(results, (), Sizes()).figures[figures.NOISE].caption


def browse(page, folder):
    """The page as it stands in the browser in the end, and what stands on the console."""
    place = folder / "report.html"
    place.write_text(page, encoding="utf-8")
    command = [
        BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1200,900", "--enable-logging=stderr",
        f"--user-data-dir={folder / 'profile'}", "--dump-dom", place.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def look(page, folder):
    """What a script finds on the page; the page itself allows none."""
    shown, _ = browse(re.sub('<meta http-equiv="Content-Security-Policy"[^>]*>', "", page) + PROBE, folder)
    return json.loads(html.unescape(re.search("PROBE(.*)END", shown, re.DOTALL)[1]))


@needs_browser
def test_a_browser_draws_every_figure_and_shows_the_tables_numbers(report, tmp_path):
    page, num_figures, made = report
    assert browse(page, tmp_path)[1] == []
    found = look(page, tmp_path)
    assert len(found["images"]) == num_figures
    for image in found["images"]:
        assert image["loaded"]
        assert image["width"] > 300
        assert image["height"] > 100
        assert image["left"] >= 0
        assert image["right"] <= found["width"]
    shown = " ".join(" ".join(found["cells"]).split())
    assert all(" ".join(" ".join(row).split()) in shown for table in made.tables.values() for row in table.rows)


@needs_browser
def test_a_broken_figure_and_a_blocked_script_are_seen(report, tmp_path):
    page = report[0].replace("base64,iVBOR", "base64,AAAA", 1) + "<script>nothing.here()</script>"
    assert [image["loaded"] for image in look(page, tmp_path)["images"]].count(False) == 1
    assert "Content Security Policy" in " ".join(browse(page, tmp_path)[1])


def test_results_of_an_earlier_call_do_not_stay(tmp_path):
    """Once there is a report; before that a table of that name is somebody else's."""
    (tmp_path / "reward_models.csv").touch()
    remove_earlier(tmp_path)
    assert (tmp_path / "reward_models.csv").exists()
    (tmp_path / "report.html").touch()
    remove_earlier(tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {"report.html"}


def test_ranges_begin_where_it_was_measured():
    """Nearer to SFT a gap is interpolated from the exact 0, with an interval that never holds it."""
    rows = study({"none": 0.05, "ann": 0.47}, methods=("best_of_n",), noise=0)
    curves = Results(rows, FACTS).curves
    found = cost(curves["none", "best_of_n"], curves["ann", "best_of_n"])
    first = curves["ann", "best_of_n"]["kl_exact"][:, 1].max()
    assert found.kl[0] == pytest.approx(first)
    worse = Along(found.kl, np.ones_like(found.values) + 0.1 * np.arange(len(found.values))[:, None])
    assert worse.ranges == [(pytest.approx(first), found.kl[-1])]


def test_methods_share_one_axis_as_far_as_all_their_seeds_reach(results):
    keys = {"PPO": ("ann", "ppo"), "best": ("ann", "best_of_n")}
    for axis, measure in zip(figures.draw_gains(results, keys, "title").axes, ("proxy", "gold"), strict=True):
        for line, key in zip(axis.lines, keys.values(), strict=True):
            curves = results.curves[key]
            assert line.get_xdata()[-1] == pytest.approx(np.sqrt(curves["kl_exact"][:, -1].min()))
            gains = gain_at(curves, line.get_xdata()[[50, -1]], measure).mean(axis=0)
            assert line.get_ydata()[[50, -1]] == pytest.approx(gains)
        assert len({(line.get_linestyle(), line.get_marker()) for line in axis.lines}) == 2


def test_the_page_is_made_from_the_stored_table(tmp_path):
    rows = study({name: TRUTH[name] for name in ("none", "ann", "mine")}, noise=0.01)
    write_csv(tmp_path / "table.csv", [row for row in rows if row["seed"] < 3 or row["method"] == "ppo"], COLUMNS)
    write_csv(tmp_path / "reward_models.csv", [row for row in reward_models() if row["treatment"] in ("none", "ann")])
    (tmp_path / "manifest.json").write_text(json.dumps({"config": {"sizes": {}}, "seeds": [], "facts": {}}))
    found = page(tmp_path)
    clean, noisy = found.tables["reward_models"].rows
    assert [float(cell.split()[0]) for cell in clean[2:5]] == pytest.approx([81.8, 81.8, 1.8])
    assert (clean[0], noisy[0], noisy[5]) == ("no noise", "25 % flips (p_sim^ann)", "5")
    clean, noisy, *_ = found.findings
    assert "runs' ends" not in clean  # nothing falls
    assert noisy.startswith("25 % flips (p_sim^ann): gold has clearly fallen from its peak under PPO")
    grouped = {f"{group}_against_kl_{method}" for group in ("flips", "own") for method in ("ppo", "best_of_n")}
    assert {*found.figures} == {figures.NOISE, "methods_ann", "methods_none", *grouped}
    rows = {row[:2]: row for row in found.tables["falls"].rows}
    assert len(rows) == 6
    assert [rows["25 % flips (p_sim^ann)", method][2] for method in ("PPO", "best-of-n")] == ["5", "3"]
    assert "3 to 5 seeds" in found.tables["falls"].caption
    # The truth: d(0.8 - 0.47 log d) is highest at d = exp(0.8 / 0.47 - 1), KL 4.1, and falls to the end, 20.
    _, _, _, _, kl, end, fall, _, _, at, last, fall_to_the_end = rows["25 % flips (p_sim^ann)", "PPO"]
    assert float(kl) == pytest.approx(4.1, abs=0.5)
    assert float(end) == pytest.approx(20, abs=0.2)
    truth = true_gain("ppo", 0.47)
    for each in (fall, fall_to_the_end):
        assert float(each.split()[0]) == pytest.approx(truth.max() - truth[-1], abs=0.03)
    assert float(last.split()[0]) == float(end)
    low, high = map(float, at.split(" to "))
    assert 4 < low < 8
    assert high == pytest.approx(20, abs=0.2)
    assert rows["no noise", "PPO"][9] == NOWHERE
    (costs,) = (row for row in found.tables["costs"].rows if row[0] == "PPO")
    assert float(costs[4].split()[0]) == pytest.approx((true_gain("ppo", 0.05) - truth)[-1], abs=0.03)
    assert any("25 % flips" in finding for finding in found.findings)
    assert "3 seeds" in found.headline


def test_no_two_figures_show_the_same_treatments(results):
    truth = {name: TRUTH[name] for name in ("none", "ann", "uwo_3")}
    # "Who labels" would be flips again, and "number of labels" a part of both.
    assert list(figures.groups(Results(study(truth, methods=("ppo",)), FACTS), "ppo")) == ["flips", "ensembles"]
    assert list(figures.groups(Results(study({"ann": 0.47}), FACTS), "ppo")) == ["flips"]
    sizes = {name: len(names) for name, (_, names) in figures.groups(results, "ppo").items()}
    assert sizes == {"flips": 4, "labellers": 5, "sizes": 3, "ensembles": 4, "own": 2}
