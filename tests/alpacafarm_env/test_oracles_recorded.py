"""Recorded judgements replayed."""

import math

import numpy as np

from alpacafarm_env.oracles import Recorded, RecordedJudge, compare, judge
from alpacafarm_env.oracles.recorded import NEVER_JUDGED, NO_CLEAR_VERDICT, NO_REFERENCE_IN_PAIR

BY_GENERATOR = {
    "good": {("i", "fine"): 1.0, ("j", "fair"): 0.0, ("j", "reference"): 0.5},
    "other": {("i", "fine"): 0.0},
}


class Dataset:
    """Two generators wrote "fine", and the judge credited it differently."""

    num_reads = 0

    def recorded_verdicts(self, generator=None):
        self.num_reads += 1
        if generator is not None:
            return BY_GENERATOR[generator]
        return {**BY_GENERATOR["good"], ("i", "fine"): math.nan}

    def instructions(self, split):
        return ("i", "j")

    def references(self, split):
        return ("reference", "reference")


def test_replays_what_is_stored_and_nothing_else():
    dataset = Dataset()
    oracle = Recorded(dataset)
    verdicts = judge(oracle, ["i", "j", "j", "j", "i"], ["fine", "fair", "reference", "fine", "fair"])
    np.testing.assert_array_equal(verdicts.scores, [math.nan, 0.0, 0.5, math.nan, math.nan])
    assert verdicts.details["unscored_reason"].tolist() == [NO_CLEAR_VERDICT, "", "", NEVER_JUDGED, NEVER_JUDGED]

    assert dataset.num_reads == 1


def test_a_generator_settles_whose_judgement_is_meant():
    for generator, credit in (("good", 1.0), ("other", 0.0)):
        assert Recorded(Dataset(), generator=generator).score(["i"], ["fine"]).tolist() == [credit]


def test_the_judge_answers_pairs_with_the_reference_in_either_place():
    recorded = RecordedJudge(Dataset(), generator="good")
    a = ["reference", "fine", "fair", "fine", "same"]
    b = ["fine", "reference", "reference", "fair", "same"]
    verdicts = compare(recorded, ["i", "i", "j", "i", "i"], a, b)
    np.testing.assert_array_equal(verdicts.scores, [1.0, 0.0, 1.0, math.nan, 0.5])
    assert verdicts.details["unscored_reason"].tolist() == ["", "", "", NO_REFERENCE_IN_PAIR, ""]
