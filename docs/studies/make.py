"""Rewrites the generated parts of the studies' pages from the tables that are stored beside them.

    python docs/studies/make.py [NAME ...] [--from FOLDER]

A study's stored files lie in docs/studies/NAME: its tables and what its manifest says of how they were made. `--from
results/NAME` takes them from the folder of a finished study first. In docs/studies/NAME.md the text between such a
comment and `<!-- end -->` is replaced:

    <!-- table: TABLE -->, <!-- figure: FIGURE -->, <!-- findings -->, <!-- measured -->

and in docs/studies/index.md, within a line, <!-- headline: NAME -->. What they show is the study's `page(folder)`.
A figure that README.md shows lies in docs, and is filled in there too.
"""

import argparse
import io
import json
import math
import re
import shutil
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path

import matplotlib as mpl
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from alpacafarm_env.benchmarks.harness.page import Drawn, Page, read_manifest
from alpacafarm_env.benchmarks.harness.plots import png
from alpacafarm_env.benchmarks.harness.report import markdown_table, markdown_text

HERE = Path(__file__).parent
PAGES = {
    "annotators": ("annotators.command", "table.csv"),
    "leaderboard": ("leaderboard", "table.csv"),
    "method_ranking": ("method_ranking.command", "table.csv"),
    "overoptimization": ("overoptimization.page", "table.csv"),
    "protocol": ("protocol.command", "table.csv"),
    "ratings": ("ratings.command", "table.csv"),
    "reward_model_accuracy": ("reward_model_accuracy.command", "table.csv"),
    "recorded_surrogate": ("recorded_surrogate.command", "table.csv", "best_of_n.csv"),
    "self_rewarding": ("self_rewarding.command", "table.csv"),
    "win_rate_curve": ("win_rate_curve.report", "table.csv", "val.csv"),
}
"""Study -> the module of its function `page`, within alpacafarm_env.benchmarks, and the tables that this reads."""
PART = re.compile(r"(<!-- (table|figure|findings|measured|headline)(?:: ([\w-]+))? -->)(.*?)(<!-- end -->)", re.DOTALL)
KEPT = ("name", "quick", "config", "seeds", "facts", "versions")
"""Of a manifest."""
SHOWN_BY_README = ("overoptimization",)
"""Figures that lie in docs/ itself."""
DPI = 110
NUM_COLORS = 96
APART = 10
"""Distance from which on colors count as two, of 0 to 255 for each of red, green and blue."""


def page_of(name: str, docs: Path) -> Page:
    """What a study says of the files stored in `docs`/NAME."""
    page: Callable[[Path], Page] = import_module(f"alpacafarm_env.benchmarks.{PAGES[name][0]}").page
    return page(docs / name)


def take(folder: Path, docs: Path) -> str:
    """Copies the tables of a finished study, and its manifest without cells, and returns the study's name.

    Raises:
        SystemExit: It is not finished, or smaller than the study is.
    """
    manifest = read_manifest(folder)
    name = manifest["name"]
    if name not in PAGES:
        sys.exit(f"{folder}: expected one of the studies {', '.join(PAGES)}, got {name!r}.")
    if manifest["complete"] is not True or manifest.get("quick") is not False:
        sys.exit(f"{folder}: expected a study that was finished without --quick. Run its command to the end.")
    (docs / name).mkdir(exist_ok=True)
    for table in PAGES[name][1:]:
        shutil.copyfile(folder / table, docs / name / table)
    day = datetime.fromtimestamp(max(file.stat().st_mtime for file in folder.glob("cells/*.json")), UTC)
    kept = {key: manifest[key] for key in KEPT} | {"date": day.date().isoformat()}
    del kept["versions"]["platform"]  # says more of a machine than of its numbers
    kept["facts"].pop("findings", None)  # which the page makes
    (docs / name / "manifest.json").write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    return name


def write(name: str, docs: Path) -> None:
    """Rewrites a study's page, its figures and its line in index.md."""
    page = page_of(name, docs)
    parts = {f"headline: {name}": markdown_text(page.headline)}
    fill(docs / "index.md", parts, ("headline",))
    parts["measured"] = measured(docs / name)
    parts["findings"] = "".join(f"- {markdown_text(finding)}\n" for finding in page.findings)
    for key, table in page.tables.items():
        parts[f"table: {key}"] = f"\n{markdown_table(table)}\n\n{markdown_text(table.caption)}\n"
    for key, drawn in page.figures.items():
        parts[f"figure: {key}"] = f"\n![{markdown_text(drawn.caption)}]({place_of(name, key)})\n"
    for key in fill(docs / f"{name}.md", parts):
        if key.startswith("figure: "):
            file = key.removeprefix("figure: ")
            (docs / place_of(name, file)).write_bytes(small_png(page.figures[file]))
    for file in page.figures.keys() & set(SHOWN_BY_README):
        image = f"![{markdown_text(page.figures[file].caption)}](docs/{file}.png)"
        fill(docs.parent.parent / "README.md", {f"figure: {file}": image})


def place_of(name: str, figure: str) -> str:
    """Where a study's figure lies, from `docs`."""
    return f"../{figure}.png" if figure in SHOWN_BY_README else f"{name}/{figure}.png"


def fill(path: Path, parts: dict[str, str], others: tuple[str, ...] = ()) -> list[str]:
    """Replaces the parts that a page has, and returns their names; SystemExit for a part that there is not.

    `others`: kinds of parts that belong to other studies too.
    """
    found: list[str] = []

    def replaced(match: re.Match[str]) -> str:
        start, kind, name, _, end = match.groups()
        key = f"{kind}: {name}" if name else kind
        if key not in parts:
            if kind in others:
                return match[0]
            sys.exit(f"{path}: expected one of the parts {', '.join(parts)}, got {key!r}.")
        found.append(key)
        text = parts[key] if kind == "headline" else f"\n{parts[key].rstrip()}\n"
        return f"{start}{text}{end}"

    path.write_text(PART.sub(replaced, path.read_text(encoding="utf-8")), encoding="utf-8")
    return found


def measured(folder: Path) -> str:
    """When and with what the tables were made."""
    manifest = read_manifest(folder)
    versions = manifest["versions"]
    which = ", ".join(f"{name} {versions[name]}" for name in ("alpacafarm-env", "torch", "numpy"))
    tables = ", ".join(f"[{file.name}]({folder.name}/{file.name})" for file in sorted(folder.glob("*.csv")))
    return f"Measured on {manifest['date']}, seeds: {len(manifest['seeds'])}, with {which}. Every number: {tables}."


def small_png(drawn: Drawn) -> bytes:
    """The figure for a page: smaller, of the colors that the drawing has most of, and with what has drawn it."""
    image, buffer = Image.open(io.BytesIO(png(drawn.drawing))).convert("RGB"), io.BytesIO()
    colors: list[tuple[int, ...]] = []
    for _, color in sorted(image.getcolors(image.width * image.height) or (), reverse=True):
        if len(colors) < NUM_COLORS and all(math.dist(color, other) > APART for other in colors):
            colors.append(color)
    palette = Image.new("P", (1, 1))
    palette.putpalette([part for color in colors for part in color])
    scale = min(1.0, DPI / drawn.drawing.dpi)
    image = image.resize((round(image.width * scale), round(image.height * scale)), Image.Resampling.LANCZOS)
    drawn_by = PngInfo()
    drawn_by.add_text("Software", f"matplotlib {mpl.__version__}")
    quantized = image.quantize(palette=palette, dither=Image.Dither.NONE)
    quantized.save(buffer, "PNG", optimize=True, pnginfo=drawn_by)
    return buffer.getvalue()


def main() -> None:
    """Takes stored files, if asked, and rewrites the pages that are named, or all that have stored files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(PAGES))
    parser.add_argument("--from", dest="folder", type=Path, help="the folder of a finished study")
    options = parser.parse_args()
    if unknown := set(options.names) - set(PAGES):
        parser.error(f"expected studies of {', '.join(PAGES)}, got {', '.join(sorted(unknown))}")
    names = options.names or [name for name in PAGES if (HERE / name).is_dir()]
    if options.folder:
        names = [take(options.folder, HERE)]
    for name in names:
        write(name, HERE)


if __name__ == "__main__":
    main()
