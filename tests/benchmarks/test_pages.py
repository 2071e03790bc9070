"""The studies' pages: what is stored beside them says what they say, and only finished studies are stored."""

import json
import re
import runpy
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from alpacafarm_env.benchmarks.harness.page import read_table
from alpacafarm_env.benchmarks.harness.report import Table, markdown_table
from alpacafarm_env.benchmarks.harness.study import Study, write_csv
from alpacafarm_env.benchmarks.ratings.command import COLUMNS, DATA

DOCS = Path(__file__).resolve().parents[2] / "docs" / "studies"
MAKE = runpy.run_path(str(DOCS / "make.py"))
PARTS = ("measured", "findings", "table: accuracy", "figure: accuracy")
STORED = sorted(name for name in MAKE["PAGES"] if (DOCS / name).is_dir())


def ratings(folder, quick=False):
    """A finished study of two seeds in which ratings are ahead of their pairs by 1 and 3 points."""
    right = {"ratings": (81, 83), "binarized": (80, 80), "choices": (70, 90)}
    rows = [
        dict(zip(COLUMNS, (seed, data, 100, right[data][seed] / 100, 0.5, 0.9, 100, right[data][seed]), strict=True))
        for seed in (0, 1)
        for data in DATA
    ]
    with Study(folder, "ratings", {"raters": "human"}, seeds=[0, 1], quick=quick) as study:
        study.cell("all", lambda: rows)
        study.write_table(rows)
        study.finish()


@pytest.fixture
def docs(tmp_path):
    """Pages without results."""
    tmp_path = tmp_path / "docs"
    tmp_path.mkdir()
    (tmp_path / "index.md").write_text(
        "| <!-- headline: ratings -->x<!-- end --> | <!-- headline: other -->y<!-- end -->"
    )
    page = "".join(f"before\n\n<!-- {part} -->\n<!-- end -->\n\nafter\n" for part in PARTS)
    (tmp_path / "ratings.md").write_text(page)
    return tmp_path


def test_a_page_is_made_from_the_folder_of_a_study(tmp_path, docs):
    ratings(tmp_path / "study")
    assert MAKE["take"](tmp_path / "study", docs) == "ratings"
    MAKE["write"]("ratings", docs)
    page = (docs / "ratings.md").read_text()
    assert "| ratings | 100 | 82.0 [" in page
    assert "2.0 [-10.7, 14.7]" in page  # t(0.975, 1) = 12.7062 times a standard error of 1
    assert page.count("before") == page.count("after") == len(PARTS)
    with Image.open(docs / "ratings" / "accuracy.png") as image:
        assert len(image.getcolors()) > 2
    headline, other = (docs / "index.md").read_text().split("|")[1:]
    assert "[-10.7, 14.7]" in headline
    assert other == " <!-- headline: other -->y<!-- end -->"
    kept = json.loads((docs / "ratings" / "manifest.json").read_text())
    assert kept["seeds"] == [0, 1]
    assert str(tmp_path) not in json.dumps(kept)
    MAKE["write"]("ratings", docs)
    assert (docs / "ratings.md").read_text() == page


@pytest.mark.parametrize("spoil", ["quick", "unfinished", "unknown", "seeds", "cut", "settings", "no cells", "gone"])
def test_only_whole_studies_are_taken_and_else_what_is_stored_stays(tmp_path, docs, spoil):
    ratings(tmp_path / "stored")
    MAKE["take"](tmp_path / "stored", docs)
    before = {path: path.read_bytes() for path in (docs / "ratings").iterdir()}
    ratings(tmp_path / "study", quick=spoil == "quick")
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
    assert {path: path.read_bytes() for path in (docs / "ratings").iterdir()} == before
    if spoil == "settings":
        MAKE["take"](tmp_path / "study", docs, changed=True)
        assert json.loads((docs / "ratings" / "manifest.json").read_text())["config"] == {"raters": "sim_eval"}


@pytest.mark.parametrize(
    ("page", "lost", "instead"),
    [
        ("ratings.md", "table: accuracy", "<!-- table: speed -->"),
        ("ratings.md", "table: accuracy", ""),  # its end alone
        ("ratings.md", "measured", "<!-- findings -->"),
        ("index.md", "headline: ratings", "<!-- headline: other -->"),
    ],
)
def test_a_page_without_its_parts_is_refused_before_anything_is_written(tmp_path, docs, page, lost, instead):
    ratings(tmp_path / "study")
    MAKE["take"](tmp_path / "study", docs)
    (docs / page).write_text((docs / page).read_text().replace(f"<!-- {lost} -->", instead))
    before = {path: path.read_bytes() for path in docs.rglob("*.*")}
    with pytest.raises(SystemExit, match=page):
        MAKE["write"]("ratings", docs)
    assert {path: path.read_bytes() for path in docs.rglob("*.*")} == before


@pytest.mark.parametrize("name", sorted(MAKE["PAGES"]))
def test_every_study_has_a_page_to_fill(name):
    page, index = (DOCS / f"{name}.md").read_text(), (DOCS / "index.md").read_text()
    assert {"measured", "findings"} <= {match[1] for match in MAKE["PART"].findall(page)}
    assert name in [match[2] for match in MAKE["PART"].findall(index)]


def test_a_table_is_read_as_it_was_written(tmp_path):
    rows = [{"name": "=1", "n": 0.1 + 0.2, "who": ""}, {"name": "None", "n": None, "who": "x"}]
    table = read_table(write_csv(tmp_path / "table.csv", rows))
    assert table.name.tolist() == ["=1", "None"]
    assert table.n[0] == pytest.approx(0.1 + 0.2, rel=1e-15)
    assert np.isnan(table.n[1])
    assert table.who.tolist() == ["", "x"]


def test_markup_in_a_table_is_shown_as_it_is():
    markdown = pytest.importorskip("markdown")
    cells = ("a_b _c_ *d*", "x | y", "<b>`e`</b> [f](g)", "h\ni")
    text = markdown.markdown(markdown_table(Table(cells, [cells])), extensions=["tables"])
    row = "a_b _c_ *d*</{0}>\n<{0}>x | y</{0}>\n<{0}>&lt;b&gt;`e`&lt;/b&gt; [f](g)</{0}>\n<{0}>h<br>i"
    assert all(row.format(tag) in text for tag in ("th", "td"))


@pytest.mark.parametrize("name", STORED)
def test_a_page_says_what_is_stored(name, tmp_path):
    docs = tmp_path / "docs" / "studies"
    shutil.copytree(DOCS, docs)
    shutil.copy(DOCS.parents[1] / "README.md", tmp_path)
    MAKE["write"](name, docs)
    for page in ("index.md", f"{name}.md", "../../README.md"):
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
