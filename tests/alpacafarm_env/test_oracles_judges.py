"""Win rates, noise, both orders, replays and ensembles: whom they ask, what it costs, the arithmetic by hand."""

import json
import math
from types import MappingProxyType

import numpy as np
import pytest

from alpacafarm_env import sandbox
from alpacafarm_env.errors import UnknownNameError
from alpacafarm_env.oracles import (
    BaselineSubtracted,
    BothOrders,
    Constant,
    Ensemble,
    Flip,
    Recorded,
    RecordedJudge,
    Verdicts,
    WinRate,
    compare,
    judge,
    make_oracle,
)
from alpacafarm_env.oracles.stored import NEVER_JUDGED, NO_CLEAR_VERDICT, NO_REFERENCE_IN_PAIR

N = 20_000
INSTRUCTIONS = [f"Ask {i}" for i in range(N)]
A = [f"first {i}" for i in range(N)]
B = [f"second {i}" for i in range(N)]


class Judge:
    """P(b preferred) = p, counting calls and rows; `p` may be a function of a row."""

    def __init__(self, p=1.0, name="judge"):
        self.p = p if callable(p) else lambda instruction, a, b: p
        self.name = name
        self.rows = []

    def compare(self, instructions, a, b):
        self.rows.append(list(zip(instructions, a, b, strict=True)))
        return np.array([self.p(*row) for row in self.rows[-1]])


class Costly(Judge):
    blank = MappingProxyType({"annotator": "", "cost_usd": 0.0})

    def judge(self, instructions, a, b):
        scores = self.compare(instructions, a, b)
        return Verdicts(scores, {"annotator": np.full(len(a), self.name), "cost_usd": np.full(len(a), 0.5)})


def second_wins(instruction, a, b):
    """Prefers the text "second ..." wherever it stands."""
    return float(b.startswith("second"))


def close(share, expected, num=N):
    """Within three standard deviations of a share of `num`."""
    return abs(share - expected) < 3 * math.sqrt(expected * (1 - expected) / num)


def test_win_rate_asks_once_about_open_rows():
    referee = Costly(0.75)
    oracle = WinRate(referee, {"i": "reference", "j": "reference"})
    verdicts = judge(oracle, ["i", "j", "k", "j"], ["reference", "better", "better", ""])
    np.testing.assert_array_equal(verdicts.scores, [0.5, 0.75, math.nan, 0.75])
    assert referee.rows == [[("j", "reference", "better"), ("j", "reference", "")]]
    assert [bool(reason) for reason in verdicts.details["unscored_reason"]] == [False, False, True, False]
    # Details reach the top and are blank where nobody was asked.
    assert verdicts.details["annotator"].tolist() == ["", "judge", "", "judge"]
    assert verdicts.details["cost_usd"].tolist() == [0.0, 0.5, 0.0, 0.5]
    np.testing.assert_array_equal(oracle.score(["i", "k"], ["reference", "x"]), [0.5, math.nan])
    assert len(referee.rows) == 1  # nothing was open
    empty = WinRate(Judge(1.0), {"i": ""})  # an empty reference is one, and an empty response equals it
    np.testing.assert_array_equal(empty.score(["i", "i"], ["", "x"]), [0.5, 1.0])


@pytest.mark.parametrize("p", [0.0, 0.25, 0.5])
def test_flip_rate_and_calls(p):
    """Mixture of AlpacaFarm: 2p of the rows get a coin and cost nothing, p of all come out flipped."""
    referee = Judge(second_wins)
    verdicts = compare(Flip(referee, p, seed=7), INSTRUCTIONS, A, B)
    noised = verdicts.details.get("noised", np.zeros(N, dtype=bool))
    assert p in (0, 0.5) or close(noised.mean(), 2 * p)
    assert noised.all() == (p == 0.5)
    assert noised.any() == (p > 0)
    assert [len(rows) for rows in referee.rows] == [N - noised.sum()][: p < 0.5]
    assert (verdicts.scores[~noised] == 1).all()
    assert p == 0 or close(1 - verdicts.scores.mean(), p)
    assert p == 0 or close(verdicts.scores[noised].mean(), 0.5, noised.sum())


def test_noise_depends_on_seed_and_responses():
    one, other = (Flip(Judge(second_wins), 0.25, seed=seed) for seed in (5, 6))
    assert close((one.compare(INSTRUCTIONS, A, B) != other.compare(INSTRUCTIONS, A, B)).mean(), 0.375)
    same_instruction = compare(one, ["Ask"] * 2000, A[:2000], B[:2000])
    assert close(same_instruction.details["noised"].mean(), 0.5, 2000)


@pytest.mark.parametrize("always", [0.0, 1.0])
def test_nested_noise_has_coins_of_its_own(always):
    inner = Flip(Judge(always), 0.25, seed=1)
    once, twice = (compare(noisy, INSTRUCTIONS, A, B) for noisy in (inner, Flip(inner, 0.1, seed=1)))
    assert twice.details["noised"][once.details["noised"]].all()
    assert close(twice.details["noised"].mean(), 1 - 0.5 * 0.8)  # left alone by both
    assert close((twice.scores != always).mean(), 0.25 * 0.9 + 0.75 * 0.1)  # one of the two flips, not both


@pytest.mark.parametrize("p", [-0.01, 0.51, math.nan])
def test_flip_needs_a_probability_up_to_a_half(p):
    with pytest.raises(ValueError, match="from 0 to 0.5"):
        Flip(Judge(), p)


@pytest.mark.parametrize(("p", "score"), [(0.0, 0.5), (second_wins, 1.0)], ids=["likes a place", "likes a text"])
def test_both_orders_cancel_a_position_bias(p, score):
    referee = Costly(p)
    verdicts = compare(BothOrders(referee), INSTRUCTIONS[:3], A[:3], B[:3])
    assert verdicts.scores.tolist() == [score] * 3
    assert (verdicts.details["orders_agree"] == (score == 1.0)).all()
    assert verdicts.details["cost_usd"].tolist() == [1.0, 1.0, 1.0]
    (rows,) = referee.rows
    assert rows[3:] == [(i, b, a) for i, a, b in rows[:3]]


@pytest.mark.parametrize("name", ["sim_eval", "sim_ann", "human"])
def test_both_orders_refuse_judges_that_shuffle(name):
    with pytest.raises(ValueError, match="order"):
        BothOrders(sandbox.judge(name))


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


def test_recorded_judges_find_references_in_either_place():
    recorded = RecordedJudge(Dataset(), generator="good")
    a = ["reference", "fine", "fair", "fine", "same"]
    b = ["fine", "reference", "reference", "fair", "same"]
    verdicts = compare(recorded, ["i", "i", "j", "i", "i"], a, b)
    np.testing.assert_array_equal(verdicts.scores, [1.0, 0.0, 1.0, math.nan, 0.5])
    assert verdicts.details["unscored_reason"].tolist() == ["", "", "", NO_REFERENCE_IN_PAIR, ""]


ASKED = ["i", "j", "k", "l"]
ANSWERED = ["w", "x", "y", "z"]

# Three members' scores of four responses, and by hand: means, lowest, variances (population).
SCORES = ([1.0, 2.0, -3.0, 0.5], [2.0, 2.0, 0.0, 0.5], [6.0, 2.0, 0.0, -1.0])
MEANS = [3.0, 2.0, -1.0, 0.0]
LOWEST = [1.0, 2.0, -3.0, -1.0]
VARIANCES = [14 / 3, 0.0, 2.0, 0.5]  # (4 + 1 + 9) / 3, 0, (4 + 1 + 1) / 3, (1 + 1 + 4) / 12


class Given:
    """Scores as given, with details, counting its calls."""

    def __init__(self, scores, name="given", **details):
        self.scores, self.name, self.details, self.calls = scores, name, details, []

    def score(self, instructions, responses):
        return self.judge(instructions, responses).scores

    def judge(self, instructions, responses):
        self.calls.append((list(instructions), list(responses)))
        return Verdicts(np.array(self.scores), {key: np.array(values) for key, values in self.details.items()})


def members():
    return [Given(scores, name) for scores, name in zip(SCORES, "abc", strict=True)]


@pytest.mark.parametrize(
    ("combine", "weight", "name", "expected"),
    [
        ("mean", None, "ensemble:mean", MEANS),
        ("min", None, "ensemble:min", LOWEST),
        ("uwo", None, "ensemble:uwo0.5", [3 - 7 / 3, 2.0, -2.0, -0.25]),
        ("uwo", 0.1, "ensemble:uwo0.1", [3 - 1.4 / 3, 2.0, -1.2, -0.05]),
    ],
)
def test_the_three_ways_to_combine(combine, weight, name, expected):
    three = members()
    ensemble = Ensemble((each for each in three), combine, weight)  # members may come from a generator
    assert ensemble.name == name
    verdicts = judge(ensemble, ASKED, ANSWERED)
    assert [member.calls for member in three] == [[(ASKED, ANSWERED)]] * 3  # each once, about the whole batch
    np.testing.assert_allclose(verdicts.scores, expected, rtol=1e-14, atol=1e-15)
    np.testing.assert_allclose(verdicts.details["disagreement"], np.sqrt(VARIANCES), rtol=1e-14)
    assert [verdicts.details[f"score:{name}"].tolist() for name in "abc"] == list(SCORES)
    assert verdicts.details["unscored_reason"].tolist() == [""] * 4
    assert verdicts.details.keys() == {"disagreement", "unscored_reason", "score:a", "score:b", "score:c"}
    np.testing.assert_array_equal(ensemble.score(ASKED, ANSWERED), verdicts.scores)
    alone = judge(Ensemble([Given(SCORES[2])], combine), ASKED, ANSWERED)  # one member never disagrees
    assert alone.scores.tolist() == SCORES[2]
    assert alone.details["disagreement"].tolist() == [0.0] * 4


@pytest.mark.parametrize("combine", ["mean", "min", "uwo"])
def test_without_one_members_verdict_there_is_none(combine):
    unsure = Given([math.nan, 1.0, math.nan, 1.0], "unsure", unscored_reason=["never judged", "", "", ""])
    shy = Given([math.nan, 1.0, 1.0, math.nan], "shy")
    verdicts = judge(Ensemble([Constant(1.0), unsure, shy], combine), ASKED, ANSWERED)
    np.testing.assert_array_equal(verdicts.scores, [math.nan, 1.0, math.nan, math.nan])
    np.testing.assert_array_equal(verdicts.details["disagreement"], [math.nan, 0.0, math.nan, math.nan])
    assert verdicts.details["score:constant"].tolist() == [1.0] * 4
    reasons = ["unsure: never judged", "", "unsure: no verdict", "shy: no verdict"]
    assert verdicts.details["unscored_reason"].tolist() == reasons


def test_member_details_never_replace_the_ensembles():
    one = Given([1.0, 2.0], "one", cost_usd=[0.25, 0.0], noised=[True, False], annotator=["gpt4", "lazy"])
    one.details |= {"score": [99.0, 99.0], "disagreement": [True, True], "listed": [3, 4]}
    two = Given([3.0, 2.0], "two", cost_usd=[0.5, 1.0], noised=[False, False], annotator=["gpt4", "keen"])
    details = judge(Ensemble([one, two]), ["i", "j"], ["x", "y"]).details
    assert next(iter(details)) == "disagreement"
    assert {key: values.tolist() for key, values in details.items()} == {
        "disagreement": [1.0, 0.0],
        "score:one": [1.0, 2.0],
        "score:two": [3.0, 2.0],
        "unscored_reason": ["", ""],
        "cost_usd": [0.75, 1.0],
        "noised": [True, False],
        "annotator:one": ["gpt4", "lazy"],
        "annotator:two": ["gpt4", "keen"],
        "listed:one": [3, 4],
    }


def test_scores_do_not_round_with_the_batch():
    """Bit-equal, for numpy adds up an array's rows in another order than a single one."""
    scores = np.random.default_rng(0).normal(size=(37, 300))

    def combined(size):
        return Ensemble([Given(member[:size]) for member in scores], "uwo").score([""] * size, [""] * size)

    for size in (1, 2, 7):
        np.testing.assert_array_equal(combined(size), combined(300)[:size], strict=True)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ("aba", ("a#1", "b", "a#2")),
        (["a#1", "a", "a", "a#1"], ("a#1#1", "a#2", "a#3", "a#1#2")),
    ],
)
def test_members_that_share_a_name_are_numbered(names, expected):
    ensemble = Ensemble([Given([float(i)], name) for i, name in enumerate(names)])
    assert ensemble.member_names == expected
    details = judge(ensemble, ["i"], ["x"]).details
    assert [details[f"score:{name}"].tolist() for name in expected] == [[float(i)] for i in range(len(names))]


@pytest.mark.parametrize(
    ("arguments", "error", "fact"),
    [
        (([],), ValueError, "none"),
        (([Constant()], "mim"), UnknownNameError, r"'mim'.*'min'.*mean, min, uwo"),
        *((([Constant()], "uwo", weight), ValueError, str(weight)) for weight in (-0.1, math.nan, math.inf)),
        (([Constant()], "min", 0.0), ValueError, "'uwo'.*0.0.*'min'"),
        ((["constant"],), TypeError, "'constant'"),
        (([Constant(), sandbox.judge("sim_eval", 0)],), TypeError, "score"),
    ],
)
def test_what_is_refused(arguments, error, fact):
    with pytest.raises(error, match=fact):
        Ensemble(*arguments)


def test_ensembles_of_a_mapping_share_their_models(tiny_dataset, tiny_model):
    models = {"ensemble": [{"reward_model": str(tiny_model)}, {"name": "constant", "value": 1.0}]}
    spec = {"ensemble": [models, "constant"], "combine": "uwo", "weight": 0.1, "name": "mine"}
    ensemble = make_oracle(spec, dataset=tiny_dataset)
    assert (ensemble.name, ensemble.combine) == ("mine", "uwo")
    assert ensemble.member_names == ("ensemble:mean", "constant")
    assert make_oracle(json.loads(json.dumps(spec)), dataset=tiny_dataset) is ensemble
    assert make_oracle({**spec, "combine": "mean", "weight": None}, dataset=tiny_dataset) is not ensemble
    # A model is loaded once, however many ensembles it is a member of.
    alone = make_oracle({"reward_model": str(tiny_model)}, dataset=tiny_dataset)
    assert ensemble.members[0].members[0] is alone


LEVELS = {"i": 10.0, "j": -3.0}


class Leveled:
    """Length of the response, plus a constant of the instruction; counts what it is asked."""

    name, levels = "leveled", LEVELS

    def __init__(self):
        self.calls = []

    def judge(self, instructions, responses):
        self.calls.append(list(zip(instructions, responses, strict=True)))
        level = np.array([self.levels[x] for x in instructions])
        lengths = np.array([float(len(y)) for y in responses])
        return Verdicts(np.where(lengths > 5, np.nan, level + lengths), {"length": lengths})

    def score(self, instructions, responses):
        return self.judge(instructions, responses).scores


def test_scores_are_differences_to_fixed_answers():
    oracle = Leveled()
    fixed = {"i": ["a", "abcd"], "j": ("ab",)}  # mean lengths 2.5 and 2
    centred = BaselineSubtracted(oracle, lambda asked: [fixed[x] for x in asked])
    found = judge(centred, ["i", "j", "i"], ["abcd", "", "toolong"])
    np.testing.assert_array_equal(found.scores, [1.5, -2.0, np.nan])
    np.testing.assert_array_equal(found.details["length"], [4.0, 0.0, 7.0])
    assert centred.name == "leveled"


def test_a_level_is_asked_once():
    oracle = Leveled()
    centred = BaselineSubtracted(oracle, lambda instructions: [["ab"] for _ in instructions])
    centred.score(["i", "j", "i"], ["a", "b", "c"])
    centred.score(["j"], ["abc"])
    assert oracle.calls == [[("i", "a"), ("j", "b"), ("i", "c")], [("i", "ab"), ("j", "ab")], [("j", "abc")]]


@pytest.mark.parametrize("answers", [["ab", "toolong"], []], ids=["no verdict on one", "none at all"])
def test_without_a_level_there_is_no_verdict(answers):
    fixed = [answers]
    centred = BaselineSubtracted(Leveled(), lambda asked: fixed * len(asked))
    assert np.isnan(centred.score(["i"], ["a"])).all()
    fixed[0] = ["ab"]  # an outage that is over
    assert centred.score(["i"], ["a"]).tolist() == [-1.0]


def test_a_text_is_no_list_of_answers():
    for answers, error in ((["ab", "ab"], TypeError), ([["ab"]], ValueError)):
        with pytest.raises(error):
            BaselineSubtracted(Leveled(), lambda asked, answers=answers: answers).score(["i", "j"], ["a", "a"])
