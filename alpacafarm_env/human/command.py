"""The command `annotate-human`: people say on a local page which of two outputs is better, or how good one is."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import tyro

from ..cli.commands import ServerOptions
from ..cli.options import Port, Report
from ..errors import DataError

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
    export: bool = False
    """Write --out from what is stored, and serve no page."""
    port: Port = PORT
    """Where to listen; 0 for any free port."""

    def run(self) -> Report:
        """Serves the page until Ctrl-C, and writes the labels.

        Raises:
            AlpacaFarmError: A file, an option or the address; starlette and uvicorn are missing.
        """
        from ..cli.annotations import check_out
        from .labels import check_kept, skipped_path, summary, write_labels
        from .session import Session
        from .store import Store
        from .tasks import SINGLES, SKIPPED, load_tasks, read_form

        form = read_form(self.pairs)
        sources = [path for path in (self.pairs, self.qualification, self.guideline) if path]
        check_out(self.out, sources, form.added)
        check_out(skipped_path(self.out), sources, SKIPPED)
        tasks = load_tasks(self.pairs, form)
        qualification = load_tasks(self.qualification, form, key=True) if self.qualification else []
        guideline = _read_text(self.guideline or (GUIDELINE_RATING if form is SINGLES else GUIDELINE))
        if not tasks:
            raise DataError(f"{self.pairs}: expected pairs of different outputs, got only identical ones.")
        check_kept(self.out, database(self.out))
        with Store(database(self.out)) as store:
            session = Session(store, tasks, qualification)
            write_labels(self.out, store.all())
            if not self.export:
                from ..judge_server.http import serve
                from .page import PageServer

                serve(lambda: PageServer(session, guideline, **self.where), host=self.host, port=self.port)
            stored = store.all()
            written = write_labels(self.out, stored)
            lines = summary(stored, qualification)
            lines += [*(f"written: {path}" for path in written), f"database: {store.path}"]
        return Report("\n".join(lines))


def database(out: Path) -> Path:
    """Where the answers to the labels `out` are: labels.sqlite beside labels.json."""
    from ..data.files import stem_of

    return out.with_name(f"{stem_of(out)}.sqlite")


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: expected a text in UTF-8, got {error}.") from error
