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


@pytest.mark.parametrize("spoil", ["quick", "unfinished", "unknown"])
def test_only_finished_studies_are_taken(tmp_path, docs, spoil):
    ratings(tmp_path / "study", quick=spoil == "quick")
    file = tmp_path / "study" / "manifest.json"
    manifest = json.loads(file.read_text())
    manifest |= {"unfinished": {"complete": False}, "unknown": {"name": "other"}}.get(spoil, {})
    file.write_text(json.dumps(manifest))
    with pytest.raises(SystemExit, match="expected"):
        MAKE["take"](tmp_path / "study", docs)
    assert not (docs / "ratings").exists()


def test_a_part_that_the_study_has_not_is_refused(tmp_path, docs):
    ratings(tmp_path / "study")
    MAKE["take"](tmp_path / "study", docs)
    (docs / "ratings.md").write_text("<!-- table: speed -->\n<!-- end -->\n")
    with pytest.raises(SystemExit, match="table: accuracy"):
        MAKE["write"]("ratings", docs)


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
    """Another version of matplotlib places texts a little differently."""
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
        assert np.abs(np.subtract(before.size, after.size)).max() <= 2
        small = (before.width // 8, before.height // 8)
        one, two = (
            np.asarray(each.convert("L").resize(small, Image.Resampling.BOX), dtype=float) for each in (before, after)
        )
        same = before.text["Software"] == after.text["Software"]
        assert np.abs(one - two).mean() < (0.1 if same else 6), figure
