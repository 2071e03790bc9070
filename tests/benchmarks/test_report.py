"""The HTML report: whole, escaped, without anything from outside."""

import base64
import re
from html.parser import HTMLParser

import numpy as np
import pytest

from alpacafarm_env.benchmarks.harness.report import Figure, Section, Table, number, render, write_report

PNG = b"\x89PNG\r\n\x1a\n" + bytes(range(256))
EVIL = '<script src="http://example.org/x.js">alert(1)</script> & "quotes" \'single\''
VOID = {"meta", "img", "br"}


def page_of(title, sections):
    return render("harness/report.html.j2", title=title, sections=sections)


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


def test_everything_is_escaped_and_read_back_as_it_was():
    table = Table((EVIL, "n"), [("<b>bold</b>", "1"), ("line one\nline two", "2")], caption=EVIL)
    page = page_of(EVIL, [Section(EVIL, [EVIL], table, [Figure(PNG, EVIL)])])
    outline = Outline(page)
    assert {"script", "b", "link", "iframe"}.isdisjoint(outline.tags)
    assert outline.text.count(EVIL) == 7  # title, h1, h2, p, th, caption, figcaption
    assert "<b>bold</b>" in outline.text
    assert "line one\nline two" in outline.text
    (image,) = [attributes for tag, attributes in outline.attributes if tag == "img"]
    assert image["alt"] == EVIL


def test_figures_are_embedded_and_nothing_is_fetched():
    page = page_of("t", [Section("h", figures=[Figure(PNG, "c")])])
    (data,) = re.findall(r'src="data:image/png;base64,([^"]*)"', page)
    assert base64.b64decode(data) == PNG
    assert not re.search(r"https?:|url\(|@import|<link|<script|\son\w+=", page)


def test_columns_of_numbers_are_right_aligned_and_text_is_not():
    table = Table(
        ("name", "value", "empty"),
        [("7 dwarfs and a great deal more text about them", "1.5 [1, 2]", ""), ("x", "–", "")],
    )
    assert (
        re.findall(r"<(?:td|th)( class=\"number\")?>", page_of("t", [Section("h", table=table)]))
        == ["", ' class="number"', ""] * 3
    )


def test_what_utf8_cannot_hold_is_replaced(tmp_path):
    path = write_report(tmp_path / "report.html", "lone \ud800 surrogate, 日本 🙂", [])
    assert "<h1>lone ? surrogate, 日本 🙂</h1>" in path.read_text(encoding="utf-8")
    assert [file.name for file in tmp_path.iterdir()] == ["report.html"]


@pytest.mark.parametrize("kind", [float, np.float64])
def test_numbers_are_rounded_alike_whatever_they_are_of(kind):
    assert number(kind(71.55), "%") == "71.5"  # as a float, below the half
    assert number(kind(-0.04), "%", "+") == "+0.0"
    assert number(kind("nan")) == "–"


def test_a_ragged_table_is_refused():
    with pytest.raises(ValueError, match="row 1: expected 2 cells"):
        Table(("a", "b"), [("1", "2"), ("1",)])
