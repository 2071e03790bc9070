"""The studies' pages: what is stored beside them says what they say, and only finished studies are stored."""

import json
import re
import runpy
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from alpacafarm_env.benchmarks.harness.estimates import Estimate
from alpacafarm_env.benchmarks.harness.page import Drawn, Page, read_table
from alpacafarm_env.benchmarks.harness.plots import Curve, Panel, draw
from alpacafarm_env.benchmarks.harness.report import Table, interval_text, markdown_table
from alpacafarm_env.benchmarks.harness.study import Study, write_csv

DOCS = Path(__file__).resolve().parents[2] / "docs" / "studies"
MAKE = runpy.run_path(str(DOCS / "make.py"))
PARTS = ("measured", "findings", "table: gains", "figure: gains")
STORED = sorted(MAKE["PAGES"])


def page(folder):
    """The page of the study `demo`."""
    rows = read_table(folder / "table.csv")
    gain = interval_text(Estimate.of(rows.gain), "%")
    drawing = draw(
        [Panel("n", "gain", [Curve("gain", rows.n[:1].to_numpy(float), rows[["gain"]].to_numpy())])], "Gains"
    )
    table = Table(("measure", "gain"), [("accuracy", gain)], "Level: sandbox.")
    return Page("Gains", {"gains": table}, [f"It gains {gain}."], {"gains": Drawn(drawing, "Gains.")}, f"gain {gain}")


@pytest.fixture(autouse=True)
def demo(monkeypatch):
    """A study `demo` that has a page."""
    monkeypatch.setitem(MAKE["PAGES"], "demo", ("demo", "table.csv"))
    monkeypatch.setitem(sys.modules, "alpacafarm_env.benchmarks.demo", SimpleNamespace(page=page))


def finished(folder, quick=False):
    """A finished study of two seeds, which gain 1 and 3 points."""
    rows = [{"seed": seed, "gain": gain, "n": 10} for seed, gain in enumerate((1.0, 3.0))]
    with Study(folder, "demo", {"raters": "human"}, seeds=[0, 1], quick=quick) as study:
        study.cell("all", lambda: rows)
        study.write_table(rows)
        study.finish()


@pytest.fixture
def docs(tmp_path):
    """Pages without results."""
    tmp_path = tmp_path / "docs"
    tmp_path.mkdir()
    (tmp_path / "index.md").write_text("| <!-- headline: demo -->x<!-- end --> | <!-- headline: other -->y<!-- end -->")
    page = "".join(f"before\n\n<!-- {part} -->\n<!-- end -->\n\nafter\n" for part in PARTS)
    (tmp_path / "demo.md").write_text(page)
    return tmp_path


def test_a_page_is_made_from_a_folder(tmp_path, docs):
    finished(tmp_path / "study")
    assert MAKE["take"](tmp_path / "study", docs) == "demo"
    MAKE["write"]("demo", docs)
    page = (docs / "demo.md").read_text()
    assert "| accuracy | 2.0 [" in page
    assert "2.0 [-10.7, 14.7]" in page  # t(0.975, 1) = 12.7062 times a standard error of 1
    assert page.count("before") == page.count("after") == len(PARTS)
    with Image.open(docs / "demo" / "gains.png") as image:
        assert len(image.getcolors()) > 2
    headline, other = (docs / "index.md").read_text().split("|")[1:]
    assert "[-10.7, 14.7]" in headline
    assert other == " <!-- headline: other -->y<!-- end -->"
    kept = json.loads((docs / "demo" / "manifest.json").read_text())
    assert kept["seeds"] == [0, 1]
    assert str(tmp_path) not in json.dumps(kept)
    MAKE["write"]("demo", docs)
    assert (docs / "demo.md").read_text() == page


@pytest.mark.parametrize("spoil", ["quick", "unfinished", "unknown", "seeds", "cut", "settings", "no cells", "gone"])
def test_only_whole_studies_replace_what_is_stored(tmp_path, docs, spoil):
    finished(tmp_path / "stored")
    MAKE["take"](tmp_path / "stored", docs)
    before = {path: path.read_bytes() for path in (docs / "demo").iterdir()}
    finished(tmp_path / "study", quick=spoil == "quick")
    file, table = (tmp_path / "study" / name for name in ("manifest.json", "table.csv"))
    manifest = json.loads(file.read_text())
    spoilt = {"unfinished": {"complete": False}, "unknown": {"name": "other"}, "seeds": {"seeds": [0, 1, 2]}}
    manifest |= spoilt.get(spoil, {}) | ({"config": {"raters": "sim_eval"}} if spoil == "settings" else {})
    file.write_text(json.dumps(manifest))
    if spoil == "cut":
        table.write_bytes(table.read_bytes()[:-1])
    elif spoil == "gone":
        table.unlink()
    elif spoil == "no cells":
        shutil.rmtree(tmp_path / "study" / "cells")
    with pytest.raises((SystemExit, FileNotFoundError)):
        MAKE["take"](tmp_path / "study", docs)
    assert {path: path.read_bytes() for path in (docs / "demo").iterdir()} == before
    if spoil == "settings":
        MAKE["take"](tmp_path / "study", docs, changed=True)
        assert json.loads((docs / "demo" / "manifest.json").read_text())["config"] == {"raters": "sim_eval"}


@pytest.mark.parametrize(
    ("page", "lost", "instead"),
    [
        ("demo.md", "table: gains", "<!-- table: speed -->"),
        ("demo.md", "table: gains", ""),  # its end alone
        ("demo.md", "measured", "<!-- findings -->"),
        ("index.md", "headline: demo", "<!-- headline: other -->"),
    ],
)
def test_a_page_without_its_parts_is_refused(tmp_path, docs, page, lost, instead):
    finished(tmp_path / "study")
    MAKE["take"](tmp_path / "study", docs)
    (docs / page).write_text((docs / page).read_text().replace(f"<!-- {lost} -->", instead))
    before = {path: path.read_bytes() for path in docs.rglob("*.*")}
    with pytest.raises(SystemExit, match=page):
        MAKE["write"]("demo", docs)
    assert {path: path.read_bytes() for path in docs.rglob("*.*")} == before


NAMES = re.compile(
    r"(?<=[A-Za-z_^])-?\d[\w.]*"  # GPT-4, Davinci003, M1
    r"|\b\d+[kB]\b"  # SFT 10k, LLaMA 7B
    r"|\b(?:19|20)\d\d\b|arXiv \d{4}\.\d{5}"  # sources
    r"|\b(?:[Ff]ig(?:ure)?|[Tt]able|[Ss]ection)s?\.? \d+(?:(?:, | and )\d+)*"  # of a paper
    r"|\b95 % (?:t-)?interval"
)
"""Digits that are no measured number: of names and sources, and the level of every interval."""


def by_hand(text):
    """A page or a template without what code fills in, and without code, addresses and names."""
    text = MAKE["PART"].sub("", text)
    text = re.sub(r"\{#.*?#\}|\{%.*?%\}|\{\{.*?\}\}", "", text, flags=re.DOTALL)
    return NAMES.sub("", re.sub(r"```.*?```|`[^`]*`|\]\([^)]*\)", "", text, flags=re.DOTALL))


PAGES_BY_HAND = [path for path in sorted(DOCS.glob("*.md")) if "<!-- measured -->" in path.read_text(encoding="utf-8")]
PAGES_BY_HAND.append(DOCS / "index.md")
PAGES_BY_HAND += [DOCS.parent / "explanation" / "overoptimization.md"]
TEMPLATES = sorted((DOCS.parents[1] / "benchmarks").rglob("*findings.txt.j2"))


@pytest.mark.parametrize("path", [*PAGES_BY_HAND, *TEMPLATES], ids=lambda path: f"{path.parent.name}/{path.name}")
def test_no_number_on_a_page_is_typed(path):
    typed = [line for line in by_hand(path.read_text(encoding="utf-8")).splitlines() if re.search(r"\d", line)]
    assert typed == []


def test_unknown_values_are_refused_and_others_stay(tmp_path, docs):
    finished(tmp_path / "study")
    MAKE["take"](tmp_path / "study", docs)
    (docs / "demo.md").write_text((docs / "demo.md").read_text() + "by <!-- value: demo.raters --><!-- end -->")
    (docs.parent / "explanation").mkdir()
    other = docs.parent / "explanation" / "x.md"
    other.write_text("<!-- value: demo.raters --><!-- end --> <!-- value: other.num -->3<!-- end -->")
    MAKE["write"]("demo", docs)
    assert "by <!-- value: demo.raters -->human<!-- end -->" in (docs / "demo.md").read_text()
    said = other.read_text()
    assert said == "<!-- value: demo.raters -->human<!-- end --> <!-- value: other.num -->3<!-- end -->"
    other.write_text("<!-- value: demo.nothing --><!-- end -->")
    with pytest.raises(SystemExit, match=r"x\.md"):
        MAKE["write"]("demo", docs)


def test_a_table_is_read_as_it_was_written(tmp_path):
    rows = [{"name": "=1", "n": 0.1 + 0.2, "who": ""}, {"name": "None", "n": None, "who": "x"}]
    table = read_table(write_csv(tmp_path / "table.csv", rows))
    assert table.name.tolist() == ["=1", "None"]
    assert table.n[0] == pytest.approx(0.1 + 0.2, rel=1e-15)
    assert np.isnan(table.n[1])
    assert table.who.tolist() == ["", "x"]


def test_markup_in_a_table_is_shown():
    markdown = pytest.importorskip("markdown")
    cells = ("a_b _c_ *d*", "x | y", "<b>`e`</b> [f](g)", "h\ni")
    text = markdown.markdown(markdown_table(Table(cells, [cells])), extensions=["tables"])
    row = "a_b _c_ *d*</{0}>\n<{0}>x | y</{0}>\n<{0}>&lt;b&gt;`e`&lt;/b&gt; [f](g)</{0}>\n<{0}>h<br>i"
    assert all(row.format(tag) in text for tag in ("th", "td"))


@pytest.mark.parametrize("name", STORED)
def test_a_page_says_what_is_stored(name, tmp_path):
    docs = tmp_path / "docs" / "studies"
    shutil.copytree(DOCS, docs)
    shutil.copytree(DOCS.parent / "explanation", docs.parent / "explanation")
    shutil.copy(DOCS.parents[1] / "README.md", tmp_path)
    shutil.copy(DOCS.parent / "index.md", docs.parent)
    MAKE["write"](name, docs)
    others = (f"../explanation/{page.name}" for page in DOCS.parent.glob("explanation/*.md"))
    for page in ("index.md", f"{name}.md", "../index.md", "../../README.md", *others):
        assert (docs / page).read_bytes() == (DOCS / page).read_bytes(), page
    figures = re.findall(r"\]\((\S+\.png)\)", (DOCS / f"{name}.md").read_text())
    assert {DOCS / figure for figure in figures} >= {*(DOCS / name).glob("*.png")}
    for figure in figures:
        before, after = (Image.open(folder / figure) for folder in (DOCS, docs))
        assert after.convert("RGB").getpixel((0, 0)) == (255, 255, 255)
        if before.text["Software"] != after.text["Software"]:
            pytest.skip("another version of matplotlib places texts differently")
        small = (before.width // 8, before.height // 8)
        one, two = (
            np.asarray(each.convert("L").resize(small, Image.Resampling.BOX), dtype=float) for each in (before, after)
        )
        assert before.size == after.size
        assert np.abs(one - two).mean() < 0.1, figure
