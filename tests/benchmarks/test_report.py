"""The HTML page: whole, escaped, without anything from outside; figure, few sentences, tables, the rest folded."""

import base64
import json
import re

import numpy as np
import pytest
from markupsafe import escape
from matplotlib.figure import Figure as Drawing

from alpacafarm_env.benchmarks.harness.page import MOST_SENTENCES, Drawn, Page, html, publish
from alpacafarm_env.benchmarks.harness.plots import (
    Curve,
    Panel,
    band,
    draw,
    looks,
)
from alpacafarm_env.benchmarks.harness.report import SIMULATION, Table, number
from alpacafarm_env.benchmarks.harness.study import Study

PNG = b"\x89PNG\r\n\x1a\n" + bytes(range(256))
EVIL = '<script src="http://example.org/x.js">alert(1)</script> & "quotes" \'single\''
MANIFEST = {
    "config": {"sizes": {"num": 2000}},
    "seeds": [0, 1],
    "facts": {"findings": ["x"]},
    "versions": {"torch": "2"},
}


def html_of(*page, figures=(), **texts):
    drawn = {str(place): Drawn(None, caption) for place, caption in enumerate(figures)}
    return html(Page(*page, drawn, "up by 2", method=["How."]), dict.fromkeys(drawn, PNG), MANIFEST, **texts)


def test_everything_is_escaped():
    table = Table((EVIL, "n"), [("<b>bold</b>", "1"), ("line one\nline two", "2")], caption=EVIL, title=EVIL)
    text = html_of(EVIL, {"table": table}, [EVIL], figures=[EVIL], notes=[EVIL + "."], failures=[EVIL])
    assert not re.search("<script|<b>|<link|<iframe", text)
    # Note, title, h1, h2, th, two captions, alt, finding, failure.
    assert text.count(escape(EVIL)) == 10
    assert "&lt;b&gt;bold&lt;/b&gt;" in text
    assert "line one\nline two" in text


def test_figures_are_embedded_and_nothing_is_fetched():
    page = html_of("t", {}, [], figures=["c"])
    (data,) = re.findall(r'src="data:image/png;base64,([^"]*)"', page)
    assert base64.b64decode(data) == PNG
    assert not re.search(r"https?:|url\(|@import|<link|<script|\son\w+=", page)


def test_the_answer_comes_first():
    table = Table(("a", "b"), [("1", "2")], caption="A caption.")
    findings = [f"Finding {place}. More of it." for place in "abcd"]
    page = html_of("t", {"all": table}, findings, figures=["c", "d"])
    shown = re.sub(r"<details.*?</details>", "", page, flags=re.DOTALL)
    order = [shown.index(part) for part in ("<img", "Up by 2.", "Finding a", "Finding b", "<table", "<img", "</body>")]
    assert order[:5] == sorted(order[:5])
    assert shown.rindex("<img") > shown.index("<table")
    assert "Finding c" not in shown  # the headline and two findings of two sentences are five
    assert all(text in page for text in ("Finding c", "Finding d", "A caption.", "How.", "sizes.num", "2,000"))
    assert not any(text in shown for text in ("A caption.", "How.", "sizes.num"))
    assert MOST_SENTENCES == 5


def drawn(width):
    figure = Drawing(figsize=(width, 4))
    figure.subplots().plot([1, 2])
    return figure


def test_a_study_publishes_figures_page_and_findings(tmp_path, capsys):
    tables = {
        "one": Table(("name", "value"), [("x", "2")], "Level: sandbox.", "Heading"),
        "two": Table(("name",), [("lone \ud800 surrogate, 日本 🙂",)]),
    }
    findings, figures = [SIMULATION, "So it is."], {"new": Drawn(drawn(6), "c")}
    with Study(tmp_path, "demo", {}, quick=True) as study:
        publish(study, Page("", {}, [], {"old": Drawn(drawn(4), "c")}))
        study.failed["bad"] = "no\nluck"
        capsys.readouterr()
        publish(study, Page("Title", tables, findings, figures, printed=("one",)))
    printed, shown = capsys.readouterr().out, (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "lone ? surrogate, 日本 🙂" in shown
    assert (tmp_path / "new.png").exists()
    assert "new.png" in printed
    assert json.loads((tmp_path / "manifest.json").read_text())["facts"]["findings"] == findings
    for text in (printed, shown):
        assert text.count(SIMULATION) == 1
        assert all(part in text for part in ("Heading", "So it is.", "Level: sandbox.", "bad: FAILED: no luck"))


@pytest.mark.parametrize("kind", [float, np.float64])
def test_numbers_are_rounded_alike_whatever_they_are_of(kind):
    assert number(kind(71.55), "%") == "71.5"  # as a float, below the half
    assert number(kind(-0.04), "%", "+") == "+0.0"
    assert number(kind("nan")) == "–"


STEPS = np.array([0.0, 5.0, 10.0])
VALUES = np.array([[1.0, 4.0, 0.0], [2.0, 4.0, 1.0], [3.0, 4.0, 5.0]])


def panel(values=VALUES, **options):
    return Panel("PPO step", "win rate (%)", [Curve("simulated", STEPS, values)], **options)


def test_band_is_the_t_interval_over_seeds():
    mean, low, high = band(VALUES)
    # t(0.975, 2) = 4.302653; sd(1, 2, 3) = 1, over sqrt(3).
    assert mean.tolist() == [2, 4, 2]
    assert low[0] == pytest.approx(2 - 4.302653 / np.sqrt(3), abs=1e-6)
    assert high[0] == pytest.approx(2 + 4.302653 / np.sqrt(3), abs=1e-6)
    assert low[1] == high[1] == 4


def test_labels_have_one_color_whatever_is_beside_them():
    noisy, clean, mine = looks(["ann", "none", "mine"])
    assert looks(["mine", "none", "gpt4", "ann"])[1::2] == [clean, noisy]
    assert looks(["sim_ann"]) == looks(["reward_model"]) == looks(["simulated"]) == [noisy]  # whose labels they are
    assert len({noisy, clean, mine}) == 3
    assert len(looks(map(str, range(20)))) == 20  # of one's own, more than there are colors


def test_axes_carry_labels_marks_and_level():
    figure = draw([panel(level=50.0, marks=(5.0, 5.0, 10.0))], "Title", "n = 9")
    (axis,) = figure.axes
    assert (axis.get_xlabel(), axis.get_ylabel()) == ("PPO step", "win rate (%)")
    assert axis.get_legend_handles_labels()[1] == ["simulated"]
    assert figure.get_suptitle() == "Title"
    assert figure.get_supxlabel() == "n = 9"
    bold = next(line for line in axis.lines if line.get_label() == "simulated")
    assert bold.get_ydata().tolist() == [2, 4, 2]
    assert len(axis.collections) == 1
    assert len(axis.lines) == 3 + 1 + 1 + 2  # seeds, mean, level, marks
