"""People's answers: stored at once, in random orders, taken back, exported, and counted."""

import json
import sqlite3
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
from command_files import human_pairs, judge, open_session, qualification, read, undo, write

from alpacafarm_env.data.dataset import RowDataset
from alpacafarm_env.errors import DataError, LedgerError
from alpacafarm_env.human.labels import annotators, skipped_path, write_labels
from alpacafarm_env.human.session import LEAST_SECONDS, Session, read_name
from alpacafarm_env.human.store import Store
from alpacafarm_env.human.tasks import PAIRS, load_tasks, side

DYING = """
import os, sys
from pathlib import Path
from alpacafarm_env.human.session import Session
from alpacafarm_env.human.store import Store
from alpacafarm_env.human.tasks import PAIRS, load_tasks
session = Session(Store(Path(sys.argv[2])), load_tasks(Path(sys.argv[1]), PAIRS))
for _ in range(5):
    session.answer("Ann", session.standing("Ann").pair.key, 3.0, choice=1)
os.kill(os.getpid(), 9)
"""


def test_a_killed_process_has_lost_nothing(tmp_path):
    pairs, database = write(tmp_path / "pairs.json", human_pairs(8)), tmp_path / "labels.sqlite"
    run = subprocess.run([sys.executable, "-c", DYING, str(pairs), str(database)], check=False)
    assert run.returncode == -9
    session = Session(Store(database), load_tasks(pairs, PAIRS))
    standing = session.standing("Ann")
    assert (standing.num_done, standing.num_pairs) == (5, 8)
    assert standing.pair.key not in {each.answer.pair for each in session.store.all()}
    assert database.stat().st_mode & 0o077 == 0


def test_the_orders_are_random_and_stay(tmp_path):
    session = open_session(tmp_path, human_pairs(300))
    orders = {name: [session.shown_first(name, pair) for pair in session.parts["labels"]] for name in ("Ann", "Bob")}
    assert orders["Ann"] != orders["Bob"]
    for order in orders.values():  # 4 standard errors
        assert abs(Counter(order)[1] - 150) < 35
    shown = {name: [judge(session, name, 1).key for _ in range(5)] for name in orders}
    assert shown["Ann"] != shown["Bob"]
    assert shown["Ann"] != [pair.key for pair in session.parts["labels"][:5]]
    again = Session(Store(session.store.path), session.parts["labels"])
    assert [again.shown_first("Ann", pair) for pair in session.parts["labels"]] == orders["Ann"]
    other = Session(Store(tmp_path / "other.sqlite", seed=1), session.parts["labels"])
    assert [other.shown_first("Ann", pair) for pair in session.parts["labels"]] != orders["Ann"]
    assert {each.answer.shown_first for each in session.store.all()} == {1, 2}


def test_a_form_sent_many_times_undoes_one_answer(tmp_path, monkeypatch):
    session = open_session(tmp_path, human_pairs(8))
    for _ in range(6):
        judge(session, "Ann", 1)
    key, all_read, standing = session.standing("Ann").pair.key, Barrier(4, timeout=20), session.standing

    def read_together(name):
        read = standing(name)
        all_read.wait()
        return read

    monkeypatch.setattr(session, "standing", read_together)
    with ThreadPoolExecutor(4) as threads:
        notes = list(threads.map(lambda _: session.undo("Ann", key, 9.0), range(4)))
    assert sorted(notes) == ["", "nothing", "nothing", "nothing"]
    assert len(session.store.all()) == 5


def test_an_answer_stands_until_undone(tmp_path):
    session = open_session(tmp_path, human_pairs(4))
    assert undo(session, "Ann") == "nothing"
    pair = judge(session, "Ann", 1)
    assert session.answer("Ann", pair.key, 9.0, choice=4) == "again"
    assert not session.store.add(session.store.all()[0].answer, pair)
    key = session.standing("Ann").pair.key
    assert session.answer("Ann", key, LEAST_SECONDS / 2, choice=4) == "soon"
    assert session.answer("Ann", key, 9.0, reason="  ") == "reason"
    assert [each.answer.better for each in session.store.all()] == [1]
    judge(session, "Bob", 2)
    assert undo(session, "Ann") == ""
    assert session.standing("Ann").pair.key == pair.key
    assert [each.answer.annotator for each in session.store.all()] == ["Bob"]
    judge(session, "Ann", 1)
    judge(session, "Ann", 1)
    assert [undo(session, "Ann") for _ in range(3)] == ["", "", "nothing"]
    judge(session, "Ann", 2)
    assert [(each.answer.annotator, each.answer.better) for each in session.store.all()] == [("Bob", 2), ("Ann", 2)]


@pytest.mark.parametrize(("right", "qualified"), [(7, True), (6, False)])
def test_the_qualification_lets_in_from_70_percent(tmp_path, right, qualified):
    session = open_session(tmp_path, human_pairs(4), qualification())
    for n in range(10):
        standing = session.standing("Ann")
        assert (standing.part, standing.num_done) == ("qualification", n)
        assert session.answer("Ann", standing.pair.key, 9.0, reason="no idea") == "reason"
        judge(session, "Ann", 1 if n < right else 2, slightly=n % 2 == 0)
    standing = session.standing("Ann")
    assert standing.agreement == right / 10
    assert (standing.qualified, standing.pair is not None) == (qualified, qualified)
    assert undo(session, "Ann") == "nothing"  # what one has seen the result of, one cannot change
    if qualified:
        assert (standing.part, standing.num_done, standing.num_pairs) == ("labels", 0, 4)
        judge(session, "Ann", 1)
    else:
        key = session.parts["labels"][0].key
        assert session.answer("Ann", key, 9.0, choice=1) == "again"
        assert annotators(session.store.all(), session.parts["qualification"])[0]["flag"] == "not qualified"
    assert write_labels(tmp_path / "out.json", session.store.all()) == [tmp_path / "out.json"] * qualified


def test_labels_are_exported_without_what_was_undone(tmp_path):
    pairs = human_pairs(6, preference=2, annotator="gpt4", shown_first="output_2")
    session = open_session(tmp_path, pairs)
    keys = {pair.key: pair.record["id"] for pair in session.parts["labels"]}
    said = {}
    for n in range(5):
        said[keys[judge(session, "Ann", 1 + n % 2, slightly=n > 2).key]] = n
    last = session.standing("Ann").pair
    session.answer("Ann", last.key, 4.0, reason="Both are equally good")
    judge(session, "Bob", 1)
    undo(session, "Bob")
    out = tmp_path / "labels.jsonl"
    assert write_labels(out, session.store.all()) == [out, skipped_path(out)]
    rows = {row["id"]: row for row in read(out)}
    assert set(rows) == set(said)
    for number, n in said.items():
        row = rows[number]
        assert (row["preference"], row["raw_preference"]) == (1 + n % 2, [1, 4, 1, 3, 2][n])
        assert (row["annotator"], row["judge_preference"], row["judge"], row["seconds"]) == ("Ann", 2, "gpt4", 10.0)
        assert row["instruction"] == f"Ask {number}"
        assert row.get("input", "") == (f"in {number}" if number % 3 == 0 else "")
        assert row["shown_first"] in ("output_1", "output_2")
    assert [(row["id"], row["reason"]) for row in read(skipped_path(out))] == [
        (last.record["id"], "Both are equally good")
    ]
    dataset = RowDataset("people", {"preference": (str(out), read(out))})
    assert {each.chosen.split()[0] for each in dataset.preferences()} == {"left", "right"}


def test_agreement_and_flag_are_as_counted_by_hand(tmp_path):
    pairs = [{**row, "preference": [1, 2, 1.5, None][n % 4]} for n, row in enumerate(human_pairs(48))]
    session = open_session(tmp_path, pairs)
    right = {"Ann": 17, "Bob": 13, "Cyd": 14}  # of the 24 that have a verdict: 71 %, 54 %, 58 %
    for name, num in right.items():
        agreed = 0
        while (pair := session.standing(name).pair) is not None:
            better = side(pair.record.get("judge_preference"))
            agreed += bool(better)
            judge(session, name, better or 1 if agreed <= num else 3 - (better or 1))
    people = annotators(session.store.all())
    said = [(row["agrees with judge"].split()[0], row["agrees with judge"].split()[-1], row["flag"]) for row in people]
    assert said == [("71%", "24", ""), ("54%", "24", "near chance"), ("58%", "24", "")]


def test_a_pairs_verdict_is_its_files_of_now(tmp_path):
    """Both pairs are in the qualification set, too, whose key is output_1; a judge comes later, for output_2."""
    pairs, key = human_pairs(2), [{**row, "preference": 1} for row in human_pairs(2)]
    session = open_session(tmp_path, pairs, key)
    for _ in range(2):
        judge(session, "Ann", 1)
    for _ in range(2):
        judge(session, "Ann", 2)
    assert annotators(session.store.all(), session.parts["qualification"])[0]["agrees with judge"] == ""
    session.store.close()
    judged = [{**row, "preference": 2, "annotator": "gpt4", "id": 7} for row in pairs]
    session = open_session(tmp_path, judged, key)
    assert session.standing("Ann").agreement == 1
    row = annotators(session.store.all(), session.parts["qualification"])[0]
    assert (row["agrees with judge"].split()[0], row["agrees with judge"].split()[-1]) == ("100%", "2")
    write_labels(tmp_path / "out.json", session.store.all())
    rows = read(tmp_path / "out.json")
    assert [(row["id"], row["judge_preference"], row["judge"]) for row in rows] == [(7, 2, "gpt4")] * 2


def test_other_databases_are_refused_untouched(tmp_path):
    with sqlite3.connect(tmp_path / "other.sqlite") as conn:
        conn.execute("CREATE TABLE t (x)")
    conn.close()
    (tmp_path / "text.sqlite").write_text("words " * 100)
    for name, error in {"other.sqlite": DataError, "text.sqlite": LedgerError}.items():
        before = (tmp_path / name).read_bytes()
        with pytest.raises(error, match=name):
            Store(tmp_path / name)
        assert (tmp_path / name).read_bytes() == before


def test_all_faults_of_pairs_are_named_at_once(tmp_path):
    row = human_pairs(1)[0]
    path = write(
        tmp_path / "pairs.json", [{**row, "output_2": None}, {**row, "preference": 3}, {**row, "annotator": 4}]
    )
    with pytest.raises(DataError, match=r"(?s)1 field 'output_2'.*2 field 'preference'.*3 field 'annotator'"):
        load_tasks(path, PAIRS)
    same = {"instruction": "b", "output_1": "same", "output_2": "same"}
    assert len(load_tasks(write(path, [row, same]), PAIRS)) == 1
    swapped = {**row, "output_1": row["output_2"], "output_2": row["output_1"]}
    with pytest.raises(DataError, match="record 2"):
        load_tasks(write(path, [row, swapped]), PAIRS)


def test_names_are_tidied():
    assert read_name("  Ann \n B. ") == "Ann B."
    assert read_name("Zoe\u0308") == "Zo\u00eb"
    for text in ("", "   ", "x" * 61, "a\u202eb", "a\0b"):
        with pytest.raises(DataError):
            read_name(text)


def test_no_label_is_lost_with_its_pair(tmp_path):
    session = open_session(tmp_path, human_pairs(4))
    judged = judge(session, "Ann", 1)
    fewer = [row for row in human_pairs(4) if row["id"] != judged.record["id"]]
    session = Session(session.store, load_tasks(write(tmp_path / "pairs.json", fewer), PAIRS))
    assert session.standing("Ann").num_done == 0
    write_labels(tmp_path / "labels.json", session.store.all())
    assert [row["id"] for row in json.loads((tmp_path / "labels.json").read_text())] == [judged.record["id"]]
