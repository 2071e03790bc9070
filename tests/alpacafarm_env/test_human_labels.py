"""People's labels and ratings: how they are given, the oracles that replay them, and their figures."""

import math
import re
import urllib.request
import warnings
from functools import partial

import gymnasium as gym
import numpy as np
import pytest
from command_files import LONG_AGO, SCRIPT, Page, human_pairs, open_session, read, run, undo, write

from alpacafarm_env import sandbox
from alpacafarm_env.data.load import read_critiques, read_ratings
from alpacafarm_env.errors import DataError, UnknownNameError
from alpacafarm_env.human.labels import annotators, load_labels, skipped_path, write_labels
from alpacafarm_env.human.session import MOST_CRITIQUE, Session
from alpacafarm_env.human.tasks import PAIRS, SINGLES, load_tasks, read_form
from alpacafarm_env.instructions import Instruction
from alpacafarm_env.oracles import Flip, HumanJudge, HumanRatings, compare, judge, make_judge, make_oracle
from alpacafarm_env.oracles.stored import NEVER_LABELLED, NEVER_RATED

EVAL = sandbox.SANDBOX.instructions("eval")[:3]
REFERENCES = sandbox.SANDBOX.references("eval")[:3]


def label(ask, one, two, preference, annotator="Ann", **more):
    row = {"instruction": ask.instruction, "input": ask.input, "output_1": one, "output_2": two}
    return {**row, "preference": preference, "raw_preference": 1 + preference, "annotator": annotator, **more}


@pytest.fixture
def labels(tmp_path):
    """The first response lost 2 of 3 labels, the second won its one; one of the first's is the other way round."""
    rows = [
        label(EVAL[0], REFERENCES[0], "mine", 1, "Ann"),
        label(EVAL[0], REFERENCES[0], "mine", 2, "Bob"),
        label(EVAL[0], "mine", REFERENCES[0], 2, "Cyd"),
        label(EVAL[1], "yours", REFERENCES[1], 1),
    ]
    return write(tmp_path / "labels.json", rows)


def test_the_reward_is_the_share_of_labels(labels):
    oracle = make_oracle({"human": str(labels)}, dataset=sandbox.SANDBOX)
    verdicts = judge(oracle, [*EVAL, EVAL[0]], ["mine", "yours", "mine", REFERENCES[0]])
    np.testing.assert_allclose(verdicts.scores, [1 / 3, 1, math.nan, 0.5])
    assert verdicts.details["unscored_reason"].tolist() == ["", "", NEVER_LABELLED, ""]
    assert verdicts.details["num_labels"].tolist() == [3, 1, 0, 0]


def test_a_judge_of_pairs_in_either_order(labels):
    people = make_judge({"human": labels}, dataset=sandbox.SANDBOX)
    forth = compare(people, EVAL[:2], REFERENCES[:2], ["mine", "yours"]).scores
    back = compare(people, EVAL[:2], ["mine", "yours"], REFERENCES[:2]).scores
    np.testing.assert_allclose(forth, [1 / 3, 1])
    np.testing.assert_allclose(forth + back, 1)
    # By its text alone, merged with the input, as other data has it.
    assert compare(people, [Instruction(str(EVAL[1]))], ["x"], ["x"]).scores == 0.5
    assert isinstance(make_judge({"judge": {"human": str(labels)}, "flip": 0.25}, dataset=sandbox.SANDBOX), Flip)


def test_an_environment_takes_labels_that_may_change(labels):
    spec = {"human": str(labels)}
    env = gym.make("AlpacaFarm-WinRate-v0", oracle=spec, on_unscored="truncate", disable_env_checker=True)
    env.reset(seed=0)
    assert env.step("nobody said anything of this")[3]
    before = make_oracle(spec, dataset=sandbox.SANDBOX)
    assert make_oracle(spec, dataset=sandbox.SANDBOX) is before
    write(labels, [label(EVAL[2], REFERENCES[2], "mine", 2)])
    assert judge(make_oracle(spec, dataset=sandbox.SANDBOX), [EVAL[2]], ["mine"]).scores == 1


def test_what_is_no_file_of_labels_is_refused(tmp_path, labels):
    for spec, error in (
        ({"human": str(tmp_path / "none.json")}, DataError),
        ({"human": 3}, DataError),
        ({"human": str(labels), "sede": 1}, UnknownNameError),
        ({"human": str(labels), "judge": "gold"}, ValueError),
    ):
        with pytest.raises(error):
            make_oracle(spec, dataset=sandbox.SANDBOX)
    write(labels, [{**label(EVAL[0], "a", "b", 1), "preference": 1.5}])
    with pytest.raises(DataError, match="preference"):
        compare(HumanJudge(labels), ["x"], ["a"], ["b"])
    for wrong in ({"judge_preference": "x"}, {"raw_preference": None}):
        with pytest.raises(DataError, match=f"record 1 field '{next(iter(wrong))}'"):
            load_labels(write(labels, [label(EVAL[0], "a", "b", 1, **wrong)]))


SAID = {"Ann": [1, 1, 2, 2], "Bob": [1, 2, 2, 2], "Cyd": [1, 1, 1, 0]}
"""Four pairs; Cyd has not seen the last."""
GPT4 = [1, 2, 2, None]
SHOWN = {"Ann": "1212", "Bob": "1111", "Cyd": "2222"}
LONG = "word " * 10


@pytest.fixture
def said(tmp_path):
    outputs = [(LONG, "b"), ("a", LONG), ("- an item\n- an item", "b" * 19), ("a", "- item")]
    rows = [
        label(Instruction(f"Ask {n}"), *outputs[n], preference, name, judge="gpt4", judge_preference=GPT4[n])
        | {"shown_first": f"output_{SHOWN[name][n]}"}
        for name, given in SAID.items()
        for n, preference in enumerate(given)
        if preference
    ]
    return write(tmp_path / "said.jsonl", rows)


def test_the_figures_are_those_counted_by_hand(said):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rows = load_labels(said).figures()
    people, ann, gpt4 = rows["people", ""], rows["annotator", "Ann"], rows["judge", "gpt4"]
    # Pair 0: all agree. Pair 1: Ann and Cyd face an even vote of the others, Bob is outvoted. Pair 2: so is Cyd.
    np.testing.assert_allclose(people["agreement"], [1, 1 / 3, 1 / 3, 1])
    np.testing.assert_allclose(people["variance"], [0, 2 / 3, 2 / 3, 0])
    np.testing.assert_allclose(people["prefers_first"], [2 / 3, 0, 0, 0.5])
    np.testing.assert_allclose(people["prefers_longer"], [1, 1 / 3, np.nan, np.nan])
    np.testing.assert_allclose(people["prefers_lists"], [np.nan, np.nan, 1 / 3, 1])
    np.testing.assert_allclose(ann["agreement"], [1, 0.5, 0.5, 1])
    np.testing.assert_allclose(ann["agreement_with_judge"], [1, 0, 1, np.nan])
    np.testing.assert_allclose(gpt4["agreement"], [1, 0, 1, np.nan])
    np.testing.assert_allclose(gpt4["prefers_longer"], [1, 1, np.nan, np.nan])


def singles(num, **more):
    return [
        {"id": n, "instruction": f"Ask {n}", "input": "i" * (n % 2), "output": f"say {n}", **more} for n in range(num)
    ]


open_singles = partial(open_session, form=SINGLES)


def rate(session, name, rating, critique=""):
    """Rates what is the annotator's now."""
    single = session.standing(name).pair
    assert session.answer(name, single.key, 9.0, choice=rating, critique=critique) == ""
    return single


def test_ratings_are_exported_with_words(tmp_path):
    session = open_singles(tmp_path, singles(4, rating=3, annotator="gpt4"))
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
def test_a_rating_within_a_point_agrees(tmp_path, far, qualified):
    key = [{**row, "instruction": f"Test {row['id']}", "rating": 2 + row["id"] % 4} for row in singles(10)]
    session = open_singles(tmp_path, singles(2), key)
    for n in range(10):
        right = session.standing("Ann").pair.record["judge_rating"]
        rate(session, "Ann", right + (2 if n < far else (-1, 0, 1)[n % 3]))
    standing = session.standing("Ann")
    assert standing.agreement == (10 - far) / 10
    assert (standing.qualified, standing.part) == (qualified, "labels" if qualified else "qualification")


def test_agreement_of_ratings_is_as_counted_by_hand(tmp_path):
    rows = [{**row, "rating": [4, 4.5, None][row["id"] % 3]} for row in singles(30)]
    session = open_singles(tmp_path, rows)
    for _ in range(30):
        rate(session, "Ann", 5)  # within a point of both
        rate(session, "Bob", 6)  # of none
    ann, bob = annotators(session.store.all())
    assert [row["agrees with judge"].split()[0] for row in (ann, bob)] == ["100%", "0%"]
    assert ann["agrees with judge"].endswith(" of 20")
    assert ann["flag"] == bob["flag"] == ""


def test_the_page_asks_for_a_rating_and_words(tmp_path):
    page = Page(open_singles(tmp_path, [{"instruction": f"i{SCRIPT}", "output": f"a{SCRIPT}"}]))
    text = page.work()
    assert SCRIPT not in text
    assert re.findall(r'data-key="(\d)"', text) == list("1234567")
    for choice in ("0", "8", "7.0"):
        assert page.post("answer", choice=choice).status_code == 400
    most = "日" * MOST_CRITIQUE
    assert page.post("answer", choice="7", critique=most).status_code == 200
    answer = page.session.store.all()[-1].answer
    assert (answer.grade, answer.critique) == (7, most)


def test_the_oracle_replays_what_the_command_collects(tmp_path, monkeypatch, capsys):
    rows = sandbox.SANDBOX.instructions("val")[:2]
    outputs = [{"instruction": row.instruction, "input": row.input, "output": "mine"} for row in rows]
    source, out = write(tmp_path / "rows.json", outputs), tmp_path / "ratings.json"

    def rate_all(server):
        for rating in (2, 5):
            with urllib.request.urlopen(f"{server.url}work?name=Ann") as reply:
                key = re.search(r'name="pair" value="(\w+)"', reply.read().decode())[1]
            data = f"name=Ann&pair={key}&since={LONG_AGO}&choice={rating}&critique=from+Ann"
            urllib.request.urlopen(f"{server.url}answer", data=data.encode()).close()

    assert run(monkeypatch, source, "--out", out, act=rate_all) == 0
    given = {row["instruction"]: row["rating"] for row in read(out)}
    spec = {"rating": {"human": str(out)}}
    verdicts = judge(make_oracle(spec, dataset=sandbox.SANDBOX), [*rows, rows[0]], ["mine", "mine", "yours"])
    np.testing.assert_array_equal(verdicts.scores, [*(given[row.instruction] for row in rows), math.nan])
    assert verdicts.details["critique"].tolist() == ["from Ann", "from Ann", ""]
    assert verdicts.details["unscored_reason"].tolist() == ["", "", NEVER_RATED]
    assert run(monkeypatch, write(tmp_path / "pairs.json", human_pairs(2)), "--out", tmp_path / "ratings.jsonl") == 2
    assert "ratings of responses" in capsys.readouterr().err


def test_several_ratings_are_averaged(tmp_path):
    rows = [{"instruction": "a", "output": "x", "rating": r, "critique": f"{r}!"} for r in (2, 3, 7)]
    other = {"instruction": "a", "input": "b", "output": "x", "rating": 1}
    path = write(tmp_path / "r.json", [*rows, other, {**other, "rating": None}])
    verdicts = judge(HumanRatings(path), ["a", "a\n\nb", "a"], ["x", "x", "y"])
    np.testing.assert_array_equal(verdicts.scores, [4, 1, math.nan])
    assert verdicts.details["num_labels"].tolist() == [3, 1, 0]
    assert verdicts.details["critique"].tolist() == ["2!\n3!\n7!", "", ""]
    with pytest.raises(DataError, match="rating"):
        HumanRatings(write(path, [{**rows[0], "rating": 8}])).score(["a"], ["x"])


def test_what_cannot_be_rated_is_refused(tmp_path):
    path = tmp_path / "rows.json"
    assert read_form(write(path, singles(1))) is SINGLES
    assert read_form(write(path, human_pairs(1))) is PAIRS
    for rows, reason in (
        (singles(1, rating=8), "rating"),
        ([*singles(1), *singles(1)], "record 2"),
        ([{"instruction": "a", "output": ["x"]}], "output"),
    ):
        with pytest.raises(DataError, match=reason):
            load_tasks(write(path, rows), SINGLES)
    with pytest.raises(DataError, match="record 1 field 'rating'"):
        load_tasks(write(path, singles(1)), SINGLES, key=True)
    session = open_session(tmp_path, human_pairs(2))  # nothing is stored yet
    rate(Session(session.store, load_tasks(write(path, singles(1)), SINGLES)), "Ann", 3)
    with pytest.raises(DataError, match="ratings of responses"):
        Session(session.store, session.parts["labels"])
