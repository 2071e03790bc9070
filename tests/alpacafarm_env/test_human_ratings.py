"""People rate single responses and say why: the page, what is stored and exported, and the oracle that replays it."""

import math
import re
import urllib.request
from html import unescape

import gymnasium as gym
import numpy as np
import pytest
from command_files import read, write
from human_pairs import LONG_AGO, SCRIPT, Page, make_pairs, run, undo

from alpacafarm_env import sandbox
from alpacafarm_env.data.ratings import read_critiques, read_ratings
from alpacafarm_env.errors import DataError
from alpacafarm_env.human.export import skipped_path, write_labels
from alpacafarm_env.human.pairs import load_pairs
from alpacafarm_env.human.session import MOST_CRITIQUE, Session
from alpacafarm_env.human.singles import are_single, load_qualification, load_singles
from alpacafarm_env.human.standings import annotators, summary
from alpacafarm_env.human.store import Store
from alpacafarm_env.oracles import HumanRatings, judge, make_oracle
from alpacafarm_env.oracles.stored import NEVER_RATED

pytest.importorskip("starlette")


def singles(num, **more):
    return [
        {"id": n, "instruction": f"Ask {n}", "input": "i" * (n % 2), "output": f"say {n}", **more} for n in range(num)
    ]


def open_session(folder, rows, key=()):
    tests = load_qualification(write(folder / "key.json", key)) if key else []
    return Session(Store(folder / "ratings.sqlite"), load_singles(write(folder / "rows.json", rows)), tests)


def rate(session, name, rating, critique=""):
    """Rates what is the annotator's now."""
    single = session.standing(name).pair
    assert session.answer(name, single.key, 9.0, choice=rating, critique=critique) == ""
    return single


def test_ratings_are_exported_with_words_and_who_gave_them(tmp_path):
    session = open_session(tmp_path, singles(4, rating=3, annotator="gpt4"))
    said = {rate(session, "Ann", n + 5, f" a\r\nb {n} ").record["id"]: n for n in range(3)}
    undo(session, "Ann")
    said.popitem()
    last = session.standing("Ann").pair
    session.answer("Ann", last.key, 9.0, reason="no idea", critique="unused")
    out = tmp_path / "ratings.jsonl"
    assert write_labels(out, session.store.all()) == [out, skipped_path(out)]
    rows = {row["id"]: row for row in read(out)}
    assert set(rows) == set(said)
    for number, n in said.items():
        row = rows[number]
        assert (row["output"], row["rating"], row["critique"]) == (f"say {number}", n + 5, f"a\nb {n}")
        assert (row["annotator"], row["seconds"], row["judge_rating"], row["judge"]) == ("Ann", 9.0, 3, "gpt4")
        assert "preference" not in row
    assert sorted(each.rating for each in read_ratings(out)) == [5, 6]
    assert sorted(each.critique for each in read_critiques(out)) == ["a\nb 0", "a\nb 1"]
    assert [(row["id"], row["reason"]) for row in read(skipped_path(out))] == [(last.record["id"], "no idea")]
    rate(session, "Ann", 1, "x" * 2 * MOST_CRITIQUE)
    assert len(session.store.all()[-1].answer.critique) == MOST_CRITIQUE


@pytest.mark.parametrize(("far", "qualified"), [(3, True), (4, False)])
def test_who_is_within_a_point_of_the_key_agrees(tmp_path, far, qualified):
    key = [{**row, "instruction": f"Test {row['id']}", "rating": 2 + row["id"] % 4} for row in singles(10)]
    session = open_session(tmp_path, singles(2), key)
    for n in range(10):
        right = session.standing("Ann").pair.record["judge_rating"]
        rate(session, "Ann", right + (2 if n < far else (-1, 0, 1)[n % 3]))
    standing = session.standing("Ann")
    assert standing.agreement == (10 - far) / 10
    assert (standing.qualified, standing.part) == (qualified, "labels" if qualified else "qualification")


def test_agreement_with_the_judge_is_as_counted_by_hand(tmp_path):
    rows = [{**row, "rating": [4, 4.5, None][row["id"] % 3]} for row in singles(30)]
    session = open_session(tmp_path, rows)
    for _ in range(30):
        rate(session, "Ann", 5)  # within a point of both
        rate(session, "Bob", 6)  # of none
    ann, bob = annotators(session.store.all())
    assert (ann.num_agreed, ann.num_compared, bob.num_agreed, ann.mean_rating) == (20, 20, 0, 5.0)
    assert ann.flag == bob.flag == ""
    assert "6.00" in "\n".join(summary(session.store.all()))


def test_the_page_asks_for_a_rating_and_words(tmp_path):
    page = Page(open_session(tmp_path, [{"instruction": f"i{SCRIPT}", "output": f"a{SCRIPT}"}, *singles(1)]))
    for text in (page.get("").text, page.work()):
        assert SCRIPT not in text
        assert "which response" not in text.lower()
        assert "pair" not in re.sub("<[^>]*>", "", text)
    ids = []
    for choice in ("7", "1"):
        text = page.work()
        shown = re.findall(r'<section aria-label="Response">.*?<div class="text" dir="auto">(.*?)</div>', text, re.S)
        assert [unescape(part) for part in shown] == list(page.session.standing("Ann").pair.outputs)
        assert re.findall(r'data-key="(\d)"', text) == list("1234567")
        assert 'name="critique"' in text
        ids.append(page.session.standing("Ann").pair.key)
        page.post("answer", choice=choice, critique=f"words {SCRIPT}")
    answers = [each.answer for each in page.session.store.all()]
    assert [(a.pair, a.grade, a.critique) for a in answers] == [
        (ids[0], 7, f"words {SCRIPT}"),
        (ids[1], 1, f"words {SCRIPT}"),
    ]
    page.post("undo")
    for choice in ("0", "8", "7.0"):
        assert page.post("answer", choice=choice).status_code == 400
    most = page.post("answer", choice="2", critique="日" * MOST_CRITIQUE)
    assert (most.status_code, page.session.store.all()[-1].answer.critique) == (200, "日" * MOST_CRITIQUE)


def test_the_command_takes_a_file_of_single_outputs_and_the_oracle_its_labels(tmp_path, monkeypatch, capsys):
    asked = sandbox.SANDBOX.instructions("val")[:2]
    rows = [{"instruction": ask.instruction, "input": ask.input, "output": "mine"} for ask in asked]
    source, out = write(tmp_path / "rows.json", rows), tmp_path / "ratings.json"

    def label(server):
        for name, rating in (("Ann", 2), ("Bob", 5)):
            with urllib.request.urlopen(f"{server.url}work?name={name}") as reply:
                key = re.search(r'name="pair" value="(\w+)"', reply.read().decode())[1]
            data = f"name={name}&pair={key}&since={LONG_AGO}&choice={rating}&critique=from+{name}"
            urllib.request.urlopen(f"{server.url}answer", data=data.encode()).close()

    assert run(monkeypatch, source, "--out", out, "--seed", "2", act=label) == 0
    assert "Bob" in capsys.readouterr().out
    given = read(out)
    spec = {"rating": {"human": str(out)}}
    verdicts = judge(make_oracle(spec, dataset=sandbox.SANDBOX), asked, ["mine"] * 2)
    for ask, score, num, words, why in zip(
        asked,
        verdicts.scores,
        *(verdicts.details[name] for name in ("num_labels", "critique", "unscored_reason")),
        strict=True,
    ):
        own = [row for row in given if row["instruction"] == ask.instruction]
        assert num == len(own)
        assert why == ("" if own else NEVER_RATED)
        assert words == "\n".join(row["critique"] for row in own)
        assert math.isnan(score) if not own else score == np.mean([row["rating"] for row in own])
    env = gym.make("AlpacaFarm-PPO-v0", oracle=spec, on_unscored="truncate", disable_env_checker=True)
    env.reset(seed=0)
    assert env.step("nobody said anything of this")[3]
    assert run(monkeypatch, write(tmp_path / "pairs.json", make_pairs(2)), "--out", tmp_path / "ratings.jsonl") == 2
    assert "ratings of responses" in capsys.readouterr().err


def test_several_ratings_are_averaged_and_no_rating_is_no_score(tmp_path):
    rows = [{"instruction": "a", "output": "x", "rating": r, "critique": f"{r}!"} for r in (2, 3, 7)]
    other = {"instruction": "a", "input": "b", "output": "x", "rating": 1}
    path = write(tmp_path / "r.json", [*rows, other, {**other, "rating": None}])
    verdicts = judge(HumanRatings(path), ["a", "a\n\nb", "a"], ["x", "x", "y"])
    np.testing.assert_array_equal(verdicts.scores, [4, 1, math.nan])
    assert verdicts.details["num_labels"].tolist() == [3, 1, 0]
    assert verdicts.details["critique"].tolist() == ["2!\n3!\n7!", "", ""]
    with pytest.raises(DataError, match="rating"):
        HumanRatings(write(path, [{**rows[0], "rating": 8}])).score(["a"], ["x"])


def test_what_cannot_be_rated_is_told(tmp_path):
    path = tmp_path / "rows.json"
    assert are_single(write(path, singles(1)))
    assert not are_single(write(path, make_pairs(1)))
    for rows, told in (
        (singles(1, rating=8), "rating"),
        ([*singles(1), *singles(1)], "record 2"),
        ([{"instruction": "a", "output": ["x"]}], "output"),
    ):
        with pytest.raises(DataError, match=told):
            load_singles(write(path, rows))
    with pytest.raises(DataError, match="record 1 field 'rating'"):
        load_qualification(write(path, singles(1)))
    open_session(tmp_path, singles(1)).store.close()
    with Store(tmp_path / "ratings.sqlite") as store:
        Session(store, load_pairs(write(path, make_pairs(2))))  # nothing is stored yet
        rate(Session(store, load_singles(write(path, singles(1)))), "Ann", 3)
        with pytest.raises(DataError, match="ratings of responses"):
            Session(store, load_pairs(write(path, make_pairs(2))))
