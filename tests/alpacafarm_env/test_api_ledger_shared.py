"""Many processes on one ledger: each question is paid once, a dead owner is replaced, and a budget is never passed."""

import random
import time
from pathlib import Path

import pytest
from ledger_workers import billed, finish, lines, question_keys, start

from alpacafarm_env.errors import BudgetExceededError
from alpacafarm_env.llm.ledger import operations as sql
from alpacafarm_env.llm.ledger.store import Ledger

LEASE_S = 0.6


def settings_for(folder: Path, kind: str, **more) -> dict:
    paths = {name: str(folder / name) for name in ("store", "bills", "acknowledged")}
    common = {"task": "ask", "kind": kind, "first": 0, "order": 0, "threads": 8, "batch": 32, "latency_s": 0.005}
    return {**common, **paths, "lease_s": 15.0, **more}


def assert_paid_once(settings: dict, keys: list[str]) -> None:
    bills = billed(settings["bills"])
    assert set(bills) == set(keys)
    assert sum(bills.values()) == len(keys), f"{sum(bills.values())} payments for {len(keys)} questions"


@pytest.mark.parametrize(
    ("processes", "count", "step"),
    [
        (4, 60, 0),
        (4, 60, 20),
        pytest.param(8, 500, 0, marks=pytest.mark.slow),
        pytest.param(8, 500, 100, marks=pytest.mark.slow),
        pytest.param(8, 250, 250, marks=pytest.mark.slow),
    ],
    ids=["same", "overlapping", "8 x the same 500", "8 x 500 overlapping", "8 x 250 disjoint"],
)
def test_processes_pay_each_question_once(tmp_path, processes, count, step):
    settings = settings_for(tmp_path, "ledger", processes=processes, count=count, step=step)
    started = time.monotonic()
    finish(start(**settings))  # fails on anything in stderr, "database is locked" included
    keys = question_keys(count + step * (processes - 1))
    assert_paid_once(settings, keys)
    with Ledger(settings["store"]) as ledger:
        assert len(ledger.do(sql.lookup, keys).result()) == len(keys)
        assert ledger.do(sql.spending).result().total.unknown == 0
    print(f"{processes} processes, {len(keys)} questions paid once in {time.monotonic() - started:.1f} s")


def test_without_a_lease_the_twin_pays_twice(tmp_path):
    settings = settings_for(tmp_path, "no_lease", processes=4, count=60)
    finish(start(**settings))
    with pytest.raises(AssertionError, match="payments for 60 questions"):
        assert_paid_once(settings, question_keys(60))


def wait_for_claim(ledger: Ledger, keys: list[str], limit_s: float) -> float:
    owner, started = ledger.new_owner(), time.monotonic()
    while time.monotonic() - started < limit_s:
        if ledger.do(sql.claim, keys, owner).result():
            return time.monotonic() - started
        time.sleep(0.02)
    return float("inf")


def test_a_living_owner_keeps_its_keys_and_a_killed_one_loses_them(tmp_path):
    keys = question_keys(3)
    holder = start(**settings_for(tmp_path, "ledger", task="hold", count=3, hold_s=60, lease_s=LEASE_S))
    try:
        assert holder.stdout.readline() == b"ready\n", holder.stderr.read().decode()
        with Ledger(tmp_path / "store", lease_s=LEASE_S) as ledger:
            assert wait_for_claim(ledger, keys, 2 * LEASE_S) == float("inf")
            holder.kill()
            assert wait_for_claim(ledger, keys, LEASE_S + 1) <= LEASE_S + 1
    finally:
        holder.kill()
        holder.communicate()


def test_without_beats_the_twin_loses_its_keys_while_it_lives(tmp_path):
    holder = start(**settings_for(tmp_path, "no_beat", task="hold", count=3, hold_s=60, lease_s=LEASE_S))
    try:
        assert holder.stdout.readline() == b"ready\n", holder.stderr.read().decode()
        with Ledger(tmp_path / "store", lease_s=LEASE_S) as ledger:
            assert wait_for_claim(ledger, question_keys(3), 2 * LEASE_S) < 2 * LEASE_S
    finally:
        holder.kill()
        holder.communicate()


def test_a_process_that_ends_without_closing_frees_its_keys_at_once(tmp_path):
    finish(start(**settings_for(tmp_path, "ledger", task="hold", count=3, hold_s=0)))
    with Ledger(tmp_path / "store") as ledger:
        assert wait_for_claim(ledger, question_keys(3), 1) < 1


def test_two_calls_of_one_process_are_two_claimants(tmp_path):
    with Ledger(tmp_path / "store") as ledger:
        first, second = ledger.new_owner(), ledger.new_owner()
        assert ledger.do(sql.claim, ["a", "b", "a"], first).result() == ["a", "b"]
        assert ledger.do(sql.claim, ["b", "c"], second).result() == ["c"]
        ledger.do(sql.release, ["a", "b", "c"], second).result()  # of another's leases nothing
        assert ledger.do(sql.claim, ["a", "b", "c"], ledger.new_owner()).result() == ["c"]
        ledger.do(sql.release, ["a", "b"], first).result()
        assert ledger.do(sql.claim, ["a", "b", "c"], second).result() == ["a", "b"]


def test_a_beat_from_before_a_restart_of_the_machine_is_dead(tmp_path):
    with Ledger(tmp_path / "store") as ledger:
        owner = ledger.new_owner()
        ledger.do(sql.claim, ["a"], owner).result()
        future = ("UPDATE owners SET beat = ?", (time.monotonic() + 10_000,))
        ledger.do(lambda conn: conn.execute(*future).rowcount).result()
        with Ledger(tmp_path / "store") as other:
            assert other.do(sql.claim, ["a"], other.new_owner()).result() == ["a"]


def spend(folder: Path, kind: str, *, processes: int, budget: float, kill_after_s: float | None = None) -> float:
    """Runs the spenders to their end, or kills them; returns what the server has billed so far, in dollars."""
    shape = {"task": "spend", "processes": processes, "threads": 32, "budget": budget, "reserve_nano": 50_000_000}
    settings = settings_for(folder, kind, lease_s=0.5, **shape)
    if kill_after_s is None:
        finish(start(**settings))
    else:
        spender = start(**{**settings, "processes": 0})
        assert spender.stdout.readline() == b"ready\n", spender.stderr.read().decode()
        time.sleep(kill_after_s)
        spender.kill()
        spender.communicate()
    return sum(int(line.split()[1]) for line in lines(settings["bills"])) / 1e9


def check_cap(folder: Path, kind: str, processes: int, kill_after_s: float | None = None) -> float:
    if kill_after_s is not None:
        spend(folder, kind, processes=1, budget=10.0, kill_after_s=kill_after_s)
    billed_usd = spend(folder, kind, processes=processes, budget=10.0)
    assert billed_usd <= 10.0, f"the server has billed ${billed_usd:.2f} of $10.00"
    return billed_usd


def check_resume(folder: Path) -> None:
    """The next run goes on with the same total: nothing more under the old cap, and no more than the new one."""
    with Ledger(folder / "store") as ledger:
        total = ledger.do(sql.spending).result().total
        told = {"request_key": "next", "host": "toy", "model": "toy", "label": "", "num_questions": 1}
        owner = ledger.new_owner()
        with pytest.raises(BudgetExceededError, match="higher budget"):
            ledger.do(sql.begin, **told, reserve_usd=0.05, budget_usd=10.0, owner=owner).result()
    assert 9.95 < total.usd <= 10.0
    assert total.unknown > 0
    assert spend(folder, "ledger", processes=1, budget=11.0) + total.unknown_usd > 10.0
    with Ledger(folder / "store") as ledger:
        assert 10.95 < ledger.do(sql.spending).result().total.usd <= 11.0


def test_a_budget_is_never_passed(tmp_path):
    assert check_cap(tmp_path, "ledger", processes=2, kill_after_s=0.1) > 8
    check_resume(tmp_path)


@pytest.mark.slow
def test_a_budget_is_never_passed_in_20_runs(tmp_path):
    spent = []
    for run in range(20):
        (folder := tmp_path / str(run)).mkdir()
        spent.append(check_cap(folder, "ledger", 4, random.Random(run).uniform(0, 0.3)))
        check_resume(folder)
    print(f"billed of $10.00 in 20 runs: ${min(spent):.3f} to ${max(spent):.3f}")


def test_checking_first_and_recording_later_the_twin_passes_the_budget(tmp_path):
    with pytest.raises(AssertionError, match="of \\$10.00"):
        check_cap(tmp_path, "check_then_record", processes=2)
