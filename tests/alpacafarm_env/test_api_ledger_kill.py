"""SIGKILL at any moment: no answer that was committed is lost, and what was billed twice can be read in the ledger.

The long form is the goal: 50 kills over 2,000 questions. The twins are the two stores that people write instead.
"""

import json
import random
import time
from collections import Counter
from pathlib import Path

import pytest
from ledger_reads import attempts
from ledger_workers import billed, finish, lines, question_keys, start, true_label

from alpacafarm_env.llm.ledger import operations as sql
from alpacafarm_env.llm.ledger.store import Ledger

THREADS = 8


def settings_for(folder: Path, kind: str, count: int) -> dict:
    return {
        "task": "ask",
        "kind": kind,
        "store": str(folder / "store"),
        "bills": str(folder / "bills"),
        "acknowledged": str(folder / "acknowledged"),
        "count": count,
        "first": 0,
        "order": 0,
        "threads": THREADS,
        "batch": 64,
        "latency_s": 0.01,
        "lease_s": 0.3,
    }


def kill_once(settings: dict, after_s: float) -> None:
    process = start(**settings)
    try:
        assert process.stdout.readline() == b"ready\n", process.stderr.read().decode()
        time.sleep(after_s)
    finally:
        process.kill()
        process.communicate()


def labels_in_ledger(path: str, count: int) -> dict[str, int]:
    with Ledger(path) as ledger:
        found = ledger.do(sql.lookup, question_keys(count)).result()
    return {key: json.loads(stored.raw)["label"] for key, stored in found.items()}


def assert_none_lost(acknowledged: list[str], kept: dict[str, int]) -> None:
    lost = set(acknowledged) - set(kept)
    assert not lost, f"{len(lost)} of {len(set(acknowledged))} acknowledged answers are lost"


def kill_and_check(folder: Path, kills: int, count: int) -> None:
    settings, moments = settings_for(folder, "ledger", count), random.Random(0)
    for _ in range(kills):
        kill_once(settings, moments.uniform(0.0, 6 * count / kills * settings["latency_s"] / THREADS))
        assert_none_lost(lines(settings["acknowledged"]), labels_in_ledger(settings["store"], count))
    survived = len(labels_in_ledger(settings["store"], count))
    finish(start(**settings))
    assert labels_in_ledger(settings["store"], count) == {key: true_label(key) for key in question_keys(count)}
    bills = billed(settings["bills"])
    with Ledger(settings["store"]) as ledger:
        sent = ledger.do(attempts).result()
        total = ledger.do(sql.spending).result().total
    rows = Counter((attempt.request_key.removeprefix("request "), attempt.state) for attempt in sent)
    extra = sum(bills.values()) - count
    assert 0 <= extra <= kills * THREADS
    for key in question_keys(count):
        assert rows[key, "answered"] == 1
        assert rows[key, "unknown"] >= bills[key] - 1
        assert rows[key, "running"] == rows[key, "failed"] == 0
    assert total.unknown <= kills * THREADS
    assert total.usd == pytest.approx(0.001 * count + 0.01 * total.unknown)
    print(f"{kills} kills, {count} questions: {survived} kept before the last run, {extra} extra charges, ", end="")
    print(f"{total.unknown} unknown attempts")


def test_no_committed_answer_is_lost(tmp_path):
    kill_and_check(tmp_path, kills=4, count=160)


@pytest.mark.slow
def test_no_committed_answer_is_lost_in_50_kills(tmp_path):
    kill_and_check(tmp_path, kills=50, count=2_000)


@pytest.mark.parametrize("kind", ["json", "at_end"])
def test_stores_that_are_the_twins_lose_answers(tmp_path, kind):
    settings = settings_for(tmp_path, kind, 5_000)

    def kill_and_check_30_times():
        for number in range(30):
            kill_once(settings, 0.15 + 0.01 * number)
            try:
                kept = json.loads(Path(settings["store"]).read_text())
            except (FileNotFoundError, ValueError):
                kept = {}
            assert_none_lost(lines(settings["acknowledged"]), kept)

    with pytest.raises(AssertionError, match="acknowledged answers are lost"):
        kill_and_check_30_times()
