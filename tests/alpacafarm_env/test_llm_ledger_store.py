"""Forks, many processes on one ledger, a budget that SIGKILL does not pass; and a model of all operations.

That no committed answer is lost and none is paid twice is tested through the pool: test_annotators_env.py.
"""

import random
import shutil
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule
from ledger_calls import (
    answer,
    begin,
    claim,
    finish,
    fork,
    kill,
    lines,
    lookup,
    start,
    total,
    wait_ready,
)

from alpacafarm_env.errors import BudgetExceededError, LedgerError, PriceError
from alpacafarm_env.llm.ledger import Ledger
from alpacafarm_env.llm.ledger import operations as sql
from alpacafarm_env.llm.ledger.file import connect, prepare
from alpacafarm_env.llm.ledger.operations import Claimed, Owner, Stored

# Newer Pythons warn of every fork beside threads; that it is safe here is what is tested.
pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")


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


def spend(folder, *, processes=0, budget=10.0, kill_after_s=None):
    """Runs the spenders to their end, or kills them; returns what the server has billed so far, in dollars."""
    paths = {name: str(folder / name) for name in ("store", "bills")}
    shape = {"threads": 32, "reserve_nano": 50_000_000, "latency_s": 0.005, "lease_s": 0.5}
    spender = start(**paths, **shape, processes=processes, budget=budget)
    if kill_after_s is None:
        finish(spender)
    else:
        wait_ready(spender)
        time.sleep(kill_after_s)
        kill(spender)
    return sum(int(line.split()[1]) for line in lines(paths["bills"])) / 1e9


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


LEASE_S = 15.0
CENT = sql.NANO // 100
PROCESSES, CALLS = st.sampled_from([0, 1]), st.sampled_from([0, 1])
QUESTIONS = st.lists(st.sampled_from("abcd"), max_size=4)
REQUESTS = st.sampled_from(["r", "s", "t"])
CENTS = st.none() | st.integers(0, 40)


def usd(cents):
    return None if cents is None else cents / 100


class LedgerMachine(RuleBasedStateMachine):
    """`attempts` holds [state, reserve, cost, handle, request] by id; costs are in cents."""

    running = Bundle("running")

    def __init__(self):
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.path = self.folder / "ledger.sqlite"
        prepare(self.path, replay=False)
        self.now, self.num_handles = 1000.0, 0
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(sql, "time", SimpleNamespace(monotonic=lambda: self.now))
        self.replies, self.links, self.attempts, self.leases, self.beats = {}, {}, {}, {}, {}
        self.handles, self.conns = ["", ""], [None, None]
        for process in (0, 1):
            self.open(process)

    def teardown(self):
        for conn in self.conns:
            conn.close()
        self.patch.undo()
        shutil.rmtree(self.folder)

    def do(self, process, operation, *args, **kwargs):
        conn = self.conns[process]
        conn.execute("BEGIN IMMEDIATE")
        try:
            result = operation(conn, *args, **kwargs)
        except BaseException:
            conn.execute("ROLLBACK")
            raise
        conn.execute("COMMIT")
        return result

    def open(self, process):
        """As `Ledger` does: a new handle, and what the dead have left is ended."""
        self.num_handles += 1
        self.handles[process] = str(self.num_handles)
        self.conns[process] = connect(self.path)
        self.conns[process].execute("PRAGMA synchronous = OFF")
        self.do(process, sql.reap)
        self.reap()

    def owner(self, process, call=0):
        return Owner(self.handles[process], call, LEASE_S)

    def alive(self, handle):
        beat = self.beats.get(handle, -1e9)
        return beat <= self.now < beat + LEASE_S

    def reap(self):
        self.leases = {key: owner for key, owner in self.leases.items() if self.alive(owner[0])}
        for row in self.attempts.values():
            if row[0] == "running" and not self.alive(row[3]):
                row[0] = "unknown"
        self.beats = {handle: beat for handle, beat in self.beats.items() if self.alive(handle)}

    @property
    def counted(self):
        """Cents: an attempt's cost; without one nothing if it failed, else its reserve."""
        costs = ((cost, 0 if state == "failed" else reserve) for state, reserve, cost, *_ in self.attempts.values())
        return sum((reserve or 0) if cost is None else cost for cost, reserve in costs)

    def link(self, request, questions):
        for position, question in enumerate(questions):
            _, linked, _, _, tries = self.links.get(question, ("", None, 0, 0, 0))
            if linked is None or (len(questions) == 1 and linked != request):
                size = len(questions)
                self.links[question] = Stored(self.replies[request], request, position, size, tries + (size == 1))

    @rule(process=PROCESSES, call=CALLS, questions=QUESTIONS, again=QUESTIONS)
    def claim(self, process, call, questions, again):
        owner = self.handles[process], call
        stored = {key: self.links[key] for key in questions if key in self.links}
        wanted = [key for key in dict.fromkeys(questions) if key not in stored or key in again]
        if wanted:
            self.beats[owner[0]] = self.now
            self.reap()
        mine = [key for key in wanted if self.leases.setdefault(key, owner) == owner]
        assert self.do(process, sql.claim, questions, self.owner(process, call), again) == Claimed(stored, mine)

    @rule(process=PROCESSES, call=CALLS)
    def release(self, process, call):
        self.leases = {key: owner for key, owner in self.leases.items() if owner != (self.handles[process], call)}
        self.do(process, sql.release, self.owner(process, call))

    @rule(
        target=running,
        process=PROCESSES,
        request=REQUESTS,
        questions=QUESTIONS,
        reserve=CENTS,
        budget=st.none() | st.integers(0, 100),
    )
    def begin(self, process, request, questions, reserve, budget):
        questions = list(dict.fromkeys(questions))
        settings = {"request_key": request, "host": "h", "model": "m", "label": "l", "question_keys": questions}
        settings |= {"reserve_usd": usd(reserve), "budget_usd": usd(budget), "owner": self.owner(process)}
        if request in self.replies:
            self.link(request, questions)
            assert self.do(process, sql.begin, **settings) == self.replies[request]
            return None
        if budget is not None and (reserve is None or self.counted + reserve > budget):
            with pytest.raises(PriceError if reserve is None else BudgetExceededError):
                self.do(process, sql.begin, **settings)
            return None
        attempt = self.do(process, sql.begin, **settings)
        self.beats[self.handles[process]] = self.now
        assert attempt == len(self.attempts) + 1
        self.attempts[attempt] = ["running", reserve, None, self.handles[process], request]
        return attempt

    @rule(process=PROCESSES, attempt=consumes(running), raw=st.text(max_size=9), cost=CENTS, questions=QUESTIONS)
    def succeed(self, process, attempt, raw, cost, questions):
        """Also of an attempt that was taken for dead."""
        if attempt is not None:
            questions = list(dict.fromkeys(questions))
            usage = {"prompt_tokens": 1, "completion_tokens": None, "cost_usd": usd(cost)}
            raw = raw.encode("utf-8", "replace").decode()
            request = self.attempts[attempt][4]
            self.attempts[attempt][:3] = ["answered", self.attempts[attempt][1], cost]
            self.replies.setdefault(request, raw)
            self.link(request, questions)
            stands = self.do(process, sql.succeed, attempt, raw=raw, question_keys=questions, **usage)
            assert stands == self.replies[request]
            self.ended(process, attempt)

    @rule(process=PROCESSES, attempt=consumes(running), state=st.sampled_from(["failed", "unknown"]), cost=CENTS)
    def fail(self, process, attempt, state, cost):
        if attempt is not None:
            self.attempts[attempt][:3] = [state, self.attempts[attempt][1], cost]
            self.do(process, sql.fail, attempt, error="e", status=500, state=state, cost_usd=usd(cost))
            if state == "failed":
                self.ended(process, attempt)

    def ended(self, process, attempt):
        with pytest.raises(LedgerError):
            self.do(process, sql.fail, attempt, error="e", status=None, state="failed", cost_usd=None)

    @rule(process=PROCESSES)
    def beat(self, process):
        self.do(process, sql.heartbeat, self.handles[process], LEASE_S)
        self.beats[self.handles[process]] = self.now

    @rule(seconds=st.sampled_from([1.0, LEASE_S / 2, LEASE_S, -10_000.0]))
    def pass_time(self, seconds):
        """Less than none: the machine was started again."""
        self.now += seconds

    @rule(process=PROCESSES, closed=st.booleans())
    def end_and_open_again(self, process, closed):
        """A process that was killed is seen to be dead when it no longer beats."""
        handle = self.handles[process]
        if closed:
            self.do(process, sql.reap, handle)
            self.beats.pop(handle, None)
            self.reap()
        self.conns[process].close()
        self.open(process)

    @invariant()
    def answers_are_the_models(self):
        for conn in self.conns:
            assert sql.lookup(conn, "abcde") == self.links

    @invariant()
    def money_and_leases_are_the_models(self):
        found = sql.spending(self.conns[0]).sum()
        states = [
            "unknown" if state == "running" and not self.alive(handle) else state
            for state, _, _, handle, _ in self.attempts.values()
        ]
        for state in ("answered", "failed", "unknown", "running"):
            assert getattr(found, state) == states.count(state)
        assert found.usd == pytest.approx(self.counted / 100, abs=1e-9)
        assert self.conns[1].execute("SELECT counted FROM totals").fetchall() == [(self.counted * CENT,)]
        held = self.conns[1].execute("SELECT question, handle, call FROM leases").fetchall()
        assert {key: owner for key, *owner in held} == {key: list(owner) for key, owner in self.leases.items()}


LedgerMachine.TestCase.settings = settings(max_examples=30, stateful_step_count=30)
TestLedger = LedgerMachine.TestCase
