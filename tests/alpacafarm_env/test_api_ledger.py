"""The ledger's operations, its file, and replay."""

import json
import os
import stat
from pathlib import Path

import pytest
from ledger_reads import attempts
from ledger_workers import answer, begin, read_beside, succeed, together

from alpacafarm_env.errors import BudgetExceededError, LedgerError, PriceError, ReplayMissError
from alpacafarm_env.llm.ledger import operations as sql
from alpacafarm_env.llm.ledger.store import Ledger, default_path, shared_ledger


def names(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


@pytest.fixture
def ledger(tmp_path):
    with Ledger(tmp_path / "ledger.sqlite") as opened:
        yield opened


@pytest.mark.parametrize("raw", ["{}", 'NUL \0, "quotes", 日本 🙂\r\n', "x" * 200_000])
def test_an_answer_comes_back_as_it_was(ledger, raw):
    assert answer(ledger, "r", ["a", "b"], raw) == raw
    found = ledger.do(sql.lookup, ["b", "a", "none", "a"]).result()
    assert found == {"a": sql.Stored(raw, "r", 0, 2, 0), "b": sql.Stored(raw, "r", 1, 2, 0)}
    assert ledger.do(sql.stored_reply, "r").result() == raw
    assert ledger.do(sql.stored_reply, "other").result() is None


def test_the_first_reply_to_a_request_stands(ledger):
    assert answer(ledger, raw='{"label": 0}') == '{"label": 0}'
    assert answer(ledger, raw='{"label": 1}') == '{"label": 0}'
    assert ledger.do(sql.lookup, ["q"]).result()["q"].raw == '{"label": 0}'


def test_tries_count_requests_with_the_question_alone(ledger):
    tries = lambda: ledger.do(sql.lookup, ["q"]).result()["q"].tries
    answer(ledger, "batch", ["p", "q"])
    assert tries() == 0
    answer(ledger, "alone 1", ["q"])
    assert tries() == 1
    ledger.do(sql.link, "alone 1", ["q"]).result()  # the same answer again is no further try
    assert tries() == 1
    answer(ledger, "alone 2", ["q"])
    assert ledger.do(sql.lookup, ["q"]).result()["q"] == sql.Stored('{"label": 1}', "alone 2", 0, 1, 2)


def test_a_shared_reply_that_comes_late_takes_no_answer_away(ledger):
    """Of two that shared requests with "q", the second had lost its lease; the first may have been used by now."""
    answer(ledger, "first", ["p", "q"])
    assert answer(ledger, "late", ["q", "r"], '{"label": 0}') == '{"label": 0}'
    found = ledger.do(sql.lookup, ["p", "q", "r"]).result()
    assert {key: (one.request_key, one.position) for key, one in found.items()} == {
        "p": ("first", 0), "q": ("first", 1), "r": ("late", 1),
    }  # fmt: skip
    answer(ledger, "alone", ["q"])
    answer(ledger, "later still", ["q", "r"])
    assert ledger.do(sql.lookup, ["q"]).result()["q"] == sql.Stored('{"label": 1}', "alone", 0, 1, 1)


def test_a_link_needs_a_stored_reply(ledger):
    with pytest.raises(LedgerError):
        ledger.do(sql.link, "never asked", ["q"]).result()
    assert ledger.do(sql.lookup, ["q"]).result() == {}


def test_failures_are_recorded_and_never_answers(ledger):
    told = {"status": 500, "state": "failed", "cost_usd": None}
    attempt = begin(ledger).result()
    ledger.do(sql.fail, attempt, error="lone \ud800 surrogate" + "x" * 9_000, **told).result()
    assert ledger.do(sql.lookup, ["q"]).result() == {}
    (row,) = ledger.do(attempts).result()
    assert (row.state, row.status, row.reserve_usd, row.cost_usd) == ("failed", 500, 0.1, None)
    assert row.error.startswith("lone ? surrogate")
    assert len(row.error) == sql.MAX_ERROR_CHARS
    for ending in (succeed(ledger, attempt), ledger.do(sql.fail, attempt, error="", **told), succeed(ledger, 99)):
        with pytest.raises(LedgerError, match="is not running"):
            ending.result()
    with pytest.raises(ValueError, match="expected state"):
        ledger.do(sql.fail, begin(ledger).result(), error="", **{**told, "state": "answered"}).result()


def test_spending_counts_costs_and_reserves(ledger):
    answer(ledger, "1", ["a", "b"])
    succeed(ledger, begin(ledger, "2", num_questions=2).result(), "cd", cost_usd=None, tokens=(None, None)).result()
    fail = lambda state, cost: ledger.do(
        sql.fail, begin(ledger, label="other").result(), error="e", status=None, state=state, cost_usd=cost
    ).result()
    fail("failed", None)
    fail("failed", 0.02)
    fail("unknown", None)
    fail("unknown", 0.03)
    succeed(ledger, begin(ledger, "3", reserve_usd=None).result(), "e", cost_usd=None).result()
    running = begin(ledger, "4")
    running.result()
    spending = ledger.do(sql.spending).result()
    total = spending.total
    assert (total.answered, total.failed, total.unknown, total.running) == (3, 2, 2, 1)
    assert (total.answered_usd, total.failed_usd, total.unknown_usd, total.running_usd) == (0.15, 0.02, 0.13, 0.1)
    assert total.usd == pytest.approx(0.4)
    assert (total.attempts, total.questions, total.prompt_tokens, total.completion_tokens) == (8, 4, 20, 4)
    assert total.unpriced == 1
    assert list(spending.groups) == [("h", "m", "l"), ("h", "m", "other")]
    assert spending.groups["h", "m", "other"].attempts == 4
    assert read_beside(ledger.path, "SELECT counted FROM totals") == [(400_000_000,)]


def test_attempts_of_a_closed_ledger_are_unknown(tmp_path):
    with Ledger(tmp_path / "l") as ledger:
        begin(ledger).result()
        ledger.do(sql.claim, ["q"], ledger.new_owner()).result()
    with Ledger(tmp_path / "l") as ledger:
        total = ledger.do(sql.spending).result().total
        assert (total.unknown, total.unknown_usd, total.running) == (1, 0.1, 0)
        assert ledger.do(sql.claim, ["q"], ledger.new_owner()).result() == ["q"]


def test_an_attempt_taken_for_dead_may_still_end(ledger):
    attempt = begin(ledger).result()
    ledger.do(sql.reap, ledger._handle).result()  # as another process would after this one had been stopped
    assert ledger.do(sql.spending).result().total.unknown == 1
    succeed(ledger, attempt).result()
    assert ledger.do(sql.spending).result().total.answered_usd == 0.05


def test_the_budget_counts_reserves_to_the_cent(ledger):
    for _ in range(10):
        begin(ledger, reserve_usd=0.1, budget_usd=1.0).result()
    with pytest.raises(BudgetExceededError, match=r"\$1.0000 are spent or reserved.*could cost \$0.0000.*kept"):
        begin(ledger, reserve_usd=1e-9, budget_usd=1.0).result()
    begin(ledger, reserve_usd=1e-9, budget_usd=1.1).result()
    with pytest.raises(PriceError, match="no price is known for the model 'm'"):
        begin(ledger, reserve_usd=None, budget_usd=5.0).result()
    begin(ledger, reserve_usd=None).result()
    assert ledger.do(sql.spending).result().total.running == 12


@pytest.mark.parametrize("wrong", [-1.0, float("nan"), float("inf"), 1e12])
def test_impossible_amounts_are_refused(ledger, wrong):
    with pytest.raises(ValueError, match="expected"):
        begin(ledger, reserve_usd=wrong).result()
    with pytest.raises(ValueError, match="expected"):
        begin(ledger, budget_usd=wrong).result()
    attempt = begin(ledger).result()
    with pytest.raises(ValueError, match="expected"):
        succeed(ledger, attempt, cost_usd=wrong).result()
    assert ledger.do(sql.lookup, ["q"]).result() == {}


@pytest.mark.parametrize("wrong", [-0.01, float("nan"), float("inf"), 1e9 + 1, "5", True, [5]])
def test_budgets_that_are_no_amount(wrong):
    with pytest.raises(ValueError, match=r"budget_usd: expected US dollars from 0 to 1,000,000,000, .*; got "):
        sql.check_budget(wrong)
    for amount in (None, 0, 0.5, sql.MAX_USD):
        sql.check_budget(amount)


def test_a_closed_ledger_refuses(ledger):
    ledger.close()
    ledger.close()
    with pytest.raises(LedgerError, match="is closed"):
        ledger.do(sql.lookup, [])
    with pytest.raises(ValueError, match="lease_s"):
        Ledger(ledger.path, lease_s=0)


def test_a_file_that_is_replaced_in_use_is_noticed(ledger):
    answer(ledger)
    ledger.path.rename(ledger.path.with_suffix(".old"))
    with pytest.raises(LedgerError, match="removed or replaced"):
        ledger.do(sql.lookup, ["q"]).result()
    ledger.path.write_bytes(b"something else")
    with pytest.raises(LedgerError, match="removed or replaced"):
        begin(ledger).result()
    assert ledger.path.read_bytes() == b"something else"


@pytest.mark.parametrize("size", [0, 50, 4096, -1])
def test_a_file_that_is_cut_in_use_is_noticed_at_once(ledger, size):
    answer(ledger)
    whole = ledger.path.read_bytes()
    os.truncate(ledger.path, size % len(whole))
    for operation in (lambda: ledger.do(sql.lookup, ["q"]), lambda: begin(ledger)):
        with pytest.raises(LedgerError, match="cut"):
            operation().result()
    ledger.path.write_bytes(whole + whole)  # what comes in its place is not written to either
    with pytest.raises(LedgerError, match="cut"):
        begin(ledger).result()


def test_a_ledger_that_grows_through_another_handle_is_whole(ledger):
    answer(ledger)
    before = ledger.path.stat().st_size
    with Ledger(ledger.path) as other:
        for number in range(20):
            answer(other, f"r{number}", [f"q{number}"], json.dumps("x" * 2**20))
    assert ledger.path.stat().st_size > before
    assert list(ledger.do(sql.lookup, ["q", "q19"]).result()) == ["q", "q19"]


def test_the_shared_ledger_of_a_file_that_was_removed_is_a_new_one(tmp_path):
    path, wal = tmp_path / "l", tmp_path / "l-wal"
    old = shared_ledger(path)
    answer(old)
    assert shared_ledger(path) is old
    path.rename(tmp_path / "away")
    assert shared_ledger(path) is old  # the log still is where a new file would take it for its own
    wal.unlink()
    wal.with_name("l-shm").unlink()
    new = shared_ledger(path)
    try:
        assert new.do(sql.lookup, ["q"]).result() == {}
        answer(new, "r", ["other"])
        with pytest.raises(LedgerError, match="removed or replaced"):
            begin(old).result()
        old.close()
        assert list(new.do(sql.lookup, ["q", "other"]).result()) == ["other"]
    finally:
        new.close()
    with Ledger(path) as again:
        assert list(again.do(sql.lookup, ["q", "other"]).result()) == ["other"]


def test_replay_serves_what_is_stored_and_asks_nothing(ledger):
    answer(ledger, "r", ["a"])
    ledger.close()
    before = ledger.path.read_bytes()
    with Ledger(ledger.path, replay=True) as replayed:
        owner = replayed.new_owner()
        assert list(replayed.do(sql.lookup, ["a", "b"]).result()) == ["a"]
        assert replayed.do(sql.claim, ["b", "b"], owner).result() == ["b"]
        replayed.do(sql.link, "r", ["b"]).result()
        replayed.do(sql.release, ["b"], owner).result()
        with pytest.raises(ReplayMissError, match="Run without replay"):
            begin(replayed).result()
        with pytest.raises(LedgerError, match="nothing can be stored"):
            succeed(replayed, 1).result()
        assert replayed.do(sql.spending).result().total.answered == 1
    assert ledger.path.read_bytes() == before
    with pytest.raises(LedgerError, match="no ledger at"):
        Ledger(ledger.path.with_name("none"), replay=True)


def test_replay_beside_a_writer(ledger):
    answer(ledger, "r", ["a"])
    with Ledger(ledger.path, replay=True) as replayed:
        answer(ledger, "s", ["b"])
        assert sorted(replayed.do(sql.lookup, ["a", "b"]).result()) == ["a", "b"]


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
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert default_path() == tmp_path / ".cache/alpacafarm-env/ledger.sqlite"
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert str(default_path()) == "/cache/alpacafarm-env/ledger.sqlite"
    monkeypatch.setenv("ALPACAFARM_LEDGER", "~/mine")
    assert default_path() == tmp_path / "mine"
    for named in (None, "~/mine", Path("~/mine")):
        with Ledger(named) as ledger:
            assert ledger.path == tmp_path / "mine"
        with shared_ledger(named) as ledger:
            assert ledger.path == tmp_path / "mine"


def test_threads_create_one_ledger(tmp_path):
    opened = together(8, lambda _: Ledger(tmp_path / "l"))
    for number, ledger in enumerate(opened):
        answer(ledger, str(number), [str(number)])
    assert len(opened[0].do(sql.lookup, [str(n) for n in range(8)]).result()) == 8
    for ledger in opened:
        ledger.close()
    assert names(tmp_path) == ["l"]
