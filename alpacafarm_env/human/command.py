"""The command `annotate-human`: people say on a local page which of two outputs is better, or how good one is."""

from __future__ import annotations

import os
import sys
import webbrowser
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import tyro

from ..cli.commands import ServerOptions
from ..cli.options import Port, Report, Seed
from ..errors import DataError, did_you_mean

if TYPE_CHECKING:
    from .page import PageServer
    from .session import Session
    from .store import Store

PORT: Final = 8017
"""The same in every run, so that a page that was open finds the server again."""
GUIDELINE: Final = Path(__file__).parent / "templates" / "guideline.txt"
GUIDELINE_RATING: Final = Path(__file__).parent / "templates" / "guideline_rating.txt"


@dataclass(frozen=True, kw_only=True)
class AnnotateHuman(ServerOptions):
    """People's labels, from a page on this machine."""

    pairs: tyro.conf.Positional[Path]
    """JSON or JSON Lines: instruction, input (optional), output_1, output_2, and a judge's preference (optional); or
    output, to be rated from 1 to 7, and a judge's rating (optional)."""
    out: Path
    """Where the labels go, as records with preference (1, 2), raw_preference (1 to 4), annotator ...; or with rating (1
    to 7), critique, annotator ..."""
    qualification: Path | None = None
    """Pairs with the right preference, to be judged first; who agrees in less than 70 % is kept out. Or single outputs
    with the right rating: who is within a point of it agrees."""
    guideline: Path | None = None
    """A text for annotators, instead of our own."""
    seed: Seed | None = None
    """Seeds the orders of pairs and outputs. Default: 0, then as it began."""
    export: bool = False
    """Write --out from what is stored, and serve no page."""
    without: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """Leave an annotator out of --out; may be given several times."""
    port: Port = PORT
    """Where to listen; 0 for any free port."""
    no_browser: bool = False
    """Only print the address."""

    def run(self) -> Report:
        """Serves the page until Ctrl-C, and writes the labels.

        Raises:
            AlpacaFarmError: A file, an option or the address; starlette and uvicorn are missing.
        """
        return annotate_human(self)


def annotate_human(options: AnnotateHuman) -> Report:
    """Serves the page until Ctrl-C, and writes the labels.

    Raises:
        AlpacaFarmError: A file, an option or the address; starlette and uvicorn are missing.
    """
    from ..cli.annotation_files import check_out
    from .labels import check_kept, skipped_path, summary, write_labels
    from .session import Session
    from .store import Store
    from .tasks import SINGLES, SKIPPED, load_tasks, read_form

    form = read_form(options.pairs)
    sources = [path for path in (options.pairs, options.qualification, options.guideline) if path]
    check_out(options.out, sources, form.added)
    check_out(skipped_path(options.out), sources, SKIPPED)
    tasks = load_tasks(options.pairs, form)
    qualification = load_tasks(options.qualification, form, key=True) if options.qualification else []
    guideline = _read_text(options.guideline or (GUIDELINE_RATING if form is SINGLES else GUIDELINE))
    if not tasks:
        raise DataError(f"{options.pairs}: expected pairs of different outputs, got only identical ones.")
    check_kept(options.out, database(options.out))
    with Store(database(options.out), seed=options.seed) as store:
        session = Session(store, tasks, qualification)
        without = [_annotator(store, name) for name in options.without]
        write_labels(options.out, store.all(), without=without)
        if not options.export:
            _serve(session, guideline, options)
        stored = store.all()
        written = write_labels(options.out, stored, without=without)
        lines = summary(stored, qualification, without=without)
        lines += [*(f"written: {path}" for path in written), f"database: {store.path}"]
    return Report("\n".join(lines))


def database(out: Path) -> Path:
    """Where the answers to the labels `out` are: labels.sqlite beside labels.json."""
    from ..data.files import stem_of

    return out.with_name(f"{stem_of(out)}.sqlite")


def _annotator(store: Store, name: str) -> str:
    if (spelling := store.spelling(name)) not in (names := store.names()):
        raise did_you_mean("annotator", name, names)
    return spelling


def _serve(session: Session, guideline: str, options: AnnotateHuman) -> None:
    from ..judge_server.http import serve

    def start() -> PageServer:
        from .page import PageServer

        server = PageServer(session, guideline, **options.where)
        if not options.no_browser and _has_display():
            webbrowser.open(server.url)
        return server

    serve(start, host=options.host, port=options.port)


def _has_display() -> bool:
    """Whether a browser can open a window; one of the terminal would take that from the command."""
    return sys.platform in ("darwin", "win32") or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: expected a text in UTF-8, got {error}.") from error
