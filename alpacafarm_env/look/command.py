"""The command `look`: one HTML page about runs, with their numbers and texts inside."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import tyro

from ..cli.options import Options, Positive, Report
from ..data.files import check_folder, write_atomic
from ..errors import DataError
from .runs import PANELS, Run, find_runs, read_runs

TEMPLATES: Final = Path(__file__).parent / "templates"
MARK: Final = '<meta name="generator" content="alpacafarm look">'
"""By this a page is known as ours, which may be written over."""
NAMED: Final = 3
"""Runs that the terminal names of those with the same note; the page names ten times as many."""


@dataclass(frozen=True, kw_only=True)
class Look(Options):
    """A page about runs."""

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Folders of runs, or folders that contain some: what agents, train and studies write, and TRL's GRPOTrainer."""
    out: Path = Path("look.html")
    """The page. One that this command wrote is written over."""
    texts_mb: Positive = 20.0
    """Megabytes of texts at most, in equal shares; where there are more, each 2nd, 4th ... step is kept."""

    def run(self) -> Report:
        """Writes the page, and says what it shows and lacks.

        Raises:
            DataError: There is no folder, one has no run, or the page would replace a file of another kind.
        """
        if not self.runs:
            raise DataError("Expected folders of runs: alpacafarm look RUN...; got none.")
        _check_out(self.out)
        runs = read_runs(find_runs(self.runs), most_bytes=self.texts_mb * 1e6)
        page = render(runs)
        write_atomic(self.out, page)
        size = f"{self.out}, {len(page.encode()) / 1e6:.1f} MB"
        return Report("\n".join([f"written: {size}: {summary(runs)}", *notes_of(runs, NAMED)]))


def _check_out(path: Path) -> None:
    check_folder(path.parent)
    if path.is_dir():
        raise DataError(f"--out: expected a file to write, got the folder {path}.")
    if path.exists() and MARK.encode() not in path.read_bytes()[:1000]:
        raise DataError(f"--out: expected a new file or a page of this command, got {path}. Choose another name.")
    path.parent.mkdir(parents=True, exist_ok=True)


def summary(runs: Sequence[Run]) -> str:
    """How much there is of runs."""
    texts = sum(len(rows) for run in runs for rows in run.texts.values())
    return f"runs: {len(runs)}, steps: {sum(len(run.steps) for run in runs)}, texts: {texts}"


def notes_of(runs: Sequence[Run], most: int) -> list[str]:
    """What is missing or left out, a line a note with the runs that it is about, `most` of them by name."""
    about: dict[str, list[str]] = {}
    for run in runs:
        for note in run.notes:
            about.setdefault(note, []).append(run.name)
    more = {note: f" and {len(names) - most} more" if len(names) > most else "" for note, names in about.items()}
    return [f"{note}: {', '.join(names[:most])}{more[note]}" for note, names in about.items()]


def render(runs: Sequence[Run]) -> str:
    """The page: texts are data for its script, which never makes HTML of them."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(loader=FileSystemLoader(TEMPLATES), autoescape=True, undefined=StrictUndefined)
    # ASCII, of which Jinja's tojson escapes <, >, & and quotes besides.
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    script = (TEMPLATES / "page.js").read_text(encoding="utf-8")
    panels = [{"title": title, "unit": unit} for title, unit, _ in PANELS]
    return environment.get_template("page.html.j2").render(
        mark=MARK,
        style=(TEMPLATES / "page.css").read_text(encoding="utf-8"),
        script=script,
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        data={"panels": panels, "runs": [asdict(run) for run in runs]},
        summary=summary(runs),
        notes=notes_of(runs, 10 * NAMED),
    )
