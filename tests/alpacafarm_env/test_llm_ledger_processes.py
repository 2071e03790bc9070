"""Many processes on one ledger, and SIGKILL at any moment.

No answer that was committed is lost, each question is paid once, a dead owner is replaced, a budget is never passed.
The long forms are the goal: 50 kills over 2,000 questions, 8 processes, 20 budgets.
"""

import json
import os
import random
import subprocess
import sys
import time
from collections import Counter

import pytest
from ledger_calls import attempts, begin, claim, lookup, total
from ledger_workers import billed, finish, kill, lines, question_keys, start, true_label, wait_ready

from alpacafarm_env.errors import BudgetExceededError
from alpacafarm_env.llm.ledger.operations import identity, is_gone
from alpacafarm_env.llm.ledger.store import Ledger

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
    survived = len(labels(settings["store"], count))
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
    print(f"{kills} kills, {count} questions: {survived} kept before the last run, {extra} extra charges")


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


def test_a_living_owner_keeps_its_keys_and_a_killed_one_loses_them(tmp_path):
    holder = start(**settings_for(tmp_path, task="hold", count=3, hold_s=60, lease_s=LEASE_S))
    try:
        wait_ready(holder)
        with Ledger(tmp_path / "store", lease_s=LEASE_S) as ledger:
            assert not wait_for_claim(ledger, 2 * LEASE_S)
            holder.kill()
            assert wait_for_claim(ledger, LEASE_S + 1)
    finally:
        kill(holder)


def test_a_process_that_ends_without_closing_frees_its_keys_at_once(tmp_path):
    finish(start(**settings_for(tmp_path, task="hold", count=3, hold_s=0)))
    with Ledger(tmp_path / "store") as ledger:
        assert wait_for_claim(ledger, 1)


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
    assert spend(tmp_path, processes=1, budget=11.0) + spent.unknown_usd > 10.0
    with Ledger(tmp_path / "store") as ledger:
        assert 10.95 < total(ledger).usd <= 11.0


# ------------------------------------------------------------------------------------------- who is gone

LINUX = pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="needs /proc")  # noqa: PTH110
TELL = """import sys
from alpacafarm_env.llm.ledger.operations import identity
print(identity(), flush=True)
sys.stdin.read()"""


@LINUX
@pytest.mark.parametrize("waited", [True, False])
def test_a_killed_process_is_gone_waited_for_or_not(waited):
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", TELL], **pipes) as child:
        who = child.stdout.readline().strip()
        assert str(child.pid) in who
        assert not is_gone(who)
        child.kill()
        if waited:
            child.wait()
        else:
            os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # ended, still in the table
        assert is_gone(who)


@LINUX
def test_a_number_used_again_is_another_process():
    assert not is_gone(identity())
    namespace, pid, begun = identity().rsplit("/", 2)
    assert is_gone(f"{namespace}/{pid}/{int(begun) - 1}")


@pytest.mark.parametrize("who", ["", "nonsense", "pid:[1]/1/1", "/1/1"])
def test_what_cannot_be_known_is_not_gone(who):
    assert not is_gone(who)
