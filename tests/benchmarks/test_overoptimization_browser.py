"""The report in a real browser: nothing on the console, every figure drawn, the table's numbers on the page.

Needs Chromium or Chrome; skipped where there is none.
"""

import html
import json
import re
import shutil
import subprocess

import pytest
from overoptimization_worlds import FACTS, SETTING, reward_models, study

from alpacafarm_env.benchmarks.overoptimization.analyse import Results
from alpacafarm_env.benchmarks.overoptimization.report import write_page

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="needs Chromium or Chrome")
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


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    table, _ = write_page(folder, Results(study(), FACTS), SETTING, models=reward_models(), length_slope=0.004)
    return (folder / "report.html").read_text(encoding="utf-8"), len(list(folder.glob("*.png"))), table


def test_every_figure_is_drawn_and_the_numbers_are_the_tables(report, tmp_path):
    page, num_figures, table = report
    assert browse(page, tmp_path)[1] == []
    found = look(page, tmp_path)
    assert len(found["images"]) == num_figures > 5
    for image in found["images"]:
        assert image["loaded"]
        assert image["width"] > 300
        assert image["height"] > 100
        assert image["left"] >= 0
        assert image["right"] <= found["width"]
    shown = " ".join(" ".join(found["cells"]).split())
    for row in table.rows:
        assert " ".join(" ".join(row).split()) in shown


def test_a_broken_figure_and_a_blocked_script_are_seen(report, tmp_path):
    page = report[0].replace("base64,iVBOR", "base64,AAAA", 1) + "<script>nothing.here()</script>"
    assert [image["loaded"] for image in look(page, tmp_path)["images"]].count(False) == 1
    assert "Content Security Policy" in " ".join(browse(page, tmp_path)[1])
