"""The writer thread: groups, what fails alone, forks, a full disk."""

import sqlite3
import threading
import time
from contextlib import closing

import pytest
from ledger_calls import answer, begin, claim, fork, lookup, read_beside, succeed, together, total

from alpacafarm_env.errors import BudgetExceededError, LedgerError
from alpacafarm_env.llm.ledger import file as ledger_file
from alpacafarm_env.llm.ledger import operations as sql
from alpacafarm_env.llm.ledger import store as ledger_module
from alpacafarm_env.llm.ledger.store import Ledger, shared_ledger

# Newer Pythons warn of every fork beside threads; that it is safe here is what is tested.
pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")


def test_a_future_resolves_after_its_commit(ledger):
    seen = []
    for number in range(10):
        future = succeed(ledger, begin(ledger, str(number)).result(), [str(number)])
        future.add_done_callback(lambda _: seen.append(read_beside(ledger.path, "SELECT count(*) FROM replies")[0][0]))
        future.result()
    ledger.close()
    assert seen == list(range(1, 11))


def half(conn):
    conn.execute("INSERT INTO replies VALUES ('half', '{}', '', '')")
    raise KeyError("half way")


def test_one_failing_operation_of_a_group_is_undone_alone(ledger):
    with ledger._lock:  # the writer waits, so that what follows becomes one group
        futures = [begin(ledger, "1"), ledger.do(half), begin(ledger, "2", budget_usd=0.15), succeed(ledger, 10**6)]
        futures.append(begin(ledger, "3"))
    assert [type(future.exception()) for future in futures[1:4]] == [KeyError, BudgetExceededError, LedgerError]
    assert [futures[i].exception() for i in (0, 4)] == [None, None]
    assert read_beside(ledger.path, "SELECT count(*) FROM replies") == [(0,)]
    assert read_beside(ledger.path, "SELECT request_key FROM attempts") == [("1",), ("3",)]


def test_waiting_operations_share_a_commit(ledger, monkeypatch):
    groups = []
    transact = Ledger._transact
    monkeypatch.setattr(Ledger, "_transact", lambda self, group: groups.append(len(group)) or transact(self, group))
    with ledger._lock:
        futures = [begin(ledger, str(number)) for number in range(100)]
    assert len({future.result() for future in futures}) == 100
    assert len(groups) <= 2


def test_callers_of_a_busy_file_are_told_together(ledger, monkeypatch):
    monkeypatch.setattr(ledger_file, "BUSY_S", 0.1)
    owner = ledger.new_owner()
    with closing(sqlite3.connect(ledger.path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        started = time.monotonic()
        with ledger._lock:
            futures = [ledger.do(sql.claim, [str(number)], owner) for number in range(20)]
        for future in futures:
            with pytest.raises(LedgerError, match="another process"):
                future.result()
        assert time.monotonic() - started < 1  # not 20 x 0.1 s
    assert len({id(future.exception()) for future in futures}) == 20
    assert claim(ledger, ["0"], owner) == ["0"]


# ------------------------------------------------------------------------------------------------ forks


def test_a_forked_child_has_a_handle_of_its_own(ledger):
    owner = ledger.new_owner()
    answer(ledger, "before", ["before"])
    claim(ledger, ["held"], owner)
    connection = ledger._connection

    def in_child():
        assert ledger._connection is not connection
        assert ledger.new_owner().handle != owner.handle
        assert ledger.do(sql.claim, ["held", "free"], ledger.new_owner()).result(timeout=3) == ["free"]
        answer(ledger, "child", ["child"])
        ledger.close()

    assert fork(in_child)
    assert claim(ledger, ["free"], owner) == ["free"]
    answer(ledger, "after", ["after"])
    assert len(lookup(ledger, "before", "child", "after")) == 3


def test_forks_while_threads_write(ledger):
    stop = threading.Event()

    def act(index):
        if index == 0:
            try:
                ended = [fork(lambda n=n: answer(ledger, f"child {n}", [f"child {n}"])) for n in range(5)]
            finally:
                stop.set()
            assert all(ended)
            return [f"child {n}" for n in range(5)]
        written = []
        while not stop.is_set():
            written.append(f"thread {index}: {len(written)}")
            answer(ledger, written[-1], written[-1:])
        return written

    keys = [key for some in together(5, act) for key in some]
    assert set(lookup(ledger, *keys)) == set(keys)


def test_a_fork_while_a_thread_opens_the_shared_ledger(tmp_path):
    holds = threading.Event()

    def hold():
        with ledger_module._SHARING:
            holds.set()
            time.sleep(0.2)

    thread = threading.Thread(target=hold)
    thread.start()
    holds.wait()
    assert fork(lambda: shared_ledger(tmp_path / "l").close())
    thread.join()


# ------------------------------------------------------------------------------------------------ full disks


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
        while refused is None:
            attempt = begin(ledger, str(len(kept))).result()
            refused = succeed(ledger, attempt, [str(len(kept))], raw="x" * 10_000).exception()
            kept += [] if refused else [str(len(kept))]
        assert isinstance(refused, LedgerError)
        assert "disk is full" in str(refused)
        with pytest.raises(LedgerError, match="disk is full"):
            begin(ledger, "next").result()
        succeed(ledger, waiting, ["small"], raw="{}").result()  # what was paid and still fits is kept
    with Ledger(tmp_path / "l") as ledger:
        assert len(kept) > 5
        assert set(lookup(ledger, *kept, str(len(kept)), "small")) == {*kept, "small"}
        assert (total(ledger).answered, total(ledger).unknown) == (len(kept) + 1, 1)


def test_requests_go_on_with_the_first_call_after_room_was_made(ledger):
    def fill(conn):
        conn.execute("PRAGMA max_page_count = 1")
        conn.execute("INSERT INTO replies SELECT 'large', hex(zeroblob(10000000)), '', ''")

    owner = ledger.new_owner()
    assert "disk is full" in str(ledger.do(fill).exception())
    for make_room in (lambda conn: None, lambda conn: conn.execute("PRAGMA max_page_count = 1000000").close()):
        ledger.do(make_room).result()
        ledger.do(sql.release, ["q"], owner).result()  # small rows fit all the time, and say nothing of answers
        with pytest.raises(LedgerError, match="No more requests"):
            begin(ledger).result()
    assert claim(ledger, ["q"], owner) == ["q"]
    answer(ledger)


def test_an_answer_too_large_for_the_disk_takes_no_other_down(small_disk, tmp_path):
    with Ledger(tmp_path / "l") as ledger:
        begun = [begin(ledger, str(number)).result() for number in range(3)]
        with ledger._lock:
            futures = [succeed(ledger, begun[i], [str(i)], raw="x" * size) for i, size in enumerate((10, 10**6, 10))]
        assert [future.exception() is None for future in futures] == [True, False, True]
        assert sorted(lookup(ledger, "0", "1", "2")) == ["0", "2"]


def test_a_beat_that_cannot_be_written_stops_further_requests(tmp_path, monkeypatch):
    with Ledger(tmp_path / "l", lease_s=0.15) as ledger:
        claim(ledger, ["q"])
        begin(ledger).result()

        def full(*_):
            error = sqlite3.OperationalError("database or disk is full")
            error.sqlite_errorcode = sqlite3.SQLITE_FULL
            raise error

        monkeypatch.setattr(sql, "busy", full)
        deadline = time.monotonic() + 10
        while ledger._full is None and time.monotonic() < deadline:  # until it has tried to beat
            time.sleep(0.02)
        with pytest.raises(LedgerError, match="No more requests"):
            begin(ledger).result()
        monkeypatch.undo()
