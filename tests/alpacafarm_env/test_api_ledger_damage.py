"""Damaged and foreign files: no wrong answer is ever served, and no file is changed or replaced."""

import json
import os
import random
import shutil
import sqlite3
import tempfile
from contextlib import closing
from pathlib import Path

import pytest

from alpacafarm_env.errors import LedgerError
from alpacafarm_env.llm.ledger import file as ledger_file
from alpacafarm_env.llm.ledger import operations as sql
from alpacafarm_env.llm.ledger.store import Ledger

pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
KEYS = [f"question {i}" for i in range(60)]


@pytest.fixture(scope="module")
def sound(tmp_path_factory) -> Path:
    """A ledger of 30 requests with two questions each."""
    path = tmp_path_factory.mktemp("sound") / "ledger.sqlite"
    with Ledger(path) as ledger:
        owner = ledger.new_owner()
        for i in range(0, len(KEYS), 2):
            told = {"request_key": f"request {i}", "host": "h", "model": "m", "label": "l", "num_questions": 2}
            attempt = ledger.do(sql.begin, **told, reserve_usd=0.1, budget_usd=None, owner=owner).result()
            raw = json.dumps({"label": i % 4 // 2, "text": f"answer {i} " * 20})
            tokens = {"prompt_tokens": 1, "completion_tokens": 1}
            ledger.do(sql.succeed, attempt, raw=raw, cost_usd=0.05, question_keys=KEYS[i : i + 2], **tokens).result()
    assert not Path(f"{path}-wal").exists()
    return path


def read_all(path: Path) -> dict[str, sql.Stored]:
    """All answers the file serves, question by question; LedgerError only if it cannot be opened."""
    served = {}
    with Ledger(path) as ledger:
        for key in KEYS:
            try:
                served |= ledger.do(sql.lookup, [key]).result()
            except LedgerError:
                continue
    return served


def mutate(data: bytearray, rng: random.Random) -> str:
    kind = rng.choice(["bit", "byte", "run", "zeros", "cut", "swap"])
    place = rng.randrange(len(data))
    if kind == "bit":
        data[place] ^= 1 << rng.randrange(8)
    elif kind == "byte":
        data[place] = (data[place] + rng.randrange(1, 256)) % 256
    elif kind == "run":
        data[place : place + 64] = rng.randbytes(len(data[place : place + 64]))
    elif kind == "zeros":
        page = place // 4096 * 4096
        data[page : page + 4096] = bytes(len(data[page : page + 4096]))
    elif kind == "cut":
        del data[place:]
    else:
        other, size = rng.randrange(len(data)), 200
        data[place : place + size], data[other : other + size] = data[other : other + size], data[place : place + size]
    return kind


def serve_mutants(sound: Path, folder: Path, count: int) -> tuple[int, int, int]:
    """Mutates, opens and reads; returns how many files were refused, served less than all, served all."""
    truth, refused, less, served_all = read_all(sound), 0, 0, 0
    assert len(truth) == len(KEYS)
    for seed in range(count):
        data = bytearray(sound.read_bytes())
        kind = mutate(data, random.Random(seed))
        path = folder / f"{seed}.sqlite"
        path.write_bytes(data)
        try:
            served = read_all(path)
        except LedgerError:
            assert path.read_bytes() == data, f"mutation {seed} ({kind}): the refused file was changed"
            refused += 1
        else:
            wrong = [key for key, stored in served.items() if stored != truth[key]]
            assert not wrong, f"mutation {seed} ({kind}): wrong answers served for {wrong}"
            less, served_all = less + (len(served) < len(truth)), served_all + (len(served) == len(truth))
        for leftover in folder.glob(f"{seed}.sqlite*"):
            leftover.unlink()
    print(f"{count} mutations: {refused} refused, {less} served in part, {served_all} unharmed, 0 wrong answers")
    return refused, less, served_all


def test_damaged_files_serve_no_wrong_answer(sound, tmp_path):
    refused, less, _ = serve_mutants(sound, tmp_path, 120)
    assert refused > 0
    assert less > 0


@pytest.mark.slow
def test_damaged_files_serve_no_wrong_answer_in_3000_mutations(sound, tmp_path):
    serve_mutants(sound, tmp_path, 3_000)


def test_a_damaged_log_serves_no_wrong_answer(sound, tmp_path):
    """What a killed process leaves in the log is committed; damage to it loses its end, and never changes an answer."""
    path = Path(shutil.copy(sound, tmp_path / "l"))
    child = os.fork()
    if child == 0:
        try:
            ledger = Ledger(path)
            told = {"request_key": "late", "host": "h", "model": "m", "label": "l", "num_questions": 1}
            attempt = ledger.do(sql.begin, **told, reserve_usd=0, budget_usd=None, owner=ledger.new_owner()).result()
            tokens = {"prompt_tokens": 1, "completion_tokens": 1}
            ledger.do(sql.succeed, attempt, raw="{}", cost_usd=0, question_keys=["late"], **tokens).result()
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    main, log = path.read_bytes(), Path(f"{path}-wal").read_bytes()
    assert len(log) > 4096
    found = 0
    for seed in range(40):
        copy, data = tmp_path / f"copy {seed}", bytearray(log)
        if seed:
            mutate(data, random.Random(seed))
        copy.write_bytes(main)
        Path(f"{copy}-wal").write_bytes(data)
        with Ledger(copy) as ledger:
            late = ledger.do(sql.lookup, ["late"]).result()
            assert late in ({}, {"late": sql.Stored("{}", "late", 0, 1, 1)})
            assert len(ledger.do(sql.lookup, KEYS).result()) == len(KEYS)
        found += bool(late)
        assert late or seed
    assert 0 < found < 40


class _Anything:
    """Equal to every checksum."""

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False


def flip_label(sound: Path, path: Path) -> str:
    """Turns the label of one stored reply; the file stays sound for SQLite. Returns the reply's first question."""
    data = sound.read_bytes()
    place = data.index(b'{"label": 0, "text": "answer 4 ')
    path.write_bytes(data[: place + 10] + b"1" + data[place + 11 :])
    return KEYS[4]


def check_label(sound: Path, path: Path) -> None:
    key = flip_label(sound, path)
    with Ledger(path) as ledger, pytest.raises(LedgerError, match="does not match its checksum"):
        ledger.do(sql.lookup, [key]).result()
    with Ledger(path) as ledger, pytest.raises(LedgerError, match="does not match its checksum"):
        ledger.do(sql.stored_reply, "request 4").result()


def test_damage_names_the_file_in_one_line(sound, tmp_path):
    row, page = tmp_path / "row", tmp_path / "page"
    flip_label(sound, row)
    with Ledger(row) as ledger, pytest.raises(LedgerError) as of_row:
        ledger.do(sql.lookup, KEYS).result()
    page.write_bytes(sound.read_bytes()[:8192] + bytes(4096) + sound.read_bytes()[12288:])
    with pytest.raises(LedgerError) as of_page:
        Ledger(page)
    for path, error in ((row, of_row), (page, of_page)):
        assert str(path) in str(error.value)
        assert "\n" not in str(error.value)


def test_a_flipped_label_is_refused(sound, tmp_path):
    check_label(sound, tmp_path / "flipped")


def test_without_checksums_the_twin_serves_a_wrong_label(sound, tmp_path, monkeypatch):
    monkeypatch.setattr(sql, "_digest", lambda *parts: _Anything())
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        check_label(sound, tmp_path / "flipped")
    with Ledger(tmp_path / "flipped") as ledger:
        assert json.loads(ledger.do(sql.lookup, [KEYS[4]]).result()[KEYS[4]].raw)["label"] == 1


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("PRAGMA user_version = 2", "version 2.*Upgrade"),
        ("PRAGMA user_version = 0", "version 0"),
        ("PRAGMA application_id = 7", "another program"),
        ("CREATE TABLE more (x)", "tables are not those"),
        ("CREATE TRIGGER evil AFTER INSERT ON replies BEGIN DELETE FROM links; END", "tables are not those"),
        ("UPDATE totals SET counted = 0", "totals are not the sum"),
        ("DELETE FROM totals", "totals are not the sum"),
    ],
)
def test_a_changed_database_is_refused(sound, tmp_path, statement, message):
    path = Path(shutil.copy(sound, tmp_path / "changed"))
    with closing(sqlite3.connect(path, isolation_level=None)) as conn:
        conn.execute(statement)
    before = path.read_bytes()
    with pytest.raises(LedgerError, match=message):
        Ledger(path)
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    "content", [b"", b"SQLite format 3\0", b"{}" * 100, b"\x80\x05" + b"x" * 200, b"key: !!python/object:x\n" * 20]
)
def test_other_files_are_refused_and_left_alone(tmp_path, content):
    path = tmp_path / "other"
    path.write_bytes(content)
    with pytest.raises(LedgerError, match="not a ledger"):
        Ledger(path)
    assert path.read_bytes() == content
    assert [file.name for file in tmp_path.iterdir()] == ["other"]


def test_another_programs_database_and_a_folder_are_refused(tmp_path):
    path = tmp_path / "theirs.sqlite"
    with closing(sqlite3.connect(path)) as conn:
        conn.execute("CREATE TABLE theirs (x)")
    before = path.read_bytes()
    with pytest.raises(LedgerError, match="another program"):
        Ledger(path)
    assert path.read_bytes() == before
    with pytest.raises(LedgerError, match="not a file"):
        Ledger(tmp_path)
    with pytest.raises(LedgerError, match="cannot be used"):
        Ledger(path / "inside a file")


def test_a_network_file_system_is_refused(tmp_path, monkeypatch):
    mounts = tmp_path / "mounts"
    mounts.write_text(f"/dev/x / ext4 rw 0 0\nserver:/x {tmp_path} nfs4 rw 0 0\n")
    monkeypatch.setattr(ledger_file, "_MOUNTS", mounts)
    with pytest.raises(LedgerError, match=r"network file system \(nfs4\).*ALPACAFARM_LEDGER"):
        Ledger(tmp_path / "ledger")
    assert not (tmp_path / "ledger").exists()


def _as_nobody(action) -> int:
    """Runs `action` in a child without root's rights; returns the child's exit status."""
    child = os.fork()
    if child == 0:
        status = 99
        try:
            if os.geteuid() == 0:
                os.setgroups([])
                os.setgid(65534)
                os.setuid(65534)
            status = action()
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_read_only_file_is_refused_but_can_be_replayed(sound):
    folder = Path(tempfile.mkdtemp())  # pytest's own folders are closed to other users
    try:
        path = Path(shutil.copy(sound, folder / "ledger"))
        path.chmod(0o444)
        folder.chmod(0o555)
        before = path.read_bytes()

        def refused() -> int:
            try:
                Ledger(path)
            except LedgerError as error:
                return 0 if "read-only" in str(error) and "replay" in str(error) else 2
            return 1

        def replayed() -> int:
            with Ledger(path, replay=True) as ledger:
                return 0 if len(ledger.do(sql.lookup, KEYS).result()) == len(KEYS) else 1

        assert _as_nobody(refused) == 0
        assert _as_nobody(replayed) == 0
        assert path.read_bytes() == before
        assert [file.name for file in folder.iterdir()] == ["ledger"]
    finally:
        folder.chmod(0o755)
        shutil.rmtree(folder)
