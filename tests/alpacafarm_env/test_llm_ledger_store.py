"""The writer thread, forks, a full disk; then many processes on one ledger, and SIGKILL at any moment.

No answer that was committed is lost, each question is paid once, a dead owner is replaced, a budget is never passed.
The long forms are the goal: 50 kills over 2,000 questions, 8 processes, 20 budgets.
"""

import json
import random
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
from ledger_calls import (
    answer,
    attempts,
    begin,
    billed,
    claim,
    finish,
    fork,
    kill,
    lines,
    lookup,
    question_keys,
    read_beside,
    start,
    succeed,
    total,
    true_label,
    wait_ready,
)

from alpacafarm_env.errors import BudgetExceededError, LedgerError
from alpacafarm_env.llm import ledger as ledger_module
from alpacafarm_env.llm.ledger import Ledger, shared_ledger

# Newer Pythons warn of every fork beside threads; that it is safe here is what is tested.
pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")


def test_one_failing_operation_of_a_group_is_undone_alone(ledger):
    def half(conn):
        conn.execute("INSERT INTO replies VALUES ('half', '{}', '', '')")
        raise KeyError("half way")

    with ledger._lock:  # the writer waits, so that what follows becomes one group
        futures = [begin(ledger, "1"), ledger.do(half), begin(ledger, "2", budget_usd=0.15), succeed(ledger, 10**6)]
        futures.append(begin(ledger, "3"))
    assert [type(future.exception()) for future in futures[1:4]] == [KeyError, BudgetExceededError, LedgerError]
    assert [futures[i].exception() for i in (0, 4)] == [None, None]
    assert read_beside(ledger.path, "SELECT count(*) FROM replies") == [(0,)]
    assert read_beside(ledger.path, "SELECT request_key FROM attempts") == [("1",), ("3",)]


def test_a_forked_child_has_a_handle_of_its_own(ledger):
    owner = ledger.new_owner()
    answer(ledger, "before", ["before"])
    claim(ledger, ["held"], owner)
    connection = ledger._connection

    def in_child():
        assert ledger._connection is not connection
        assert ledger.new_owner().handle != owner.handle
        assert claim(ledger, ["held", "free"]) == ["free"]
        answer(ledger, "child", ["child"])
        ledger.close()

    assert fork(in_child)
    assert claim(ledger, ["free"], owner) == ["free"]
    answer(ledger, "after", ["after"])
    assert len(lookup(ledger, "before", "child", "after")) == 3


def test_forks_while_threads_write(ledger):
    """From the main thread: a child clears the states of all others, and torch has process groups in that of main."""
    stop = threading.Event()

    def write(index):
        written = []
        while not stop.is_set():
            written.append(f"thread {index}: {len(written)}")
            answer(ledger, written[-1], written[-1:])
        return written

    with ThreadPoolExecutor(4) as pool:
        writing = [pool.submit(write, index) for index in range(4)]
        try:
            assert all(fork(lambda n=n: answer(ledger, f"child {n}", [f"child {n}"])) for n in range(5))
        finally:
            stop.set()
        written = [key for each in writing for key in each.result()]
    keys = [*written, *(f"child {n}" for n in range(5))]
    assert set(lookup(ledger, *keys)) == set(keys)


def test_a_fork_while_a_thread_opens_the_shared_ledger(tmp_path):
    holds = threading.Event()

    def hold():
        with ledger_module._OPENING:
            holds.set()
            time.sleep(0.2)

    thread = threading.Thread(target=hold)
    thread.start()
    assert holds.wait(10)
    assert fork(lambda: shared_ledger(tmp_path / "l").close())
    thread.join()


def test_a_full_disk_loses_nothing_stored(monkeypatch, tmp_path):
    """Every connection may use 60 pages (240 kB)."""
    connect = ledger_module.connect

    def limited(*args, **kwargs):
        conn = connect(*args, **kwargs)
        conn.execute("PRAGMA max_page_count = 60")
        return conn

    monkeypatch.setattr(ledger_module, "connect", limited)
    kept, refused = [], None
    with Ledger(tmp_path / "l") as ledger:
        while refused is None:
            attempt = begin(ledger, str(len(kept))).result()
            refused = succeed(ledger, attempt, [str(len(kept))], raw="x" * 10_000).exception()
            kept += [] if refused else [str(len(kept))]
        assert isinstance(refused, LedgerError)
        assert "disk is full" in str(refused)
    with Ledger(tmp_path / "l") as ledger:
        assert len(kept) > 5
        assert set(lookup(ledger, *kept, str(len(kept)))) == set(kept)
        assert (total(ledger).answered, total(ledger).unknown) == (len(kept), 1)


THREADS = 8
LEASE_S = 0.6


def settings_for(folder, **more):
    paths = {name: str(folder / name) for name in ("store", "bills", "acknowledged")}
    common = {"task": "ask", "first": 0, "order": 0, "threads": THREADS, "batch": 32, "latency_s": 0.005}
    return {**common, **paths, "lease_s": 15.0, **more}


def labels(path, count):
    with Ledger(path) as ledger:
        found = lookup(ledger, *question_keys(count))
    return {key: json.loads(stored.raw)["label"] for key, stored in found.items()}


@pytest.mark.parametrize(("kills", "count"), [(3, 120), pytest.param(50, 2_000, marks=pytest.mark.slow)])
def test_no_committed_answer_is_lost(tmp_path, kills, count):
    """What was billed twice can be read in the ledger."""
    settings, moments = settings_for(tmp_path, count=count, batch=64, latency_s=0.01, lease_s=0.3), random.Random(0)
    for _ in range(kills):
        process = start(**settings)
        try:
            wait_ready(process)
            time.sleep(moments.uniform(0.0, 6 * count / kills * settings["latency_s"] / THREADS))
        finally:
            kill(process)
        assert set(lines(settings["acknowledged"])) <= set(labels(settings["store"], count))
    finish(start(**settings))
    assert labels(settings["store"], count) == {key: true_label(key) for key in question_keys(count)}
    bills = billed(settings["bills"])
    with Ledger(settings["store"]) as ledger:
        rows = Counter((row.request_key.removeprefix("request "), row.state) for row in attempts(ledger))
        spent = total(ledger)
    extra = sum(bills.values()) - count
    assert 0 <= extra <= kills * THREADS
    for key in question_keys(count):
        assert rows[key, "answered"] == 1
        assert rows[key, "unknown"] >= bills[key] - 1
        assert rows[key, "running"] == rows[key, "failed"] == 0
    assert spent.unknown <= kills * THREADS
    assert spent.usd == pytest.approx(0.001 * count + 0.01 * spent.unknown)


@pytest.mark.parametrize(
    ("processes", "count", "step"),
    [
        (4, 60, 20),
        pytest.param(8, 500, 0, marks=pytest.mark.slow),
        pytest.param(8, 500, 100, marks=pytest.mark.slow),
        pytest.param(8, 250, 250, marks=pytest.mark.slow),
    ],
    ids=["overlapping", "8 x the same 500", "8 x 500 overlapping", "8 x 250 disjoint"],
)
def test_processes_pay_each_question_once(tmp_path, processes, count, step):
    settings = settings_for(tmp_path, processes=processes, count=count, step=step)
    finish(start(**settings))
    keys = question_keys(count + step * (processes - 1))
    assert billed(settings["bills"]) == dict.fromkeys(keys, 1)
    with Ledger(settings["store"]) as ledger:
        assert len(lookup(ledger, *keys)) == len(keys)
        assert total(ledger).unknown == 0


def wait_for_claim(ledger, limit_s):
    owner, started = ledger.new_owner(), time.monotonic()
    while time.monotonic() - started < limit_s:
        if claim(ledger, question_keys(3), owner):
            return True
        time.sleep(0.02)
    return False


def test_a_killed_owner_loses_its_leases(tmp_path):
    holder = start(**settings_for(tmp_path, task="hold", count=3, hold_s=60, lease_s=LEASE_S))
    try:
        wait_ready(holder)
        with Ledger(tmp_path / "store", lease_s=LEASE_S) as ledger:
            assert not wait_for_claim(ledger, 2 * LEASE_S)
            holder.kill()
            assert wait_for_claim(ledger, LEASE_S + 1)
    finally:
        kill(holder)


def spend(folder, *, processes=0, budget=10.0, kill_after_s=None):
    """Runs the spenders to their end, or kills them; returns what the server has billed so far, in dollars."""
    shape = {"task": "spend", "threads": 32, "reserve_nano": 50_000_000, "processes": processes, "budget": budget}
    settings = settings_for(folder, lease_s=0.5, **shape)
    spender = start(**settings)
    if kill_after_s is None:
        finish(spender)
    else:
        wait_ready(spender)
        time.sleep(kill_after_s)
        kill(spender)
    return sum(int(line.split()[1]) for line in lines(settings["bills"])) / 1e9


@pytest.mark.parametrize(
    ("run", "processes"), [(0, 2), *(pytest.param(n, 4, marks=pytest.mark.slow) for n in range(20))]
)
def test_a_budget_is_never_passed(tmp_path, run, processes):
    """Nor by what was killed; the next run goes on with the same total, and no further than a higher budget."""
    spend(tmp_path, kill_after_s=random.Random(run).uniform(0, 0.3) if processes > 2 else 0.1)
    assert 8 < spend(tmp_path, processes=processes) <= 10
    with Ledger(tmp_path / "store") as ledger:
        spent = total(ledger)
        with pytest.raises(BudgetExceededError):
            begin(ledger, reserve_usd=0.05, budget_usd=10.0).result()
    assert 9.95 < spent.usd <= 10.0
    assert spent.unknown > 0
    assert spend(tmp_path, processes=1, budget=11.0) + spent.reserved_usd > 10.0
    with Ledger(tmp_path / "store") as ledger:
        assert 10.95 < total(ledger).usd <= 11.0
