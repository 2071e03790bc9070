"""The writer thread: groups, what fails alone, forks, a full disk, and how fast it is."""

import asyncio
import os
import sqlite3
import threading
import time
from contextlib import closing

import pytest
from ledger_workers import answer, begin, read_beside, succeed, together

from alpacafarm_env.errors import BudgetExceededError, LedgerError
from alpacafarm_env.llm.ledger import file as ledger_file
from alpacafarm_env.llm.ledger import operations as sql
from alpacafarm_env.llm.ledger import store as ledger_module
from alpacafarm_env.llm.ledger.store import Ledger, shared_ledger

# Newer Pythons warn of every fork beside threads; that it is safe here is what is tested.
pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")


@pytest.fixture
def ledger(tmp_path):
    with Ledger(tmp_path / "ledger.sqlite") as opened:
        yield opened


def test_a_future_resolves_after_its_commit(ledger):
    seen = []
    for number in range(20):
        future = succeed(ledger, begin(ledger, str(number)).result(), [str(number)])
        future.add_done_callback(lambda _: seen.append(read_beside(ledger.path, "SELECT count(*) FROM replies")[0][0]))
        future.result()
    ledger.close()
    assert seen == list(range(1, 21))


class NoSavepoint(Ledger):
    """Twin: a failing operation of a group leaves its half behind."""

    def _one(self, conn, job):
        try:
            return job.operation(conn)
        except Exception as error:  # noqa: BLE001
            return self._failure(error)


def half(conn):
    conn.execute("INSERT INTO replies VALUES ('half', '{}', '', '')")
    raise KeyError("half way")


def check_group(ledger):
    with ledger._lock:  # the writer waits, so that what follows becomes one group
        futures = [begin(ledger, "1"), ledger.do(half), begin(ledger, "2", budget_usd=0.15), succeed(ledger, 10**6)]
        futures.append(begin(ledger, "3"))
    assert isinstance(futures[1].exception(), KeyError)
    assert isinstance(futures[2].exception(), BudgetExceededError)
    assert isinstance(futures[3].exception(), LedgerError)
    assert [futures[i].exception() for i in (0, 4)] == [None, None]
    assert ledger.do(sql.stored_reply, "half").exception() is None
    assert read_beside(ledger.path, "SELECT count(*) FROM replies") == [(0,)]
    assert read_beside(ledger.path, "SELECT request_key FROM attempts") == [("1",), ("3",)]


def test_one_failing_operation_of_a_group_is_undone_alone(ledger):
    check_group(ledger)


def test_without_savepoints_the_twin_keeps_the_half(tmp_path):
    with NoSavepoint(tmp_path / "l") as ledger, pytest.raises(AssertionError):
        check_group(ledger)


def test_waiting_operations_share_a_commit(ledger, monkeypatch):
    groups = []
    transact = Ledger._transact
    monkeypatch.setattr(Ledger, "_transact", lambda self, group: groups.append(len(group)) or transact(self, group))
    with ledger._lock:
        futures = [begin(ledger, str(number)) for number in range(100)]
    assert len({future.result() for future in futures}) == 100
    assert len(groups) <= 2


def test_callers_of_a_busy_file_are_told_together(ledger, monkeypatch):
    monkeypatch.setattr(ledger_file, "BUSY_S", 0.3)
    owner = ledger.new_owner()
    with closing(sqlite3.connect(ledger.path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        started = time.monotonic()
        with ledger._lock:
            futures = [ledger.do(sql.claim, [str(number)], owner) for number in range(20)]
        for future in futures:
            with pytest.raises(LedgerError, match="another process has held it"):
                future.result()
        assert time.monotonic() - started < 3  # not 20 x 0.3 s
    assert len({id(future.exception()) for future in futures}) == 20
    assert ledger.do(sql.claim, ["0"], owner).result() == ["0"]


def test_an_operation_cannot_be_cancelled(ledger):
    async def pay_and_leave():
        future = asyncio.wrap_future(succeed(ledger, attempt))
        future.cancel()
        with pytest.raises(asyncio.CancelledError):
            await future

    attempt = begin(ledger).result()
    with ledger._lock:
        asyncio.run(pay_and_leave())
    assert "q" in ledger.do(sql.lookup, ["q"]).result()


def fork(action) -> bool:
    """Runs `action` in a forked child; whether it ended well within 10 s."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            action()
            status = 0
        finally:
            os._exit(status)
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return status == 0
        time.sleep(0.01)
    os.kill(child, 9)
    os.waitpid(child, 0)
    return False


def check_fork(ledger):
    owner = ledger.new_owner()
    answer(ledger, "before", ["before"])
    ledger.do(sql.claim, ["held"], owner).result()
    connection = ledger._connection

    def in_child():
        assert ledger._connection is not connection
        assert ledger.new_owner().handle != owner.handle
        assert ledger.do(sql.claim, ["held", "free"], ledger.new_owner()).result(timeout=3) == ["free"]
        answer(ledger, "child", ["child"])
        ledger.close()

    assert fork(in_child)
    assert ledger.do(sql.claim, ["free"], owner).result() == ["free"]
    answer(ledger, "after", ["after"])
    assert len(ledger.do(sql.lookup, ["before", "child", "after"]).result()) == 3


def test_a_forked_child_has_a_handle_of_its_own(ledger):
    check_fork(ledger)


def test_a_twin_that_shares_its_handle_with_the_child_fails(ledger):
    # In a child of its own, as the shared handle would spoil this process's.
    def with_shared_handle():
        ledger._reset = ledger._disconnect = lambda: None
        check_fork(ledger)

    assert not fork(with_shared_handle)


def test_forks_while_threads_write(ledger):
    stop = threading.Event()

    def act(index):
        if index == 0:
            try:
                ended = [fork(lambda n=n: answer(ledger, f"child {n}", [f"child {n}"])) for n in range(5)]
            finally:
                stop.set()
            assert all(ended)
            return ended
        written = []
        while not stop.is_set():
            written.append(f"thread {index}: {len(written)}")
            answer(ledger, written[-1], written[-1:])
        return written

    _, *written = together(5, act)
    keys = [key for some in written for key in some] + [f"child {n}" for n in range(5)]
    assert set(ledger.do(sql.lookup, keys).result()) == set(keys)


def test_a_fork_while_a_thread_opens_the_shared_ledger(tmp_path):
    holds = threading.Event()

    def hold():
        with ledger_module._SHARING:
            holds.set()
            time.sleep(0.3)

    thread = threading.Thread(target=hold)
    thread.start()
    holds.wait()
    assert fork(lambda: shared_ledger(tmp_path / "l").close())
    thread.join()
    shared_ledger(tmp_path / "l").close()


@pytest.fixture
def small_disk(monkeypatch):
    """Every connection of a ledger may use 60 pages (240 kB)."""
    connect = ledger_module.connect

    def limited(*args, **kwargs):
        conn = connect(*args, **kwargs)
        conn.execute("PRAGMA max_page_count = 60")
        return conn

    monkeypatch.setattr(ledger_module, "connect", limited)


def test_a_full_disk_is_told_and_stops_further_requests(small_disk, tmp_path):
    kept, refused = [], None
    with Ledger(tmp_path / "l") as ledger:
        waiting = begin(ledger, "waiting").result()
        for number in range(100):
            attempt = begin(ledger, str(number)).result()
            try:
                succeed(ledger, attempt, [str(number)], raw="x" * 10_000).result()
            except LedgerError as error:
                refused = str(error)
                break
            kept.append(str(number))
        assert "the disk is full" in refused
        assert "not stored" in refused
        with pytest.raises(LedgerError, match="No more requests are sent: .* disk is full"):
            begin(ledger, "next").result()
        succeed(ledger, waiting, ["small"], raw="{}").result()  # what was paid and still fits is kept
    with Ledger(tmp_path / "l") as ledger:
        assert len(kept) > 5
        assert set(ledger.do(sql.lookup, [*kept, str(len(kept)), "small"]).result()) == {*kept, "small"}
        total = ledger.do(sql.spending).result().total
        assert (total.answered, total.unknown) == (len(kept) + 1, 1)


def test_requests_go_on_with_the_first_call_after_room_was_made(ledger):
    def fill(conn):
        conn.execute("PRAGMA max_page_count = 1")
        conn.execute("INSERT INTO replies SELECT 'large', hex(zeroblob(10000000)), '', ''")

    owner = ledger.new_owner()
    assert "disk is full" in str(ledger.do(fill).exception())
    for make_room in (lambda conn: None, lambda conn: conn.execute("PRAGMA max_page_count = 1000000").close()):
        ledger.do(make_room).result()
        ledger.do(sql.release, ["q"], owner).result()  # small rows fit all the time, and say nothing of answers
        with pytest.raises(LedgerError, match="No more requests are sent"):
            begin(ledger).result()
    assert ledger.do(sql.claim, ["q"], owner).result() == ["q"]
    answer(ledger)


def test_an_answer_too_large_for_the_disk_takes_no_other_down(small_disk, tmp_path):
    with Ledger(tmp_path / "l") as ledger:
        attempts = [begin(ledger, str(number)).result() for number in range(3)]
        with ledger._lock:
            sizes = (10, 10**6, 10)
            futures = [succeed(ledger, attempts[i], [str(i)], raw="x" * size) for i, size in enumerate(sizes)]
        assert [future.exception() is None for future in futures] == [True, False, True]
        assert sorted(ledger.do(sql.lookup, ["0", "1", "2"]).result()) == ["0", "2"]


def test_a_beat_that_cannot_be_written_stops_further_requests(tmp_path, monkeypatch):
    with Ledger(tmp_path / "l", lease_s=0.15) as ledger:
        ledger.do(sql.claim, ["q"], ledger.new_owner()).result()
        begin(ledger).result()

        def full(*_):
            error = sqlite3.OperationalError("database or disk is full")
            error.sqlite_errorcode = sqlite3.SQLITE_FULL
            raise error

        monkeypatch.setattr(sql, "busy", full)
        deadline = time.monotonic() + 10
        while ledger._full is None and time.monotonic() < deadline:  # until it has tried to beat
            time.sleep(0.02)
        with pytest.raises(LedgerError, match="No more requests are sent"):
            begin(ledger).result()
        monkeypatch.undo()


def answers_per_second(ledger, callers, count):
    def ask(index):
        for number in range(count // callers):
            answer(ledger, f"{callers} {index} {number}", [f"{callers} {index} {number}"], "x" * 1_000)

    started = time.monotonic()
    together(callers, ask)
    return count / (time.monotonic() - started)


@pytest.mark.slow
def test_throughput(ledger):
    alone, together = answers_per_second(ledger, 1, 500), answers_per_second(ledger, 32, 6_400)
    print(f"answers/s (two commits each): {alone:.0f} with 1 caller, {together:.0f} with 32")
    assert together > 100
    assert together > 2 * alone
