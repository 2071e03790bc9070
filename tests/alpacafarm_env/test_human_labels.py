"""People's labels as an oracle, and by the figures of `annotators`."""

import math
import warnings

import gymnasium as gym
import numpy as np
import pytest
from command_files import write

from alpacafarm_env import sandbox
from alpacafarm_env.errors import DataError, UnknownNameError
from alpacafarm_env.human.analysis import load_labels, table
from alpacafarm_env.instructions import Instruction
from alpacafarm_env.oracles import Flip, HumanJudge, WinRate, compare, judge, make_judge, make_oracle
from alpacafarm_env.oracles.stored import NEVER_LABELLED

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


def test_the_reward_is_the_share_of_labels_and_no_label_is_no_verdict(labels):
    oracle = make_oracle({"human": str(labels)}, dataset=sandbox.SANDBOX)
    verdicts = judge(oracle, [*EVAL, EVAL[0]], ["mine", "yours", "mine", REFERENCES[0]])
    np.testing.assert_allclose(verdicts.scores, [1 / 3, 1, math.nan, 0.5])
    assert verdicts.details["unscored_reason"].tolist() == ["", "", NEVER_LABELLED, ""]
    assert verdicts.details["num_labels"].tolist() == [3, 1, 0, 0]


def test_a_judge_of_pairs_in_either_order(labels):
    found = make_judge({"human": labels}, dataset=sandbox.SANDBOX)
    forth = compare(found, EVAL[:2], REFERENCES[:2], ["mine", "yours"]).scores
    back = compare(found, EVAL[:2], ["mine", "yours"], REFERENCES[:2]).scores
    np.testing.assert_allclose(forth, [1 / 3, 1])
    np.testing.assert_allclose(forth + back, 1)
    # By its text alone, merged with the input, as other data has it.
    assert compare(found, [Instruction(str(EVAL[1]))], ["x"], ["x"]).scores == 0.5
    assert isinstance(make_judge({"judge": {"human": str(labels)}, "flip": 0.25}, dataset=sandbox.SANDBOX), Flip)


def test_an_environment_takes_it_and_new_labels_are_another_oracle(labels):
    spec = {"human": str(labels)}
    assert isinstance(make_oracle(spec, dataset=sandbox.SANDBOX), WinRate)
    env = gym.make("AlpacaFarm-WinRate-v0", oracle=spec, on_unscored="truncate", disable_env_checker=True)
    env.reset(seed=0)
    assert env.step("nobody said anything of this")[3]
    env.close()
    before = make_oracle(spec, dataset=sandbox.SANDBOX)
    assert make_oracle(spec, dataset=sandbox.SANDBOX) is before
    write(labels, [label(EVAL[2], REFERENCES[2], "mine", 2)])
    assert judge(make_oracle(spec, dataset=sandbox.SANDBOX), [EVAL[2]], ["mine"]).scores == 1


def test_what_is_no_file_of_labels_is_told(tmp_path, labels):
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
        found = load_labels(said).figures()
    people, ann, gpt4 = found["people", ""], found["annotator", "Ann"], found["judge", "gpt4"]
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
    lines = table(load_labels(said)).splitlines()
    assert lines[0].split() == [
        "figure",
        "people",
        "judge",
        "gpt4",
        "annotator",
        "Ann",
        "annotator",
        "Bob",
        "annotator",
        "Cyd",
    ]
    assert any(line.split()[:3] == ["agreement", "0.667", "(4)"] for line in lines)


@pytest.mark.parametrize(
    "wrong", [{"judge_preference": "x"}, {"judge_preference": True}, {"raw_preference": None}, {"raw_preference": 5}]
)
def test_what_is_no_person_s_label_is_told(tmp_path, wrong):
    rows = [label(EVAL[0], "a", "b", 1), label(EVAL[1], "a", "b", 2, **wrong)]
    with pytest.raises(DataError, match=f"record 2 field '{next(iter(wrong))}'"):
        load_labels(write(tmp_path / "labels.json", rows))
