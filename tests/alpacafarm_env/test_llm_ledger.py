"""A ledger as its users see it: amounts, its file in use, replay. (All orders of operations: the state machine.)"""

import json
import os
import re
import stat
from math import inf, nan
from pathlib import Path

import pytest
from ledger_calls import answer, attempts, begin, claim, fail, lookup, read_beside, succeed, total

from alpacafarm_env.errors import BudgetExceededError, LedgerError, PriceError, ReplayMissError
from alpacafarm_env.llm.ledger import Ledger, shared_ledger
from alpacafarm_env.llm.ledger import operations as sql
from alpacafarm_env.llm.ledger.file import default_path


def names(folder):
    return sorted(file.name for file in folder.iterdir())


@pytest.mark.parametrize("raw", ['NUL \0, "quotes", 日本 🙂\r\n', "x" * 200_000])
def test_an_answer_comes_back_as_it_was(ledger, raw):
    assert answer(ledger, "r", ["a", "b"], raw) == raw
    assert lookup(ledger, "b", "a", "none", "a") == {
        "a": sql.Stored(raw, "r", 0, 2, 0),
        "b": sql.Stored(raw, "r", 1, 2, 0),
    }
    assert begin(ledger, "r").result() == raw


def test_failures_are_recorded_and_end_once(ledger):
    attempt = begin(ledger).result()
    fail(ledger, attempt, "lone \ud800 surrogate" + "x" * 9_000, status=500).result()
    (row,) = attempts(ledger)
    assert (row.state, row.status, row.cost) == ("failed", 500, None)
    assert row.error.startswith("lone ? surrogate")
    assert len(row.error) == sql.MAX_ERROR_CHARS
    for ending in (succeed(ledger, attempt), fail(ledger, attempt), succeed(ledger, 99)):
        with pytest.raises(LedgerError, match=f"Attempt ({attempt}|99) "):
            ending.result()


def test_spending_is_summed_by_state_and_group(ledger):
    answer(ledger, "1", ["a", "b"])
    succeed(ledger, begin(ledger, "2", questions="cd").result(), "cd", cost_usd=None, tokens=(None, None)).result()
    for state, cost in (("failed", None), ("failed", 0.02), ("unknown", None), ("unknown", 0.03)):
        fail(ledger, begin(ledger, label="other").result(), state=state, cost_usd=cost).result()
    succeed(ledger, begin(ledger, "3", reserve_usd=None).result(), "e", cost_usd=None).result()
    begin(ledger, "4").result()
    spending = ledger.do(sql.spending).result()
    assert spending.total == sql.AttemptTotals(3, 2, 2, 1, 0.15, 0.02, 0.13, 0.1, 4, 20, 4, 1)
    groups = {group: tally.attempts for group, tally in spending.groups.items()}
    assert groups == {("h", "m", "l"): 4, ("h", "m", "other"): 4}
    assert read_beside(ledger.path, "SELECT counted FROM totals") == [(400_000_000,)]


def test_closing_ends_attempts_and_leases(tmp_path):
    with Ledger(tmp_path / "l") as ledger:
        begin(ledger).result()
        claim(ledger, ["q"])
    ledger.close()
    with pytest.raises(LedgerError, match="closed"):
        ledger.do(sql.lookup, [])
    with Ledger(tmp_path / "l") as ledger:
        assert (total(ledger).unknown, total(ledger).running) == (1, 0)
        assert claim(ledger, ["q"]) == ["q"]


def test_the_budget_counts_reserves_to_the_nanodollar(ledger):
    for number in range(10):
        begin(ledger, str(number), reserve_usd=0.1, budget_usd=1.0).result()
    fail(ledger, 1, cost_usd=0.1).result()
    with pytest.raises(BudgetExceededError) as caught:
        begin(ledger, reserve_usd=1e-9, budget_usd=1.0).result()
    # The budget, what is spent, reserved, and asked for.
    assert re.findall(r"\$(\d\.\d+)", str(caught.value)) == ["1.0000", "0.1000", "0.9000", "0.0000"]
    begin(ledger, reserve_usd=1e-9, budget_usd=1.1).result()
    with pytest.raises(PriceError, match="'m'"):
        begin(ledger, reserve_usd=None, budget_usd=5.0).result()
    assert total(ledger).running == 10


@pytest.mark.parametrize("wrong", [-1.0, nan, inf, 1e12])
def test_impossible_amounts_are_refused(ledger, wrong):
    attempt = begin(ledger).result()
    uses = (begin(ledger, reserve_usd=wrong), begin(ledger, budget_usd=wrong), succeed(ledger, attempt, cost_usd=wrong))
    for use in uses:
        with pytest.raises(ValueError, match=str(wrong).replace("+", ".")):
            use.result()
    assert lookup(ledger, "q") == {}
    with pytest.raises(ValueError, match="budget_usd.* 1,000,000,000"):
        sql.check_budget(wrong)


def test_another_handles_growth_is_no_damage(ledger):
    answer(ledger)
    before = ledger.path.stat().st_size
    with Ledger(ledger.path) as other:
        answer(other, "r5", ["q5"], json.dumps("x" * 2**23))
    assert ledger.path.stat().st_size > before
    assert list(lookup(ledger, "q", "q5")) == ["q", "q5"]


def test_a_removed_file_is_noticed(tmp_path):
    path = tmp_path / "l"
    old = shared_ledger(path)
    answer(old)
    assert shared_ledger(path) is old
    path.rename(tmp_path / "away")
    with pytest.raises(LedgerError, match="replaced"):
        begin(old).result()
    old.close()
    for log in tmp_path.glob("l-*"):
        log.unlink()
    with shared_ledger(path) as new:
        assert lookup(new, "q") == {}


def test_replay_reads_and_writes_nothing(ledger):
    answer(ledger, "r", ["a"])
    with Ledger(ledger.path, replay=True) as replayed:  # beside a writer
        answer(ledger, "s", ["s"])
        assert list(lookup(replayed, "a", "b", "s")) == ["a", "s"]
    ledger.close()
    before = ledger.path.read_bytes()
    with Ledger(ledger.path, replay=True) as replayed:
        with pytest.raises(ReplayMissError):
            begin(replayed)
        for write in (succeed, lambda ledger, _: claim(ledger, ["b"])):
            with pytest.raises(LedgerError):
                write(replayed, 1)
        assert total(replayed).answered == 2
    assert ledger.path.read_bytes() == before
    with pytest.raises(LedgerError, match="none"):
        Ledger(ledger.path.with_name("none"), replay=True)
    assert not ledger.path.with_name("none").exists()


def test_only_the_owner_can_read_the_file(tmp_path):
    old = os.umask(0)
    try:
        with Ledger(tmp_path / "new" / "ledger") as ledger:
            answer(ledger)
            modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in (tmp_path / "new").iterdir()}
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o700
    assert modes == dict.fromkeys(["ledger", "ledger-wal", "ledger-shm"], 0o600)
    assert names(tmp_path / "new") == ["ledger"]


def test_the_default_path(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("ALPACAFARM_LEDGER", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert default_path() == tmp_path / ".cache/alpacafarm-env/ledger.sqlite"
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert str(default_path()) == "/cache/alpacafarm-env/ledger.sqlite"
    monkeypatch.setenv("ALPACAFARM_LEDGER", "~/mine")
    for named in (None, "~/mine", Path("~/mine")):
        for opens in (Ledger, shared_ledger):
            with opens(named) as ledger:
                assert ledger.path == default_path() == tmp_path / "mine"
