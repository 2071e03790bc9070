"""The ledger's file: its tables, where it is by default, how it is made, and the checks before it is used.

Tables:

    replies   one raw reply per request, with its SHA-256; the first that arrives stands
    links     which reply answers which question, at which position of how many
    attempts  every request that was sent or may have been: state, reserve, cost. Never deleted
    totals    the sum of what all attempts count, kept by triggers, so that a budget is checked in constant time
    owners    who is alive: a process beats while it holds leases or has attempts running
    leases    which question is being asked right now, and by whom
"""

import os
import random
import sqlite3
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from urllib.parse import quote

import psutil

from ...errors import LedgerError

APPLICATION_ID = 0x414C5046
"""Marks the file as a ledger, in SQLite's header ("ALPF")."""
SCHEMA_VERSION = 1

SCHEMA = (
    """CREATE TABLE replies (
    request_key TEXT PRIMARY KEY NOT NULL, raw TEXT NOT NULL, sha256 TEXT NOT NULL, stored_at TEXT NOT NULL
) STRICT""",
    """CREATE TABLE links (
    question TEXT PRIMARY KEY NOT NULL, request_key TEXT NOT NULL REFERENCES replies, position INTEGER NOT NULL,
    size INTEGER NOT NULL, tries INTEGER NOT NULL, sha256 TEXT NOT NULL
) STRICT, WITHOUT ROWID""",
    # An attempt counts its cost; without one nothing if it failed, else its reserve.
    """CREATE TABLE attempts (
    id INTEGER PRIMARY KEY AUTOINCREMENT, request_key TEXT NOT NULL, host TEXT NOT NULL, model TEXT NOT NULL,
    label TEXT NOT NULL, num_questions INTEGER NOT NULL, handle TEXT NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('running', 'answered', 'failed', 'unknown')),
    reserve INTEGER CHECK (reserve >= 0), cost INTEGER CHECK (cost >= 0),
    prompt_tokens INTEGER, completion_tokens INTEGER, status INTEGER, error TEXT,
    started_at TEXT NOT NULL, ended_at TEXT,
    counted INTEGER NOT NULL AS (coalesce(cost, iif(state = 'failed', 0, reserve), 0)) STORED
) STRICT""",
    "CREATE INDEX attempts_running ON attempts (handle) WHERE state = 'running'",
    "CREATE TABLE totals (counted INTEGER NOT NULL) STRICT",
    """CREATE TRIGGER attempts_added AFTER INSERT ON attempts BEGIN
    UPDATE totals SET counted = counted + NEW.counted;
END""",
    """CREATE TRIGGER attempts_changed AFTER UPDATE ON attempts BEGIN
    UPDATE totals SET counted = counted + NEW.counted - OLD.counted;
END""",
    "CREATE TABLE owners (handle TEXT PRIMARY KEY NOT NULL, beat REAL NOT NULL, lease_s REAL NOT NULL) STRICT",
    """CREATE TABLE leases (
    question TEXT PRIMARY KEY NOT NULL, handle TEXT NOT NULL, call INTEGER NOT NULL
) STRICT, WITHOUT ROWID""",
    "CREATE INDEX leases_handle ON leases (handle)",
)

BUSY_S = 60.0
"""Seconds to wait for other processes before giving up."""
_SEQUENCE = "CREATE TABLE sqlite_sequence(name,seq)"
_NETWORK = {"nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "afs", "fuse.sshfs"}
_WHAT_TO_DO = "The file was not changed. Restore a copy of it, or name another file (a new one starts empty)."


def default_path() -> Path:
    """$ALPACAFARM_LEDGER, or alpacafarm-env/ledger.sqlite in $XDG_CACHE_HOME (by default ~/.cache)."""
    if named := os.environ.get("ALPACAFARM_LEDGER"):
        return Path(named).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "alpacafarm-env" / "ledger.sqlite"


def ledger_path(path: str | os.PathLike[str] | None) -> Path:
    """The path with "~" expanded; None: `default_path()`."""
    return default_path() if path is None else Path(path).expanduser()


def prepare(path: Path, *, replay: bool) -> None:
    """Makes the file if there is none; LedgerError, without changing it, if it is no sound ledger of this version."""
    try:
        if kind := network_kind(path):
            raise LedgerError(
                f"{path} is on a network file system ({kind}), where a ledger can be lost. Name a file on a local "
                "disk: set ALPACAFARM_LEDGER, or give its path."
            )
        if not path.exists():
            if replay:
                raise LedgerError(f"There is no ledger at {path} to replay. Name the file of an earlier run.")
            statements = (*SCHEMA, "INSERT INTO totals VALUES (0)")
            create(path, statements, application_id=APPLICATION_ID, version=SCHEMA_VERSION)
        if not replay and not (os.access(path, os.W_OK) and os.access(path.parent, os.W_OK)):
            raise LedgerError(f"The ledger {path} or its folder is read-only. Make it writable, or open it to replay.")
    except (OSError, sqlite3.Error) as error:
        raise explain(path, error) from error
    _check(path)


def connect(path: Path, *, read_only: bool = False) -> sqlite3.Connection:
    """A connection in autocommit mode; every commit is on the disk before it returns."""
    mode = "ro" if read_only else "rw"
    # A file in a read-only folder without a log can get none: nobody can be writing to it.
    if read_only and not os.access(path.parent, os.W_OK) and not Path(f"{path}-wal").exists():
        mode = "ro&immutable=1"
    conn = sqlite3.connect(
        f"file:{quote(str(path.absolute()))}?mode={mode}",
        uri=True,
        timeout=BUSY_S,
        isolation_level=None,
        check_same_thread=False,
    )
    try:
        for setting in ("synchronous = FULL", "foreign_keys = ON", "trusted_schema = OFF", "cell_size_check = ON"):
            conn.execute(f"PRAGMA {setting}")
    except BaseException:
        conn.close()
        raise
    return conn


def begin(conn: sqlite3.Connection, statement: str) -> None:
    """Begins a transaction, retrying often and at random while others hold the file: none is left behind for long."""
    deadline = time.monotonic() + BUSY_S
    conn.execute("PRAGMA busy_timeout = 0")
    try:
        while True:
            try:
                conn.execute(statement)
                return
            except sqlite3.OperationalError as error:
                passing = error_code(error) in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_PROTOCOL)
                if not passing or time.monotonic() > deadline:
                    raise
            time.sleep(random.uniform(0.0005, 0.005))
    finally:
        conn.execute(f"PRAGMA busy_timeout = {int(1000 * BUSY_S)}")


def inode(path: Path) -> tuple[int, int] | None:
    """(device, inode) of the file behind a name; None if there is none."""
    try:
        state = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return state.st_dev, state.st_ino


def error_code(error: Exception) -> int:
    """SQLite's primary result code, 0 of another error."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF


def explain(path: Path, error: Exception) -> LedgerError:
    """An error of SQLite or the system in words that help the user of the ledger."""
    damaged = "it is damaged. Restore a copy of it, or name another file (a new one starts empty)"
    text = {
        sqlite3.SQLITE_FULL: "the disk is full. What was stored before is kept. Make room, then run again",
        sqlite3.SQLITE_BUSY: f"another process has held it for {BUSY_S:.0f} s. End that process, or name another file",
        sqlite3.SQLITE_CORRUPT: damaged,
        sqlite3.SQLITE_NOTADB: damaged,
    }.get(error_code(error), "nothing of this call was stored; what was stored before is kept. Name another file")
    return LedgerError(f"The ledger {path} cannot be used: {text} ({error}).")


def create(path: Path, statements: Sequence[str], *, application_id: int, version: int) -> None:
    """Makes a database under another name and links it into place: for everyone it is there in full or not at all.

    Only its owner can read it. A file that is there already stays as it is. Raises OSError or sqlite3.Error.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)  # readable by its owner alone
    os.close(descriptor)
    new = Path(name)
    try:
        with closing(sqlite3.connect(new, isolation_level=None)) as conn:
            conn.execute("PRAGMA synchronous = FULL")
            conn.execute("BEGIN IMMEDIATE")
            for statement in statements:
                conn.execute(statement)
            conn.execute(f"PRAGMA application_id = {application_id}")
            conn.execute(f"PRAGMA user_version = {version}")
            conn.execute("COMMIT")
            conn.execute("PRAGMA journal_mode = WAL")
        os.link(new, path)
        folder = os.open(path.parent, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)
    except FileExistsError:
        pass  # another process was faster
    finally:
        for leftover in (name, f"{name}-wal", f"{name}-shm", f"{name}-journal"):
            Path(leftover).unlink(missing_ok=True)


def network_kind(path: Path) -> str:
    """The network file system that a file is on, where processes cannot share SQLite's log; "" if it is on none."""
    folder = path.absolute().parent.resolve()
    mounts = [mount for mount in psutil.disk_partitions(all=True) if folder.is_relative_to(mount.mountpoint)]
    kind = max(reversed(mounts), key=lambda mount: len(mount.mountpoint)).fstype if mounts else ""
    return kind if kind in _NETWORK else ""


def _check(path: Path) -> None:
    """Refuses what is no sound ledger, through a reading connection: a writing one would fold in the log on closing."""
    try:
        with closing(connect(path, read_only=True)) as conn:
            conn.execute("BEGIN")
            problem = _problem(conn)
    except (sqlite3.Error, UnicodeDecodeError, OverflowError) as error:  # text that is none, sums beyond 64 bits
        if error_code(error) == sqlite3.SQLITE_IOERR:  # a full disk, and no damage
            raise explain(path, error) from error
        problem = f"is no ledger: damaged, cut, or another kind of file ({error})"
    if problem:
        raise LedgerError(f"The ledger {path} {problem}. {_WHAT_TO_DO}")


def _problem(conn: sqlite3.Connection) -> str:
    """Why the file is no sound ledger of this version, "" if it is one."""
    marks = [conn.execute(f"PRAGMA {name}").fetchone()[0] for name in ("application_id", "user_version")]
    if marks[0] != APPLICATION_ID:
        return "is empty, a database of another program, or damaged"
    if marks[1] > SCHEMA_VERSION:
        return f"has version {marks[1]}; this package reads up to {SCHEMA_VERSION}: upgrade alpacafarm-env"
    checked = [" ".join(text.split()) for (text,) in conn.execute("PRAGMA quick_check(1)")]
    if checked != ["ok"]:
        return f"is damaged (SQLite: {checked})"
    schema = {row[0] for row in conn.execute("SELECT sql FROM sqlite_schema WHERE sql IS NOT NULL")}
    if marks[1] != SCHEMA_VERSION or schema - {_SEQUENCE} != set(SCHEMA):
        return f"is damaged (version {marks[1]}, and its tables are not those of a ledger)"
    totals = conn.execute("SELECT counted FROM totals").fetchall()
    if totals != conn.execute("SELECT coalesce(sum(counted), 0) FROM attempts").fetchall():
        return "is damaged (its totals are not the sum of its attempts)"
    return ""
