"""The database of what people answered, durable as the ledger: an answer is on the disk before another pair is shown.

It is a file of its own beside the labels, since a ledger refuses tables that it does not know. Nothing is ever deleted:
an answer that was undone stays, with the time at which it was.

    settings  one row: the secret of the page's address, and the seed of the orders
    pairs     every pair that was answered, or single response, as it is exported: as its file last had it. One that is
              asked about and in the qualification set too is there twice, each with its own verdict
    answers   who said what of which of them, shown how, or why it was skipped
"""

from __future__ import annotations

import json
import secrets
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, Self

from ..errors import DataError, LedgerError
from ..llm.ledger.file import begin, connect, create, network_kind
from .tasks import Task

Part = Literal["qualification", "labels"]

APPLICATION_ID: Final = 0x414C5048
"""Marks the file, in SQLite's header ("ALPH")."""
VERSION: Final = 1
SCHEMA: Final = (
    "CREATE TABLE settings (token TEXT NOT NULL, seed INTEGER NOT NULL) STRICT",
    """CREATE TABLE pairs (
    part TEXT NOT NULL CHECK (part IN ('qualification', 'labels')), key TEXT NOT NULL, record TEXT NOT NULL,
    PRIMARY KEY (part, key)
) STRICT, WITHOUT ROWID""",
    """CREATE TABLE answers (
    id INTEGER PRIMARY KEY AUTOINCREMENT, annotator TEXT NOT NULL, part TEXT NOT NULL, pair TEXT NOT NULL,
    shown_first INTEGER NOT NULL CHECK (shown_first IN (1, 2)), grade INTEGER CHECK (grade BETWEEN 1 AND 7),
    reason TEXT, critique TEXT NOT NULL, seconds REAL NOT NULL, answered_at TEXT NOT NULL, undone_at TEXT,
    CHECK ((grade IS NULL) = (reason IS NOT NULL)), FOREIGN KEY (part, pair) REFERENCES pairs
) STRICT""",
    "CREATE UNIQUE INDEX answers_standing ON answers (annotator, part, pair) WHERE undone_at IS NULL",
)


@dataclass(frozen=True)
class Answer:
    """Somebody's opinion of a pair, or of a single response."""

    annotator: str
    part: Part
    pair: str
    """The task's key."""
    shown_first: int
    """1 or 2: the output on the left, or above."""
    grade: int | None
    """1: output_1 is clearly better, 2: slightly, 3: output_2 slightly, 4: clearly; or a rating. None: skipped."""
    reason: str | None
    """Why it was skipped."""
    seconds: float
    """From the page's being sent to the answer."""
    answered_at: str
    """ISO 8601, UTC."""
    critique: str = ""
    """Words about a single response."""
    id: int = field(default=0, compare=False)
    """Its number in the database; 0 before it is there."""

    @property
    def better(self) -> int:
        """1 or 2, the better output of a pair; 0 if it was skipped."""
        return 0 if self.grade is None else 1 + (self.grade > 2)


class Stored(NamedTuple):
    """An answer, and its pair or response as it is exported."""

    answer: Answer
    record: dict[str, Any]


class Store:
    """An open database; threads share it, several processes may open the same file.

    Args:
        path: The file, made if there is none.
        seed: Of a new file, seeds the orders of pairs and outputs.

    Raises:
        DataError: The file is of another kind, or of a newer version.
        LedgerError: It cannot be used: damaged, read-only, no room.
    """

    def __init__(self, path: Path, *, seed: int = 0) -> None:
        self.path = path
        self._lock = threading.Lock()
        with self._errors():
            if kind := network_kind(path):
                raise DataError(f"{path}: expected a file on a local disk, got one on {kind}, where it can be lost.")
            if not path.exists():
                token = secrets.token_urlsafe(16)
                settings = f"INSERT INTO settings VALUES ('{token}', {seed:d})"  # noqa: S608 -- nobody's words
                create(path, (*SCHEMA, settings), application_id=APPLICATION_ID, version=VERSION)
            self._connection = connect(path)
            try:
                self._check()
                self.token, self.seed = self._connection.execute("SELECT token, seed FROM settings").fetchone()
            except BaseException:
                self.close()
                raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the file; may be called again."""
        with self._lock:
            self._connection.close()

    def add(self, answer: Answer, pair: Task) -> bool:
        """Stores an answer; False if this annotator has answered the pair already, which stays as it is."""
        with self._transaction() as conn:
            conn.execute("INSERT OR IGNORE INTO pairs VALUES (?, ?, ?)", (answer.part, pair.key, _json(pair)))
            values = [getattr(answer, column) for column in _COLUMNS.split(", ")]
            places = ", ".join("?" * len(values))
            sql = f"INSERT INTO answers ({_COLUMNS}) VALUES ({places}) ON CONFLICT DO NOTHING"  # noqa: S608
            return conn.execute(sql, values).rowcount > 0

    def refresh(self, part: Part, pairs: Sequence[Task]) -> None:
        """Takes the records of pairs that were answered as they are now, a judge's verdict that came later included."""
        with self._transaction() as conn:
            rows = [(_json(pair), part, pair.key) for pair in pairs]
            conn.executemany("UPDATE pairs SET record = ? WHERE part = ? AND key = ?", rows)

    def undo(self, id: int) -> bool:
        """Takes back the answer of that number; False if it was taken back already, or never was there."""
        with self._transaction() as conn:
            sql = "UPDATE answers SET undone_at = ? WHERE id = ? AND undone_at IS NULL"
            return conn.execute(sql, (now(), id)).rowcount > 0

    def answers(self, annotator: str) -> list[Answer]:
        """An annotator's answers, the first first, without those undone."""
        sql = f"SELECT {_COLUMNS}, id FROM answers WHERE annotator = ? AND undone_at IS NULL ORDER BY id"  # noqa: S608
        return [Answer(*row) for row in self._rows(sql, annotator)]

    def spelling(self, annotator: str) -> str:
        """A name as it was first written: upper and lower case are the same."""
        return next((name for name in self.names() if name.casefold() == annotator.casefold()), annotator)

    def names(self) -> list[str]:
        """Everybody who ever answered, the first first."""
        return [name for (name,) in self._rows("SELECT annotator FROM answers GROUP BY annotator ORDER BY min(id)")]

    def times(self) -> set[tuple[str, str]]:
        """Who answered when, as `Answer` has both; those undone are among them."""
        return set(self._rows("SELECT annotator, answered_at FROM answers"))

    def all(self) -> list[Stored]:
        """Everybody's answers, the first first, without those undone."""
        sql = f"""SELECT {_COLUMNS}, id, record FROM answers JOIN pairs USING (part)
            WHERE key = pair AND undone_at IS NULL ORDER BY id"""  # noqa: S608
        return [Stored(Answer(*row), json.loads(record)) for *row, record in self._rows(sql)]

    def _rows(self, sql: str, *values: str) -> list[Any]:
        with self._transaction("BEGIN") as conn:
            return conn.execute(sql, values).fetchall()

    def _check(self) -> None:
        """Refuses other files; the header's version is read before its tables are used."""
        run = self._connection.execute
        marked, version = (run(f"PRAGMA {name}").fetchone()[0] for name in ("application_id", "user_version"))
        if marked != APPLICATION_ID:
            raise DataError(
                f"{self.path}: expected a database of labels, got one of another program. Give another --out."
            )
        if version > VERSION:
            raise DataError(f"{self.path}: expected version {VERSION}, got {version}: upgrade alpacafarm-env.")

    @contextmanager
    def _transaction(self, statement: str = "BEGIN IMMEDIATE") -> Iterator[sqlite3.Connection]:
        with self._lock, self._errors():
            begin(self._connection, statement)
            try:
                yield self._connection
                self._connection.execute("COMMIT")
            finally:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except (OSError, sqlite3.Error) as error:
            raise LedgerError(
                f"{self.path}: expected a database that can be used, got: {error}. What was answered before is kept."
            ) from error


_COLUMNS: Final = "annotator, part, pair, shown_first, grade, reason, seconds, answered_at, critique"


def _json(pair: Task) -> str:
    return json.dumps(pair.record, ensure_ascii=False)


def now() -> str:
    """The time as the database has it."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")
