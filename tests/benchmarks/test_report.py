"""The HTML page: whole, escaped, without anything from outside; figure, few sentences, tables, the rest folded."""

import base64
import json
import re
from html.parser import HTMLParser

import numpy as np
import pytest
from matplotlib.figure import Figure as Drawing

from alpacafarm_env.benchmarks.harness.page import MOST_SENTENCES, Drawn, Figure, Page, html, publish
from alpacafarm_env.benchmarks.harness.report import SIMULATION, Table, number
from alpacafarm_env.benchmarks.harness.study import Study

PNG = b"\x89PNG\r\n\x1a\n" + bytes(range(256))
EVIL = '<script src="http://example.org/x.js">alert(1)</script> & "quotes" \'single\''
VOID = {"meta", "img", "br"}
MANIFEST = {
    "config": {"sizes": {"num": 2000}},
    "seeds": [0, 1],
    "facts": {"findings": ["x"]},
    "versions": {"torch": "2"},
}


def html_of(page, *figures, **texts):
    return html(page, figures, MANIFEST, **texts)


class Outline(HTMLParser):
    """Collects tags, attributes and text, and checks that tags are balanced."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open, self.tags, self.text, self.attributes = [], [], [], []
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def test_everything_is_escaped():
    table = Table((EVIL, "n"), [("<b>bold</b>", "1"), ("line one\nline two", "2")], caption=EVIL, title=EVIL)
    page = Page(EVIL, {"table": table}, [EVIL], method=[EVIL])
    outline = Outline(html_of(page, Figure(PNG, EVIL), notes=[EVIL + "."], failures=[EVIL]))
    assert {"script", "b", "link", "iframe"}.isdisjoint(outline.tags)
    assert outline.text.count(EVIL) == 9  # title, h1, h2, th, two captions, finding, method, failure
    assert "<b>bold</b>" in outline.text
    assert "line one\nline two" in outline.text
    (image,) = [attributes for tag, attributes in outline.attributes if tag == "img"]
    assert image["alt"] == EVIL


def test_figures_are_embedded_and_nothing_is_fetched():
    page = html_of(Page("t", {}, []), Figure(PNG, "c"))
    (data,) = re.findall(r'src="data:image/png;base64,([^"]*)"', page)
    assert base64.b64decode(data) == PNG
    assert not re.search(r"https?:|url\(|@import|<link|<script|\son\w+=", page)


def test_the_answer_comes_first():
    table = Table(("a", "b"), [("1", "2")], caption="A caption.")
    told = [f"Finding {place}. More of it." for place in "abcd"]
    page = html_of(Page("t", {"all": table}, told, headline="up by 2", method=["How."]), *[Figure(PNG, "c")] * 2)
    shown = re.sub(r"<details.*?</details>", "", page, flags=re.DOTALL)
    order = [shown.index(part) for part in ("<img", "Up by 2.", "Finding a", "Finding b", "<table", "<img", "</body>")]
    assert order[:5] == sorted(order[:5])
    assert shown.rindex("<img") > shown.index("<table")
    assert "Finding c" not in shown  # the headline and two findings of two sentences are five
    assert all(text in page for text in ("Finding c", "Finding d", "A caption.", "How.", "sizes.num", "2,000"))
    assert not any(text in shown for text in ("A caption.", "How.", "sizes.num"))
    assert MOST_SENTENCES == 5


def test_columns_of_numbers_are_right_aligned():
    table = Table(
        ("name", "value", "empty"),
        [("7 dwarfs and a great deal more text about them", "1.5 [1, 2]", ""), ("x", "–", "")],
    )
    page = html_of(Page("t", {"h": table}, [])).partition("<details>")[0]
    assert re.findall(r"<(?:td|th)( class=\"number\")?>", page) == ["", ' class="number"', ""] * 3


def drawn(width):
    figure = Drawing(figsize=(width, 4))
    figure.subplots().plot([1, 2])
    return figure


def test_a_study_publishes_figures_page_and_findings(tmp_path, capsys):
    tables = {
        "one": Table(("name", "value"), [("x", "2")], "Level: sandbox.", "Heading"),
        "two": Table(("name",), [("lone \ud800 surrogate, 日本 🙂",)]),
    }
    told, figures = [SIMULATION, "So it is."], {"new": Drawn(drawn(6), "c")}
    with Study(tmp_path, "demo", {}, quick=True) as study:
        publish(study, Page("", {}, [], {"old": Drawn(drawn(4), "c")}))
        study.failed["bad"] = "no\nluck"
        capsys.readouterr()
        publish(study, Page("Title", tables, told, figures, printed=("one",)))
    printed, shown = capsys.readouterr().out, (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "lone ? surrogate, 日本 🙂" in shown
    assert [path.name for path in tmp_path.glob("*.png")] == ["new.png"]
    assert json.loads((tmp_path / "manifest.json").read_text())["facts"]["findings"] == told
    for text in (printed, shown):
        assert text.count(SIMULATION) == 1
        assert all(part in text for part in ("Heading", "So it is.", "Level: sandbox.", "bad: FAILED: no luck"))


@pytest.mark.parametrize("kind", [float, np.float64])
def test_numbers_are_rounded_alike_whatever_they_are_of(kind):
    assert number(kind(71.55), "%") == "71.5"  # as a float, below the half
    assert number(kind(-0.04), "%", "+") == "+0.0"
    assert number(kind("nan")) == "–"


def test_a_ragged_table_is_refused():
    with pytest.raises(ValueError, match="row 1: expected 2 cells"):
        Table(("a", "b"), [("1", "2"), ("1",)])
