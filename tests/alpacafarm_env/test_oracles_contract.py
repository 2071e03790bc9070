"""The promises that every oracle and every judge keeps."""

import copy
import math

import numpy as np
import pytest
from tiny_reward_model import make_tiny_reward_model

from alpacafarm_env.instructions import Instruction
from alpacafarm_env.oracles import (
    BothOrders,
    Constant,
    Ensemble,
    Flip,
    OracleError,
    Pool,
    PreferenceOracle,
    Recorded,
    RecordedJudge,
    RewardModel,
    RewardOracle,
    Verdicts,
    WinRate,
    compare,
    judge,
)

INSTRUCTIONS = [Instruction(f"Ask {i}", "with input" if i % 4 == 0 else "", id=i, split="eval") for i in range(10)]
REFERENCES = {text: f"reference {i}" for i, text in enumerate(INSTRUCTIONS) if i != 3}
# The same as the reference, without a reference, empty, not ASCII, and others.
RESPONSES = ["", "reference 1", "short", "rather long", "", "日本 🙂", "short", "rather long", "", "日本 🙂"]


class LongerWins:
    """A judge that says who judged; no verdict on a response "short"."""

    def __init__(self, name="longer"):
        self.name = name
        self.blank = {"annotator": "", "cost_usd": 0.0}
        self.calls = []

    def compare(self, instructions, a, b):
        return self.judge(instructions, a, b).scores

    def judge(self, instructions, a, b):
        self.calls.append(len(instructions))
        p = [
            math.nan if "short" in (x, y) else 1 / (1 + math.exp((len(x) - len(y)) / 10))
            for x, y in zip(a, b, strict=True)
        ]
        return Verdicts(np.array(p), {"annotator": np.array([self.name] * len(p)), "cost_usd": np.full(len(p), 0.25)})


class Plain:
    """A judge with nothing but a name and `compare`."""

    name = "plain"

    def compare(self, instructions, a, b):
        return np.array([0.5 + 0.5 * (x < y) - 0.5 * (x > y) for x, y in zip(a, b, strict=True)], np.float32)


class Stored:
    """Judgements of half the responses."""

    def recorded_verdicts(self):
        rows = list(zip(map(str, INSTRUCTIONS), RESPONSES, strict=True))
        return {row: [0.0, 0.5, 1.0, math.nan][i % 4] for i, row in enumerate(rows) if i < 6}

    def instructions(self, split):
        return [text for text in INSTRUCTIONS if text in REFERENCES]

    def references(self, split):
        return [REFERENCES[text] for text in self.instructions(split)]


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    return make_tiny_reward_model(tmp_path_factory.mktemp("model"))


JUDGES = {
    "longer": LongerWins,
    "plain": Plain,
    "flip": lambda: Flip(LongerWins(), 0.25, seed=3),
    "both_orders": lambda: BothOrders(LongerWins()),
    "pool": lambda: Pool([LongerWins("one"), Plain(), LongerWins("two")], seed=1),
    "nested": lambda: Flip(BothOrders(Pool([LongerWins("one"), LongerWins("two")])), 0.1),
    "recorded": lambda: RecordedJudge(Stored()),
}
ORACLES = {
    "constant": lambda folder: Constant(0.5),
    "recorded": lambda folder: Recorded(Stored()),
    "reward_model": lambda folder: RewardModel(folder, batch_size=4, max_length=40),
    "ensemble of models": lambda folder: Ensemble(
        [RewardModel(folder, batch_size=4, max_length=40), Constant(0.5), RewardModel(folder, batch_size=3)], "uwo"
    ),
    "ensemble of judges": lambda folder: Ensemble(
        [WinRate(LongerWins(), REFERENCES), Ensemble([Recorded(Stored())]), WinRate(Flip(LongerWins()), REFERENCES)],
        "min",
    ),
    **{f"win_rate of {name}": lambda folder, make=make: WinRate(make(), REFERENCES) for name, make in JUDGES.items()},
}


@pytest.fixture(params=ORACLES, ids=str)
def oracle(request, model_folder):
    return ORACLES[request.param](model_folder)


@pytest.fixture(params=JUDGES, ids=str)
def preference_oracle(request):
    return JUDGES[request.param]()


def equal_details(left, right):
    assert left.keys() == right.keys()
    for key in left:
        if np.asarray(left[key]).dtype.kind == "f":  # an ensemble's members: scores, as exact as scores are
            np.testing.assert_allclose(left[key], right[key], rtol=0, atol=1e-5, err_msg=key)
        else:
            np.testing.assert_array_equal(left[key], right[key], err_msg=key)


def test_is_an_oracle_and_copies_as_itself(oracle):
    assert isinstance(oracle, RewardOracle)
    assert isinstance(oracle.name, str)
    assert oracle.name
    assert copy.deepcopy({"oracle": oracle})["oracle"] is oracle


def test_scores_are_one_float64_a_row(oracle):
    verdicts = judge(oracle, INSTRUCTIONS, RESPONSES)
    assert verdicts.scores.shape == (10,)
    assert verdicts.scores.dtype == np.float64
    assert not np.isinf(verdicts.scores).any()
    assert all(values.shape == (10,) for values in verdicts.details.values())
    np.testing.assert_array_equal(oracle.score(INSTRUCTIONS, RESPONSES), verdicts.scores)


def test_the_order_of_rows_does_not_matter(oracle):
    order = np.random.default_rng(0).permutation(10)
    whole = judge(oracle, INSTRUCTIONS, RESPONSES)
    shuffled = judge(oracle, [INSTRUCTIONS[i] for i in order], [RESPONSES[i] for i in order])
    np.testing.assert_allclose(shuffled.scores, whole.scores[order], rtol=0, atol=1e-5)
    equal_details(shuffled.details, {key: values[order] for key, values in whole.details.items()})


def test_one_row_alone_says_the_same_under_the_same_keys(oracle):
    whole = judge(oracle, INSTRUCTIONS, RESPONSES)
    for i in range(10):
        alone = judge(oracle, INSTRUCTIONS[i : i + 1], RESPONSES[i : i + 1])
        np.testing.assert_allclose(alone.scores, whole.scores[i : i + 1], rtol=0, atol=1e-5)
        equal_details(alone.details, {key: values[i : i + 1] for key, values in whole.details.items()})


def test_asked_again_it_says_the_same(oracle):
    first, second = judge(oracle, INSTRUCTIONS, RESPONSES), judge(oracle, tuple(INSTRUCTIONS), tuple(RESPONSES))
    np.testing.assert_array_equal(first.scores, second.scores)
    equal_details(first.details, second.details)


def test_an_empty_batch_is_scored_without_a_call(oracle, monkeypatch):
    assert oracle.score([], []).shape == (0,)
    monkeypatch.setattr(type(oracle), "score", None)
    monkeypatch.setattr(type(oracle), "judge", None, raising=False)
    empty = judge(oracle, [], [])
    assert empty.scores.shape == (0,)
    assert empty.scores.dtype == np.float64


def test_a_row_without_a_verdict_says_why(oracle):
    verdicts = judge(oracle, INSTRUCTIONS, RESPONSES)
    none = np.isnan(verdicts.scores)
    if isinstance(oracle, WinRate | Recorded) or oracle.name == "ensemble:min":
        assert none.any()
        np.testing.assert_array_equal(verdicts.details["unscored_reason"] != "", none)
    else:
        assert not none.any()


def test_lengths_that_differ_are_refused(oracle):
    with pytest.raises(ValueError, match=r"same length, got lengths \[10, 9\]"):
        judge(oracle, INSTRUCTIONS, RESPONSES[:-1])


def test_a_judge_is_a_preference_oracle(preference_oracle):
    assert isinstance(preference_oracle, PreferenceOracle)
    assert preference_oracle.name


def test_preferences_are_probabilities_and_turn_around_with_the_pair(preference_oracle):
    references = [REFERENCES.get(text, "no reference") for text in INSTRUCTIONS]
    forth = compare(preference_oracle, INSTRUCTIONS, references, RESPONSES)
    back = compare(preference_oracle, INSTRUCTIONS, RESPONSES, references)
    assert forth.scores.shape == (10,)
    assert forth.scores.dtype == np.float64
    known = ~np.isnan(forth.scores)
    assert known.any()
    assert ((forth.scores[known] >= 0) & (forth.scores[known] <= 1)).all()
    np.testing.assert_allclose(forth.scores, 1 - back.scores, rtol=0, atol=1e-12)
    equal_details(forth.details, back.details)
    assert forth.scores[1] == 0.5  # identical responses


def test_a_judges_blank_names_all_its_details(preference_oracle):
    details = compare(preference_oracle, INSTRUCTIONS, RESPONSES, [f"{text}." for text in RESPONSES]).details
    assert getattr(preference_oracle, "blank", {}).keys() == details.keys()


class Editing:
    """An oracle and judge that overwrites what it is given, where it can."""

    name = "editing"

    def compare(self, *batch):
        for texts in batch:
            if isinstance(texts, list):
                texts[:] = ["edited"] * len(texts)
        return np.full(len(batch[0]), 0.5)

    score = compare


def test_what_an_oracle_does_to_its_batch_nobody_else_sees():
    instructions, responses, others = ["i", "j"], ["long text", "x"], ["y", "z"]
    judge(Editing(), instructions, responses)
    compare(Editing(), instructions, responses, others)
    assert (instructions, responses, others) == (["i", "j"], ["long text", "x"], ["y", "z"])
    second = WinRate(LongerWins(), {"i": "ten letters", "j": ""})
    alone = judge(second, instructions, responses).scores
    together = judge(Ensemble([Editing(), second]), instructions, responses).details
    np.testing.assert_array_equal(together["score:win_rate:longer"], alone)


class Answers:
    """An oracle and judge that says what it was told to."""

    name = "answers"

    def __init__(self, answer):
        self.answer = answer

    def score(self, instructions, responses):
        return self.answer

    def compare(self, instructions, a, b):
        return self.answer


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ([1.0], r"2 rows with shape \(2,\), got shape \(1,\)"),
        (np.zeros((2, 1)), r"got shape \(2, 1\)"),
        (0.5, r"got shape \(\)"),
        ([0.5, None], "real numbers .NaN = no verdict., got dtype object"),
        (["1", "0"], "got dtype <U1"),
        ([True, False], "got dtype bool"),
        ([1 + 1j, 0], "got dtype complex128"),
        ([0.0, math.inf], "gave .*inf.* in row 1"),
        ([-math.inf, 0.0], "gave .*inf.* in row 0"),
    ],
)
def test_a_wrong_answer_is_an_error(answer, message):
    with pytest.raises(OracleError, match=f"'answers'.*{message}"):
        judge(Answers(answer), ["i", "j"], ["x", "y"])
    with pytest.raises(OracleError, match=f"'answers'.*{message}"):
        compare(Answers(answer), ["i", "j"], ["x", "y"], ["z", "w"])


@pytest.mark.parametrize("p", [-0.1, 1.1])
def test_a_preference_is_a_probability(p):
    with pytest.raises(OracleError, match="probabilities from 0 to 1"):
        compare(Answers([0.5, p]), ["i", "j"], ["x", "y"], ["z", "w"])
    assert judge(Answers([0.5, p]), ["i", "j"], ["x", "y"]).scores[1] == p


def test_integers_and_float32_become_float64_and_nan_stays():
    assert judge(Answers([1, 0]), ["i", "j"], ["x", "y"]).scores.dtype == np.float64
    scores = judge(Answers(np.array([0.5, math.nan], np.float32)), ["i", "j"], ["x", "y"]).scores
    np.testing.assert_array_equal(scores, [0.5, math.nan])


def test_details_must_fit_the_batch():
    class Talkative(Answers):
        def judge(self, instructions, responses):
            return self.answer

    with pytest.raises(OracleError, match=r"detail 'who' must have shape \(2,\), got \(1,\)"):
        judge(Talkative(Verdicts(np.zeros(2), {"who": np.array(["x"])})), ["i", "j"], ["x", "y"])
    with pytest.raises(OracleError, match="must return Verdicts, got list"):
        judge(Talkative([1.0, 2.0]), ["i", "j"], ["x", "y"])
