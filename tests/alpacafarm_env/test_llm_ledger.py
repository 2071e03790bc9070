"""A ledger as its users see it; damaged and foreign files, which serve no wrong answer and stay as they are."""

import json
import os
import random
import re
import shutil
import sqlite3
import stat
import tempfile
from contextlib import closing
from functools import partial
from hashlib import sha256
from math import inf, nan
from pathlib import Path
from types import SimpleNamespace

import pytest
from ledger_calls import answer, attempts, begin, claim, fail, fork, lookup, read_beside, succeed, total

from alpacafarm_env.errors import BudgetExceededError, LedgerError, PriceError, ReplayMissError
from alpacafarm_env.llm import ledger as ledger_module
from alpacafarm_env.llm.ledger import Ledger, shared_ledger
from alpacafarm_env.llm.ledger import file as ledger_file
from alpacafarm_env.llm.ledger import operations as sql
from alpacafarm_env.llm.ledger.file import default_path


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
    counts = {"answered": 3, "failed": 2, "unknown": 2, "running": 1, "prompt_tokens": 20, "completion_tokens": 4}
    assert spending.sum().to_dict() == pytest.approx(
        {**counts, "usd": 0.4, "reserved_usd": 0.23, "questions": 4, "unpriced": 1}
    )
    states = ["answered", "failed", "unknown", "running"]
    assert spending[states].sum(axis=1).to_dict() == {("h", "m", "l"): 4, ("h", "m", "other"): 4}
    assert read_beside(ledger.path, "SELECT counted FROM totals") == [(400_000_000,)]


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
        waiting = begin(ledger, "waiting").result()
        while refused is None:
            attempt = begin(ledger, str(len(kept))).result()
            refused = succeed(ledger, attempt, [str(len(kept))], raw="x" * 10_000).exception()
            kept += [] if refused else [str(len(kept))]
        assert isinstance(refused, LedgerError)
        assert "disk is full" in str(refused)
        with pytest.raises(LedgerError, match="No more requests"):
            begin(ledger, "next").result()
        succeed(ledger, waiting, ["small"], raw="{}").result()  # what was paid and still fits is kept
    with Ledger(tmp_path / "l") as ledger:
        assert len(kept) > 5
        assert set(lookup(ledger, *kept, str(len(kept)), "small")) == {*kept, "small"}
        assert (total(ledger).answered, total(ledger).unknown) == (len(kept) + 1, 1)


def test_requests_go_on_after_room_was_made(ledger):
    def fill(conn):
        conn.execute("PRAGMA max_page_count = 1")
        conn.execute("INSERT INTO replies SELECT 'large', hex(zeroblob(10000000)), '', ''")

    owner = ledger.new_owner()
    assert "disk is full" in str(ledger.do(fill).exception())
    for make_room in (lambda conn: None, lambda conn: conn.execute("PRAGMA max_page_count = 1000000").close()):
        ledger.do(make_room).result()
        ledger.do(sql.release, owner).result()  # small rows fit all the time, and say nothing of answers
        with pytest.raises(LedgerError, match="No more requests"):
            begin(ledger).result()
    assert claim(ledger, ["q"], owner) == ["q"]
    answer(ledger)


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
    assert [file.name for file in (tmp_path / "new").iterdir()] == ["ledger"]
    with pytest.raises(LedgerError, match="closed"):
        answer(ledger)


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


pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
KEYS = [f"question {i}" for i in range(60)]


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """A ledger of 30 requests with two questions each."""
    path = tmp_path_factory.mktemp("sound") / "ledger.sqlite"
    with Ledger(path) as ledger:
        for i in range(0, len(KEYS), 2):
            raw = json.dumps({"label": i % 4 // 2, "text": f"answer {i} " * 20})
            answer(ledger, f"request {i}", KEYS[i : i + 2], raw)
    assert not Path(f"{path}-wal").exists()
    return path


def read_all(path):
    """All answers the file serves, question by question; LedgerError only if it cannot be opened."""
    served = {}
    with Ledger(path) as ledger:
        for key in KEYS:
            try:
                served |= lookup(ledger, key)
            except LedgerError:
                continue
    return served


def mutate(data, rng):
    kind, place = rng.choice(["bit", "run", "zeros", "cut"]), rng.randrange(len(data))
    if kind == "bit":
        data[place] ^= 1 << rng.randrange(8)
    elif kind == "run":
        data[place : place + 64] = rng.randbytes(len(data[place : place + 64]))
    elif kind == "zeros":
        page = place // 4096 * 4096
        data[page : page + 4096] = bytes(len(data[page : page + 4096]))
    else:
        del data[place:]
    return kind


@pytest.mark.parametrize("count", [60, pytest.param(3_000, marks=pytest.mark.slow)])
def test_damaged_files_serve_no_wrong_answer(sound, tmp_path, count):
    truth, refused, less = read_all(sound), 0, 0
    assert len(truth) == len(KEYS)
    for seed in range(count):
        data = bytearray(sound.read_bytes())
        kind = mutate(data, random.Random(seed))
        path = tmp_path / f"{seed}.sqlite"
        path.write_bytes(data)
        try:
            served = read_all(path)
        except LedgerError:
            assert path.read_bytes() == data, f"mutation {seed} ({kind}): the refused file was changed"
            refused += 1
        else:
            wrong = [key for key, stored in served.items() if stored != truth[key]]
            assert not wrong, f"mutation {seed} ({kind}): wrong answers served for {wrong}"
            less += len(served) < len(truth)
        for leftover in tmp_path.glob(f"{seed}.sqlite*"):
            leftover.unlink()
    assert min(refused, less) > 0


def test_a_flipped_label_is_refused(sound, tmp_path):
    """The file stays sound for SQLite."""
    path, data = tmp_path / "flipped", sound.read_bytes()
    place = data.index(b'{"label": 0, "text": "answer 4 ')
    path.write_bytes(data[: place + 10] + b"1" + data[place + 11 :])
    with Ledger(path) as ledger:
        for read in (partial(lookup, ledger, KEYS[4]), begin(ledger, "request 4").result):
            with pytest.raises(LedgerError, match="checksum") as caught:
                read()
            assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("statement", "told"),
    [
        ("PRAGMA user_version = 2", "version 2"),
        ("PRAGMA user_version = 0", "version 0"),
        ("PRAGMA application_id = 7", "another program"),
        ("CREATE TABLE more (x)", "tables"),
        ("CREATE TRIGGER evil AFTER INSERT ON replies BEGIN DELETE FROM links; END", "tables"),
        ("UPDATE totals SET counted = 0", "totals"),
    ],
)
def test_a_changed_database_is_refused(sound, tmp_path, statement, told):
    path = Path(shutil.copy(sound, tmp_path / "changed"))
    with closing(sqlite3.connect(path, isolation_level=None)) as conn:
        conn.execute(statement)
    check_refused(path, told)


@pytest.mark.parametrize(
    "content", [b"", b"SQLite format 3\0", b"{}" * 100, b"\x80\x05" + b"x" * 200, b"key: !!python/object:x\n" * 20]
)
def test_other_files_are_refused_and_left_alone(tmp_path, content):
    (tmp_path / "other").write_bytes(content)
    check_refused(tmp_path / "other", "ledger")
    assert [file.name for file in tmp_path.iterdir()] == ["other"]


def test_the_tables_are_those_of_version_1():
    """Another table is another version: this one was written by 0.1.0 and 0.2.0."""
    assert sha256("".join(ledger_file.SCHEMA).encode()).hexdigest()[:16] == "5d9bdf32a5274c69"


def check_refused(path, told):
    before = path.read_bytes()
    with pytest.raises(LedgerError, match=told) as caught:
        Ledger(path)
    assert path.read_bytes() == before
    assert str(path) in str(caught.value)


def test_places_that_hold_no_ledger(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("x")
    for place in (tmp_path, tmp_path / "file" / "inside a file"):
        with pytest.raises(LedgerError, match=str(place)):
            Ledger(place)
    mounts = [SimpleNamespace(mountpoint=p, fstype=kind) for p, kind in (("/", "ext4"), (str(tmp_path), "nfs4"))]
    monkeypatch.setattr(ledger_file.psutil, "disk_partitions", lambda **_: mounts)
    with pytest.raises(LedgerError, match="nfs4.*ALPACAFARM_LEDGER"):
        Ledger(tmp_path / "ledger")
    assert not (tmp_path / "ledger").exists()


def test_a_read_only_file_can_be_replayed_alone(sound):
    folder = Path(tempfile.mkdtemp())  # pytest's own folders are closed to other users
    path = Path(shutil.copy(sound, folder / "ledger"))

    def as_nobody():
        if os.geteuid() == 0:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
        with pytest.raises(LedgerError, match="read-only"):
            Ledger(path)
        with Ledger(path, replay=True) as ledger:
            assert len(lookup(ledger, *KEYS)) == len(KEYS)

    try:
        path.chmod(0o444)
        folder.chmod(0o555)
        before = path.read_bytes()
        assert fork(as_nobody)
        assert path.read_bytes() == before
        assert [file.name for file in folder.iterdir()] == ["ledger"]
    finally:
        folder.chmod(0o755)
        shutil.rmtree(folder)
