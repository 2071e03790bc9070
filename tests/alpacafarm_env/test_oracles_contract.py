"""The promises that every oracle and judge keeps, a function as an oracle too; one oracle asked by many threads."""

import copy
import math
import threading
from concurrent.futures import ThreadPoolExecutor

import gymnasium as gym
import numpy as np
import pytest
from ledger_calls import fork

from alpacafarm_env.envs.instruction import InstructionEnv
from alpacafarm_env.instructions import Instruction
from alpacafarm_env.oracles import (
    BothOrders,
    Constant,
    Dialed,
    Ensemble,
    Flip,
    FunctionOracle,
    MicroBatched,
    OracleError,
    PreferenceOracle,
    Recorded,
    RecordedJudge,
    RewardModel,
    RewardOracle,
    Verdicts,
    WinRate,
    compare,
    judge,
    make_oracle,
)
from alpacafarm_env.wrappers import AddScore

INSTRUCTIONS = [Instruction(f"Ask {i}", "with input" if i % 4 == 0 else "", id=i, split="eval") for i in range(10)]
REFERENCES = {text: f"reference {i}" for i, text in enumerate(INSTRUCTIONS) if i != 3}
# The same as the reference, without a reference, empty, not ASCII, and others.
RESPONSES = ["", "reference 1", "short", "rather long", "", "日本 🙂", "short", "rather long", "", "日本 🙂"]


class LongerWins:
    """A judge that says who judged; no verdict on a response "short"."""

    def __init__(self, name="longer"):
        self.name = name
        self.blank = {"annotator": "", "cost_usd": 0.0}

    def compare(self, instructions, a, b):
        return self.judge(instructions, a, b).scores

    def judge(self, instructions, a, b):
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


JUDGES = {
    "longer": LongerWins,
    "plain": Plain,
    "flip": lambda: Flip(LongerWins(), 0.25, seed=3),
    "both_orders": lambda: BothOrders(LongerWins()),
    "nested": lambda: Flip(BothOrders(LongerWins()), 0.1),
    "recorded": lambda: RecordedJudge(Stored()),
    "dialed": lambda: Dialed(LongerWins(), length_bias=-0.2, position_bias=0.1, annotator_noise=0.3, temperature=0.5),
    "flip over dials": lambda: Flip(Dialed(Plain(), list_bias=1, instruction_noise=1), 0.2),
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
def oracle(request, tiny_model):
    return ORACLES[request.param](tiny_model)


@pytest.fixture(params=JUDGES, ids=str)
def preference_oracle(request):
    return JUDGES[request.param]()


def equal_verdicts(left, right, rows=slice(None)):
    """Equal to the rows of another batch's: scores as far as a model's sums are, details under the same keys."""
    np.testing.assert_allclose(left.scores, right.scores[rows], rtol=0, atol=1e-5)
    assert left.details.keys() == right.details.keys()
    for key, values in left.details.items():
        if values.dtype.kind == "f":  # an ensemble's members: scores, as exact as scores are
            np.testing.assert_allclose(values, right.details[key][rows], rtol=0, atol=1e-5, err_msg=key)
        else:
            np.testing.assert_array_equal(values, right.details[key][rows], err_msg=key)


def test_scores_are_one_float64_a_row(oracle):
    assert isinstance(oracle, RewardOracle)
    assert isinstance(oracle.name, str)
    assert oracle.name
    assert copy.deepcopy({"oracle": oracle})["oracle"] is oracle
    verdicts = judge(oracle, INSTRUCTIONS, RESPONSES)
    assert (verdicts.scores.shape, verdicts.scores.dtype) == ((10,), np.float64)
    assert not np.isinf(verdicts.scores).any()
    assert all(values.shape == (10,) for values in verdicts.details.values())
    np.testing.assert_array_equal(oracle.score(INSTRUCTIONS, RESPONSES), verdicts.scores)
    none = np.isnan(verdicts.scores)
    if isinstance(oracle, WinRate | Recorded) or oracle.name == "ensemble:min":
        assert none.any()
        np.testing.assert_array_equal(verdicts.details["unscored_reason"] != "", none)
    else:
        assert not none.any()


def test_rows_score_alike_in_any_batch(oracle):
    whole = judge(oracle, INSTRUCTIONS, RESPONSES)
    order = np.random.default_rng(0).permutation(10)
    equal_verdicts(judge(oracle, [INSTRUCTIONS[i] for i in order], [RESPONSES[i] for i in order]), whole, order)
    for i in range(10):
        equal_verdicts(judge(oracle, INSTRUCTIONS[i : i + 1], RESPONSES[i : i + 1]), whole, slice(i, i + 1))
    again = judge(oracle, tuple(INSTRUCTIONS), tuple(RESPONSES))
    np.testing.assert_array_equal(again.scores, whole.scores)
    equal_verdicts(again, whole)


def test_empty_batches_need_no_call(oracle, monkeypatch):
    assert oracle.score([], []).shape == (0,)
    monkeypatch.setattr(type(oracle), "score", None)
    monkeypatch.setattr(type(oracle), "judge", None, raising=False)
    empty = judge(oracle, [], []).scores
    assert (empty.shape, empty.dtype) == ((0,), np.float64)
    with pytest.raises(ValueError, match=r"\[10, 9\]"):
        judge(oracle, INSTRUCTIONS, RESPONSES[:-1])


def test_preferences_turn_around_with_the_pair(preference_oracle):
    assert isinstance(preference_oracle, PreferenceOracle)
    assert preference_oracle.name
    references = [REFERENCES.get(text, "no reference") for text in INSTRUCTIONS]
    forth = compare(preference_oracle, INSTRUCTIONS, references, RESPONSES)
    back = compare(preference_oracle, INSTRUCTIONS, RESPONSES, references)
    assert (forth.scores.shape, forth.scores.dtype) == ((10,), np.float64)
    known = forth.scores[~np.isnan(forth.scores)]
    assert known.size
    assert ((known >= 0) & (known <= 1)).all()
    assert forth.scores[1] == 0.5  # identical responses
    if "shown_first" in back.details:  # the same text as before, but which it is has changed; of equal ones either
        shown = np.array([{"a": "b", "b": "a"}.get(each, each) for each in back.details["shown_first"]])
        shown[1] = forth.details["shown_first"][1]
        back = back.with_detail("shown_first", shown)
    equal_verdicts(Verdicts(1 - back.scores, back.details), forth)
    assert getattr(preference_oracle, "blank", {}).keys() == forth.details.keys()


class Answers:
    """An oracle and judge that says what it was told to, once it has overwritten what it is given, where it can."""

    name = "answers"

    def __init__(self, answer):
        self.answer = answer

    def compare(self, *batch):
        for texts in batch:
            if isinstance(texts, list):
                texts[:] = ["edited"] * len(texts)
        return self.answer

    score = compare


def test_oracles_cannot_change_the_batch():
    instructions, responses, others = ["i", "j"], ["long text", "x"], ["y", "z"]
    editing = Answers([0.5, 0.5])
    judge(editing, instructions, responses)
    compare(editing, instructions, responses, others)
    assert (instructions, responses, others) == (["i", "j"], ["long text", "x"], ["y", "z"])
    second = WinRate(LongerWins(), {"i": "ten letters", "j": ""})
    alone = judge(second, instructions, responses).scores
    together = judge(Ensemble([editing, second]), instructions, responses).details
    np.testing.assert_array_equal(together["score:win_rate:longer"], alone)


@pytest.mark.parametrize(
    ("answer", "fact"),
    [
        ([1.0], r"2 rows.*\(2,\).*\(1,\)"),
        (0.5, r"\(\)"),
        ([0.5, None], "dtype object"),
        (["1", "0"], "dtype <U1"),
        ([0.0, math.inf], "inf.* in row 1"),
    ],
)
def test_a_wrong_answer_is_an_error(answer, fact):
    with pytest.raises(OracleError, match=f"'answers'.*{fact}"):
        judge(Answers(answer), ["i", "j"], ["x", "y"])
    with pytest.raises(OracleError, match=f"'answers'.*{fact}"):
        compare(Answers(answer), ["i", "j"], ["x", "y"], ["z", "w"])


def test_answers_are_checked_and_nan_stays():
    for p in (-0.1, 1.1):
        with pytest.raises(OracleError, match="from 0 to 1"):
            compare(Answers([0.5, p]), ["i", "j"], ["x", "y"], ["z", "w"])
        assert judge(Answers([0.5, p]), ["i", "j"], ["x", "y"]).scores[1] == p
    assert judge(Answers([1, 0]), ["i", "j"], ["x", "y"]).scores.dtype == np.float64
    scores = judge(Answers(np.array([0.5, math.nan], np.float32)), ["i", "j"], ["x", "y"]).scores
    np.testing.assert_array_equal(scores, [0.5, math.nan])


def test_details_must_fit_the_batch():
    class Talkative(Answers):
        def judge(self, instructions, responses):
            return self.answer

    for answer, fact in (
        (Verdicts(np.zeros(2), {"who": np.array(["x"])}), r"'who' .*\(2,\).*\(1,\)"),
        ([1, 2], "list"),
    ):
        with pytest.raises(OracleError, match=fact):
            judge(Talkative(answer), ["i", "j"], ["x", "y"])


def length(instructions, responses):
    return [len(text) for text in responses]


def test_functions_are_oracles_by_their_name(tiny_dataset):
    env = InstructionEnv(tiny_dataset, oracle=length)
    env = AddScore(env, key="half", oracle=lambda instructions, responses: np.array([0.5] * len(responses)))
    env.reset(seed=0)
    _, reward, *_, info = env.step("123")
    assert (reward, info["half"], info["reward_components"]) == (3, 0.5, {"length": 3})
    given = {"oracle": lambda asked, texts: [float(len(asked) == 2)] * len(texts), "autoreset_mode": "Disabled"}
    envs = gym.make_vec("AlpacaFarm-PPO-v0", num_envs=2, **given)
    envs.reset(seed=0)
    _, rewards, *_, infos = envs.step(["a", "b"])
    assert rewards.tolist() == [1, 1]
    assert set(infos["oracle"]) == {"lambda"}
    named = make_oracle(FunctionOracle(length, name="mine"), dataset=tiny_dataset)
    both = make_oracle({"ensemble": [length, named, {"name": "constant", "value": 3}]}, dataset=tiny_dataset)
    assert list(both.member_names) == ["length", "mine", "constant"]
    assert both.score(["x", "y"], ["", "123"]).tolist() == [1, 3]


class Gate:
    """Scores a text by its length, with its first letter as a detail; its calls wait for a gate where there is one."""

    name = "gate"

    def __init__(self, *, closed=False):
        self.calls, self.entered, self.gate = [], threading.Semaphore(0), threading.Event()
        if not closed:
            self.gate.set()

    def judge(self, instructions, responses):
        self.calls.append(responses)
        self.entered.release()
        assert self.gate.wait(10)
        if "bad" in responses:
            raise ValueError("bad")
        if responses[0] == "down":
            raise ConnectionError("down")
        if "stop" in responses:
            raise KeyboardInterrupt
        return Verdicts(np.array([len(text) for text in responses], float), {"first": np.array([*responses])})

    def score(self, instructions, responses):
        return self.judge(instructions, responses).scores


def ask_while_busy(oracle, batches, **options):
    """The first asks, the others come while the oracle answers it: a result or an error of each."""
    batched = MicroBatched(oracle, **options)

    def ask(batch):
        try:
            return judge(batched, ["i"] * len(batch), batch)
        except (ValueError, OSError, OracleError, KeyboardInterrupt) as error:
            return error

    with ThreadPoolExecutor(len(batches)) as threads:
        found = [threads.submit(ask, batches[0])]
        assert oracle.entered.acquire(timeout=10)
        for place, batch in enumerate(batches[1:], start=1):
            found.append(threads.submit(ask, batch))
            while len(batched._waiting) < place:
                pass
        oracle.gate.set()
        return batched, [each.result(10) for each in found]


def test_waiting_threads_share_the_next_call():
    oracle, batches = Gate(closed=True), [["a"], ["bb", "ccc"], ["d"], ["eeeee"]]
    batched, found = ask_while_busy(oracle, batches)
    assert oracle.calls == [("a",), ("bb", "ccc", "d", "eeeee")]
    assert batched.calls == 2
    for batch, verdicts in zip(batches, found, strict=True):
        assert verdicts.scores.tolist() == [len(text) for text in batch]
        assert verdicts.details["first"].tolist() == batch


def test_calls_have_at_most_max_rows():
    oracle = Gate(closed=True)
    ask_while_busy(oracle, [["a"], ["b"] * 3, ["c"], ["d"] * 9, ["e"]], max_rows=4)
    assert [len(call) for call in oracle.calls] == [1, 4, 9, 1]


def test_nobody_fails_by_another_s_texts():
    _, found = ask_while_busy(Gate(closed=True), [["a"], ["bb"], ["bad"], ["dddd"]])
    assert [each.scores.tolist() for each in (*found[:2], found[3])] == [[1], [2], [4]]
    assert isinstance(found[2], ValueError)


def test_outages_fail_all_with_one_call():
    batched, found = ask_while_busy(Gate(closed=True), [["down"]] * 9)
    assert [type(each) for each in found] == [ConnectionError] * 9
    assert batched.calls == 2  # for the first, and for all others
    assert judge(batched, ["i"], ["aa"]).scores.tolist() == [2]


def test_an_interrupt_reaches_who_asks_and_ends_no_other_call():
    batched, found = ask_while_busy(Gate(closed=True), [["a"], ["stop"], ["ccc"]])
    assert isinstance(found[1], KeyboardInterrupt)
    assert isinstance(found[2], OracleError)
    assert judge(batched, ["i"], ["dddd"]).scores.tolist() == [4]


def test_one_thread_alone_never_waits():
    batched = MicroBatched(Gate(), wait_s=60.0)
    for _ in range(3):
        assert judge(batched, ["i"], ["aa"]).scores.tolist() == [2]


def test_waiting_for_others_is_limited():
    oracle = Gate(closed=True)
    batched, _ = ask_while_busy(oracle, [["a"], ["b"], ["c"]], wait_s=0.01)
    done = threading.Event()
    threading.Thread(target=lambda: (judge(batched, ["i"], ["a"]), done.set()), daemon=True).start()
    assert done.wait(5)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_fork_may_ask_too():
    batched = MicroBatched(Gate())
    batched.score(["i"], ["a"])

    def in_child():
        assert batched.score(["i"], ["aa"]).tolist() == [2]

    assert fork(in_child)
