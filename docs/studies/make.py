"""Rewrites the generated parts of the studies' pages from the tables that are stored beside them.

    python docs/studies/make.py [NAME ...]
    python docs/studies/make.py --from FOLDER [--changed]

A study's stored files lie in docs/studies/NAME: its tables and what its manifest says of how they were made. `--from
results/NAME` takes them from the folder of a finished study first. It must have the settings of the stored one, unless
`--changed` says that they are meant to be others. In docs/studies/NAME.md the text between such a comment and
`<!-- end -->` is replaced:

    <!-- table: TABLE -->, <!-- figure: FIGURE -->, <!-- findings -->, <!-- measured -->

and in docs/studies/index.md, within a line, <!-- headline: NAME -->. What they show is the study's `page(folder)`.
README.md, docs/index.md, docs/explanation and other studies' pages may show <!-- figure: NAME.FIGURE --> of a page that
shows it too and, within a line, <!-- value: NAME.KEY -->: one of the page's values, or a setting of the manifest.
Everything else on the studies' pages is written by hand, and no number is (a test).
A page of a study that is no command any more keeps what stands in its parts, and any page what stands behind
<!-- kept -->: an earlier version has measured it.
"""

import argparse
import io
import json
import math
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory

import matplotlib as mpl
import numpy as np
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from alpacafarm_env.benchmarks.harness.page import Drawn, Page, read_manifest, read_table, settings
from alpacafarm_env.benchmarks.harness.plots import png
from alpacafarm_env.benchmarks.harness.report import markdown_table, markdown_text, seeds_text
from alpacafarm_env.benchmarks.harness.stored import MANIFEST, differences
from alpacafarm_env.errors import AlpacaFarmError

HERE = Path(__file__).parent
PAGES = {
    "annotators": ("annotators.__main__", "table.csv"),
    "gold_axis": ("gold_axis.page", "table.csv", "curves.csv", "claims.csv"),
    "leaderboard": ("leaderboard", "table.csv"),
    "method_ranking": ("method_ranking.page", "table.csv"),
    "monitors": ("monitors.page", "table.csv", "detectors.csv", "groups.csv", "real.csv"),
    "noise": ("noise.page", "table.csv", "curves.csv", "claims.csv", "fits.csv", "dials.csv", "methods.csv"),
    "overoptimization": ("overoptimization.page", "table.csv", "reward_models.csv"),
    "protocol": ("protocol.__main__", "table.csv"),
    "real_policy": (
        *("real_policy.page", "table.csv", "falls.csv", "slopes.csv", "golds.csv", "runs.csv", "texts.csv"),
        "times.csv",
    ),
    "recorded_noise": ("recorded_noise.page", "table.csv", "curves.csv", "claims.csv", "accuracy.csv"),
    "reward_model_accuracy": ("reward_model_accuracy", "table.csv"),
    "win_rate_curve": ("win_rate_curve.page", "table.csv", "val.csv"),
}
"""Study -> the module of its function `page`, within alpacafarm_env.benchmarks, and the tables that this reads."""
START = re.compile(r"<!-- (table|figure|findings|measured|headline|value|kept)(?:: ([\w.-]+))? -->")
END = "<!-- end -->"
PART = re.compile(f"({START.pattern})(.*?)({END})", re.DOTALL)
INLINE = ("headline", "value")
"""Parts within a line."""
KEPT = ("name", "quick", "config", "seeds", "facts", "versions")
"""Parts of a manifest that are stored."""
DPI = 110
NUM_COLORS = 96
APART = 8
"""Distance from which on colors count as two, of 0 to 255 for each of red, green and blue."""


def page_of(name: str, docs: Path) -> Page:
    """The page of a study, of the files stored in `docs`/NAME."""
    page: Callable[[Path], Page] = import_module(f"alpacafarm_env.benchmarks.{PAGES[name][0]}").page
    return page(docs / name)


def take(folder: Path, docs: Path, *, changed: bool = False) -> str:
    """Copies the tables of a finished study, and its manifest without cells, and returns the study's name.

    What is stored stays as it is until the page was made of all that is new.

    Args:
        folder: Of the study.
        docs: Where the studies' pages lie.
        changed: Take one of other settings than the stored study's.

    Raises:
        SystemExit: It is not finished, smaller than the study is, of other settings, or without all of its table.
    """
    manifest = read_manifest(folder)
    name = manifest["name"]
    if name not in PAGES:
        sys.exit(f"{folder}: expected one of the studies {', '.join(PAGES)}, got {name!r}.")
    told = manifest["facts"].get("missing")  # a study in parts says on its page what is not done
    if not (manifest["complete"] is True or told) or manifest.get("quick") is not False:
        sys.exit(f"{folder}: expected a study that was finished without --quick. Run its command to the end.")
    stored = read_manifest(docs / name)["config"] if (docs / name / MANIFEST).exists() and not changed else {}
    if stored and (others := differences(stored, manifest["config"])):
        sys.exit(f"{folder}: expected the stored study's settings, but {'; '.join(others)}. To take it: --changed.")
    cells = [*folder.glob("cells/*.json")]
    if not cells:
        sys.exit(f"{folder}: expected the study's cells, which say when it was measured; found no cells/*.json.")
    day = datetime.fromtimestamp(max(file.stat().st_mtime for file in cells), UTC)
    kept = {key: manifest[key] for key in KEPT} | {"date": day.date().isoformat()}
    kept["versions"].pop("platform", None)  # says more of a machine than of its numbers
    kept["facts"].pop("findings", None)  # which the page makes
    with TemporaryDirectory() as made:
        (new := Path(made) / name).mkdir()
        (new / MANIFEST).write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
        for table in PAGES[name][1:]:
            refuse_cut(folder / table, manifest["seeds"])
            shutil.copyfile(folder / table, new / table)
        page_of(name, Path(made))
        shutil.copytree(new, docs / name, dirs_exist_ok=True)
    return name


def refuse_cut(path: Path, seeds: Sequence[int]) -> None:
    """Refuses a table that ends in the middle of a line, or has other seeds than these; SystemExit."""
    if not path.read_bytes().endswith(b"\n"):
        sys.exit(
            f"{path}: expected a whole table, got one whose last line does not end. Run the study's command again."
        )
    table = read_table(path)
    if "seed" in table and len(table) and {*table.seed} != {*seeds}:
        found = ", ".join(map(str, sorted({*table.seed})))
        sys.exit(f"{path}: expected the manifest's seeds {', '.join(map(str, seeds))}, got {found}.")


def write(name: str, docs: Path) -> None:
    """Rewrites a study's page, its figures and its line in index.md; SystemExit, before any, if a page lacks a part."""
    page = page_of(name, docs)
    headline = {f"headline: {name}": markdown_text(page.headline)}
    known = settings(read_manifest(docs / name)["config"]) | page.values
    values = {f"value: {name}.{key}": markdown_text(value) for key, value in known.items()}
    parts = {"measured": measured(docs / name), **values}
    parts["findings"] = "".join(f"- {markdown_text(finding)}\n" for finding in page.findings)
    for key, table in page.tables.items():
        parts[f"table: {key}"] = f"\n{markdown_table(table)}\n\n{markdown_text(table.caption)}\n"
    for key in page.figures:
        parts[f"figure: {key}"] = image(page, key, f"{name}/{key}.png")
    text, found = filled(docs / f"{name}.md", name, parts, needed=("measured", "findings"))
    texts = {docs / f"{name}.md": text}
    texts[docs / "index.md"], _ = filled(docs / "index.md", name, headline | values, needed=headline)
    top = docs.parent
    others = [*top.parent.glob("README.md"), *top.glob("*.md"), *top.glob("explanation/*.md"), *docs.glob("*.md")]
    for other in (each for each in others if each not in texts):
        if re.search(f"<!-- (value|figure): {name}\\.", other.read_text(encoding="utf-8")):
            way = os.path.relpath(docs, other.parent)
            figures = {f"figure: {name}.{key}": image(page, key, f"{way}/{name}/{key}.png") for key in page.figures}
            texts[other], _ = filled(other, name, figures | values, needed=())
    images = {f"{name}/{key}.png": small_png(page.figures[key]) for key in page.figures if f"figure: {key}" in found}
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8")
    for place, data in images.items():
        (docs / place).write_bytes(data)


def image(page: Page, figure: str, place: str) -> str:
    """A figure of a page, which lies at `place`."""
    return f"\n![{markdown_text(page.figures[figure].caption)}]({place})\n"


def filled(path: Path, study: str, parts: Mapping[str, str], *, needed: Iterable[str]) -> tuple[str, list[str]]:
    """The text of a page with its parts replaced, and which it has.

    Args:
        path: Of the page.
        study: Whose parts are replaced; those of other studies stay.
        parts: What there is to show; a page need not have all.
        needed: Parts that it must have.

    Raises:
        SystemExit: The page has a part that there is not, lacks a needed one, or a comment without its other end.
    """
    found: list[str] = []

    def replaced(match: re.Match[str]) -> str:
        start, kind, name, _, end = match.groups()
        key = f"{kind}: {name}" if name else kind
        if kind == "kept":
            return match[0]
        if key not in parts:
            owner = name.partition(".")[0] if kind in INLINE or "." in (name or "") else path.stem
            if owner != study:
                return match[0]
            sys.exit(f"{path}: expected one of the parts {', '.join(parts)}, got {key!r}.")
        found.append(key)
        text = parts[key] if kind in INLINE else f"\n{parts[key].rstrip()}\n"
        return f"{start}{text}{end}"

    text = path.read_text(encoding="utf-8")
    if not len(PART.findall(text)) == len(START.findall(text)) == text.count(END):
        sys.exit(
            f"{path}: expected {END} after each comment that begins a part, and nowhere else. Put back what is lost."
        )
    text = PART.sub(replaced, text)
    if missing := [key for key in needed if key not in found]:
        sys.exit(f"{path}: expected the comment <!-- {missing[0]} --> and, after the text to replace, {END}; add them.")
    return text, found


def measured(folder: Path) -> str:
    """When and with what the tables were made."""
    manifest = read_manifest(folder)
    versions = manifest["versions"]
    which = ", ".join(f"{name} {versions[name]}" for name in ("alpacafarm-env", "torch", "numpy"))
    files = [file for file in sorted(folder.glob("*.csv")) if len(read_table(file))]
    tables = ", ".join(f"[{file.name}]({folder.name}/{file.name})" for file in files)
    table = read_table(folder / "table.csv")
    untrained = {"ppo", "dpo"} <= {*manifest["facts"].get("missing", ())}  # the seeds are those of runs
    groups = [table[name] for name in ("treatment", "method") if "seed" in table and name in table]
    counts = table.groupby(groups).seed.nunique() if groups else [0 if untrained else len(manifest["seeds"])]
    seeds = f", {seeds_text(counts)}" if max(counts) > 1 else ""
    return f"Measured on {manifest['date']}{seeds}, with {which}. Every number: {tables}."


def small_png(drawn: Drawn) -> bytes:
    """The figure for a page: smaller, of the colors that the drawing has most of, and with what has drawn it."""
    image, buffer = Image.open(io.BytesIO(png(drawn.drawing))).convert("RGB"), io.BytesIO()
    colors: list[tuple[int, ...]] = []
    for _, color in sorted(image.getcolors(image.width * image.height) or (), reverse=True):
        if len(colors) < NUM_COLORS and all(math.dist(color, other) > APART for other in colors):
            colors.append(color)
    scale = min(1.0, DPI / drawn.drawing.dpi)
    image = image.resize((round(image.width * scale), round(image.height * scale)), Image.Resampling.LANCZOS)
    # Image.quantize takes not the nearest color, but one of those near it: white turned blue.
    pixels, places = np.unique(np.asarray(image, np.int32).reshape(-1, 3), axis=0, return_inverse=True)
    nearest = ((pixels[:, None] - np.array(colors)) ** 2).sum(axis=2).argmin(axis=1)
    indexed = Image.fromarray(nearest[places].reshape(image.height, image.width).astype(np.uint8)).convert("P")
    indexed.putpalette([part for color in colors for part in color])
    drawn_by = PngInfo()
    drawn_by.add_text("Software", f"matplotlib {mpl.__version__}")
    indexed.save(buffer, "PNG", optimize=True, pnginfo=drawn_by)
    return buffer.getvalue()


def main() -> None:
    """Takes stored files, if asked, and rewrites the pages that are named, or all that have stored files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(PAGES))
    parser.add_argument("--from", dest="folder", type=Path, help="the folder of a finished study")
    parser.add_argument("--changed", action="store_true", help="take a study of other settings than the stored one's")
    options = parser.parse_args()
    if unknown := set(options.names) - set(PAGES):
        parser.error(f"expected studies of {', '.join(PAGES)}, got {', '.join(sorted(unknown))}")
    if options.names and options.folder:
        parser.error("expected either names or --from, whose folder says which study it is; got both")
    if options.changed and not options.folder:
        parser.error("--changed: expected --from FOLDER beside it")
    try:
        names = options.names or [name for name in PAGES if (HERE / name).is_dir()]
        if options.folder:
            names = [take(options.folder, HERE, changed=options.changed)]
        for name in names:
            write(name, HERE)
    except (AlpacaFarmError, OSError, ValueError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
