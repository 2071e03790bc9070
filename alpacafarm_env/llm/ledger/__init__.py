"""The ledger: every answer that was paid for, every attempt that may have been, in one SQLite file shared by processes.

An answer is on the disk before the call that asked for it goes on. Failures are recorded and never read as answers.

How a call asks its questions, so that no question is paid twice, in four operations:

1. `claim` them: what is answered is read, what nobody else is asking is the call's own.
2. For each request `begin`: it is in the file before it is sent, and within the budget.
3. `succeed` or `fail`. A kill between leaves the attempt behind as "unknown", counted at its reserve: it may have been
   billed, and nobody can tell.
4. `release` in a `finally`. For questions that another call holds: wait a little, and go to 1.

What a kill cannot take is what was committed; power loss included, as far as the disk keeps what it says it has
written. SQLite itself drops a damaged end of its log (`-wal`) without an error: answers in it are asked for again.
"""

import atexit
import os
import queue
import sqlite3
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeVar, cast
from weakref import WeakSet

from ...errors import LedgerError, ReplayMissError
from . import operations as sql
from .file import begin, connect, error_code, explain, inode, ledger_path, prepare

T = TypeVar("T")
MAX_GROUP = 512
"""Operations committed together at most."""


class _Job(NamedTuple):
    future: Future[Any]
    operation: Callable[..., Any]  # of `operations`
    call: Callable[[sqlite3.Connection], Any]  # the operation with its arguments


class _UndoneError(Exception):
    """A transaction had begun, and all of it was undone; its cause says why."""


class Ledger:
    """An open ledger; threads share it, processes open the same file.

    All operations run on one writer thread, which commits those that wait together: 32 callers share one write to the
    disk. After a fork the child has its own handle; no connection crosses over.

    Args:
        path: The file, made if there is none ("~" is the home); None: `file.default_path()`.
        replay: Answers only what is stored. The file is opened read-only; `begin` raises ReplayMissError.
        lease_s: Seconds after which the leases of a killed process are free again.

    Raises:
        LedgerError: The file is damaged, not a ledger, of a newer version, or not writable. It is left as it is.
    """

    def __init__(
        self, path: str | os.PathLike[str] | None = None, *, replay: bool = False, lease_s: float = 15.0
    ) -> None:
        self.path = ledger_path(path)
        self.replay = replay
        self.lease_s = lease_s
        with _OPENING:
            prepare(self.path, replay=replay)
        self.closed = False
        self._reset()
        _OPEN.add(self)
        if not replay:
            try:
                self.do(sql.reap).result()
            except BaseException:
                self.close()
                raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Ledger({str(self.path)!r}, replay={self.replay})"

    def new_owner(self) -> sql.Owner:
        """A name for one call, to claim and begin with."""
        return sql.Owner(self._handle, next(self._calls), self.lease_s)

    def do(self, operation: Callable[..., T], *args: Any, **kwargs: Any) -> Future[T]:
        """Runs a function of `operations` on the writer thread, with these arguments after the connection.

        Returns:
            A future; it resolves once the operation is committed. It cannot be cancelled: what was paid is stored even
            if nobody waits for it any more.

        Raises:
            LedgerError: The ledger is closed, or only replayed: then nothing can be stored, and nothing asked for
                (ReplayMissError).
        """
        if self.replay and operation not in sql.READS:
            if operation is sql.begin:
                text = "and it has no answer to this request. Run without replay to ask."
                raise ReplayMissError(f"The ledger {self.path} is only replayed, {text}")
            raise LedgerError(f"The ledger {self.path} is only replayed: nothing can be stored.")
        future: Future[T] = Future()
        future.set_running_or_notify_cancel()
        with self._door:
            if self.closed:
                raise LedgerError(f"The ledger {self.path} is closed.")
            self._jobs.put(_Job(future, operation, lambda conn: operation(conn, *args, **kwargs)))
            if self._thread.ident is None:
                self._thread.start()
        return future

    def close(self) -> None:
        """Ends the writer thread after all waiting operations; frees this handle's leases. May be called again."""
        with suppress(LedgerError):  # closed already, or nothing can be written: then the leases run out
            if not self.replay:
                self.do(sql.reap, self._handle).result()
        with self._door:
            started = self._thread.ident is not None
            if started and not self.closed:
                self._jobs.put(None)
            self.closed = True
        if started:
            self._thread.join()
        with self._lock:
            self._disconnect()

    def _reset(self) -> None:
        """A fresh handle's state: at the start, and in the child of a fork."""
        self._handle = uuid.uuid4().hex
        self._calls = count()
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # held while the connection is in use
        self._door = threading.Lock()  # held while a job is handed in, or the ledger closes
        self._thread = threading.Thread(target=self._work, name="ledger", daemon=True)
        self._connection: sqlite3.Connection | None = None
        self._inode: tuple[int, int] | None = None
        self._active = False  # whether it may have leases or running attempts, and so has to beat
        self._beaten = 0.0
        self._full: str | None = None  # why no attempt begins

    def _work(self) -> None:
        group: list[_Job | None] = []
        while None not in group:
            group = []
            with suppress(queue.Empty):
                group.append(self._jobs.get(timeout=self.lease_s / 3 if self._active else None))
                while len(group) < MAX_GROUP:
                    group.append(self._jobs.get_nowait())
            with self._lock:
                self._run([job for job in group if job is not None])

    def _run(self, group: list[_Job]) -> None:
        """Runs and commits a group; its futures resolve afterwards, each with its own result or error."""
        try:
            outcomes = self._transact(group)
        except Exception as error:  # noqa: BLE001 - it goes to the callers, who wait for it
            if len(group) > 1 and isinstance(error, _UndoneError):
                for job in group:  # maybe undone because of one operation: alone, the others may still pass
                    self._run([job])
                return
            if not group:  # a beat failed: only `begin` reports it, as answers could not be stored either
                self._error(error)
            outcomes = [partial(job.future.set_exception, self._error(error)) for job in group]
        for resolve in outcomes:
            resolve()

    def _transact(self, group: list[_Job]) -> list[Callable[[], None]]:
        """One transaction, in which an operation that fails is undone alone. Returns what resolves the futures.

        Raises:
            _UndoneError: It had begun, and all of it was undone.
        """
        conn = self._connected()
        reads = all(job.operation in sql.READS for job in group)
        due = self._active and time.monotonic() - self._beaten >= self.lease_s / 3
        if not group and not due:
            return []
        begin(conn, "BEGIN" if reads and not due else "BEGIN IMMEDIATE")
        try:
            if due:
                sql.heartbeat(conn, self._handle, self.lease_s)
                self._beaten = time.monotonic()
            outcomes = [self._one(conn, job) for job in group]
            conn.execute("COMMIT")
        except BaseException as error:
            if conn.in_transaction:
                conn.execute("ROLLBACK")
            if isinstance(error, sqlite3.Error):
                raise _UndoneError from error
            raise
        self._active |= any(job.operation in (sql.claim, sql.begin) for job in group)
        return outcomes

    def _one(self, conn: sqlite3.Connection, job: _Job) -> Callable[[], None]:
        if job.operation is sql.begin and self._full is not None:
            return partial(job.future.set_exception, LedgerError(self._full))
        conn.execute("SAVEPOINT operation")
        try:
            outcome = partial(job.future.set_result, job.call(conn))
        except Exception as error:
            if not conn.in_transaction:  # a full disk: SQLite has undone all of it
                raise _UndoneError from error
            conn.execute("ROLLBACK TO operation")
            outcome = partial(job.future.set_exception, self._error(error))
        else:
            if job.operation is sql.claim:  # a call starts, and the disk took that
                self._full = None
        conn.execute("RELEASE operation")
        return outcome

    def _error(self, error: Exception) -> Exception:
        """An error as its caller gets it: it names the file, and is an object of its own."""
        cause: Any = error.__cause__ if isinstance(error, _UndoneError) else error
        if isinstance(cause, sqlite3.Error | OSError):
            explained = explain(self.path, cause)
            if error_code(cause) in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR):
                # Answers that cannot be stored must not be bought: no attempt begins until another call has claimed its
                # questions. Smaller rows do not count: they still fit where answers do not.
                self._full = f"No more requests are sent: {explained}"
            explained.__cause__ = cause
            return explained
        if type(cause) is LedgerError and str(self.path) not in str(cause):  # of a row: operations know no file
            return LedgerError(f"{self.path}: {cause}")
        return cast(Exception, cause)

    def _connected(self) -> sqlite3.Connection:
        if self._inode not in (None, inode(self.path)):
            raise LedgerError(
                f"The ledger {self.path} was removed or replaced while in use. What was stored before is in the old "
                "file. Start again with the file that should be used."
            )
        if self._connection is None:
            self._connection = connect(self.path, read_only=self.replay)
            self._inode = inode(self.path)
        return self._connection

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


_OPENING = threading.RLock()
"""Held while a file is checked through a connection of its own, and over a fork."""
_OPEN: WeakSet[Ledger] = WeakSet()
_HELD: list[Ledger] = []
_SHARED: dict[tuple[Path, bool], Ledger] = {}


def shared_ledger(path: str | os.PathLike[str] | None = None, *, replay: bool = False) -> Ledger:
    """This process's one handle on a file, closed at the process's end. Arguments and errors as in `Ledger`.

    If the file was removed or replaced since, it raises at its next use; close it for a new one.
    """
    place = ledger_path(path).absolute(), replay
    with _OPENING:
        if place not in _SHARED or _SHARED[place].closed:
            _SHARED[place] = Ledger(place[0], replay=replay)
        return _SHARED[place]


def _before_fork() -> None:
    """Closes all connections: SQLite keeps locks in memory that a child would wrongly take for its own."""
    _OPENING.acquire()
    for ledger in list(_OPEN):
        ledger._lock.acquire()
        ledger._disconnect()
        _HELD.append(ledger)


def _after_fork(*, child: bool) -> None:
    while _HELD:
        ledger = _HELD.pop()
        if child:
            ledger._reset()
        else:
            ledger._lock.release()
    _OPENING.release()


@atexit.register
def _close_all() -> None:
    for ledger in list(_OPEN):
        ledger.close()


os.register_at_fork(
    before=_before_fork,
    after_in_parent=partial(_after_fork, child=False),
    after_in_child=partial(_after_fork, child=True),
)
