"""Gold, annotators and raters: formulas by hand, what gold is not cheated with, what draws are keyed on."""

import json
import math
import re
from collections import Counter
from dataclasses import astuple, replace
from hashlib import sha256

import gymnasium as gym
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import kstest, logistic

import alpacafarm_env
from alpacafarm_env import Critique, Instruction, Rating, sandbox
from alpacafarm_env.data import read_critiques, read_ratings
from alpacafarm_env.errors import DataError, UnknownNameError
from alpacafarm_env.oracles import Constant, OracleError, compare, judge, rated
from alpacafarm_env.sandbox import gold
from alpacafarm_env.sandbox import judge as named_judge
from alpacafarm_env.sandbox.gold import GoldOracle, Parts
from alpacafarm_env.sandbox.judges import FEATURES, GREEDY, POOL, Annotator, Annotators, features
from alpacafarm_env.sandbox.raters import Raters

ASK = "List three traits of a lion."  # brave golden proud roaring majestic fierce; budget 10 + 3 * 3 = 19 words
ASK_LIST = ASK + " Use a list."
ASK_SENTENCE = ASK + " Answer in a sentence."
FOREIGN = "What is the capital of France?"
WHOLE = "A lion is brave, golden and proud."
PERFECT = Parts(complete=1.0, false=0.0, repeated=0.0, form=1.0, fluent=1.0, excess=0.0)
WEIGHTS = (5.0, -0.6, -0.4, 1.0, 1.0, -0.1)


@pytest.mark.parametrize(
    ("instruction", "response", "changed"),
    [
        (ASK, WHOLE, {}),
        (ASK, "- brave\n- golden\n- proud", {}),
        (ASK, "Sure! A lion is fierce, brave and proud. Have a nice day!", {}),
        (ASK, "A lion is brave. It is golden and proud.", {}),
        (ASK, "a LION is BRAVE, GOLDEN and PROUD.", {"fluent": 0}),  # true, but shouted
        # complete
        (ASK, "A lion is brave.", {"complete": 1 / 3}),
        (ASK.replace("three", "two"), "A lion is brave.", {"complete": 1 / 2}),
        (ASK, "A lion is brave, golden, proud, roaring and fierce.", {}),  # no more than was asked for
        # false: an item of another topic, another aspect, another kind
        (ASK, "A lion is brave, golden, proud and shy.", {"false": 1}),
        (ASK, "A lion is brave and meat.", {"complete": 1 / 3, "false": 1}),
        (ASK, "A fox is brave, golden and proud.", {"false": 1}),
        (ASK, "The answer is shy, hot, red and shy.", {"complete": 0, "false": 3, "repeated": 1}),
        # repeated
        (ASK, "A lion is brave, brave, golden and proud. It is proud.", {"repeated": 2}),
        # form
        (ASK_LIST, "- brave\n- golden\n- proud", {}),
        (ASK_LIST, "Of course!\n- brave\n- golden\n- proud\nI hope this helps!", {}),
        (ASK_LIST, WHOLE, {"form": 0}),
        (ASK_LIST, "A lion is brave.\n- golden\n- proud", {"form": 0}),
        (ASK_SENTENCE, WHOLE, {}),
        (ASK_SENTENCE, "- brave\n- golden\n- proud", {"form": 0}),
        # fluent: 4 of 7 words stand in a legal sentence; 0 of 3; 4 of 5
        (ASK, "A lion is brave. golden proud lion", {"fluent": 4 / 7}),
        (ASK, "brave golden proud", {"fluent": 0}),
        (ASK, "A lion is golden. Brave", {"complete": 2 / 3, "fluent": 4 / 5}),
        # excess: 7 + 4 * 4 = 23 words are 4 over the budget of 19
        (ASK, WHOLE + " It is a brave." * 4, {"repeated": 4, "excess": 4}),
    ],
)
def test_parts_and_their_weights_by_hand(instruction, response, changed):
    expected = astuple(replace(PERFECT, **changed))
    assert astuple(gold.parts(instruction, response)) == pytest.approx(expected)
    assert gold.gold(instruction, response) == pytest.approx(np.dot(WEIGHTS, expected))


@pytest.mark.parametrize(
    ("instruction", "response", "expected"),
    [
        *((asked, "", 0.0) for asked in (ASK, ASK_LIST, ASK_SENTENCE)),
        (ASK_SENTENCE, "\n \n\t", 0.0),
        (ASK, "!!! ... ??? ---", 1.0),
        (ASK_SENTENCE, "🦁🦁🦁 日本 “ok”", 1.0),
        (ASK, ASK, 1.0),  # the instruction echoed claims nothing and is no sentence of an answer
        (ASK, "A lion is brave, golden and proud\u2028.", 6.0),  # true, but not fluent
        (ASK, "- ", 1.0),
    ],
)
def test_answers_that_are_none(instruction, response, expected):
    assert gold.gold(instruction, response) == pytest.approx(expected)


@settings(max_examples=100)
@given(st.text() | st.lists(st.sampled_from([*WHOLE.split(), "-", "\n", "shy", "Sure!"])).map(" ".join))
def test_any_text_has_finite_gold(text):
    found = gold.parts(ASK_LIST, text)
    assert 0 <= found.complete <= 1
    assert 0 <= found.fluent <= 1
    assert found.form in (0, 1)
    assert min(found.false, found.repeated, found.excess) >= 0
    assert gold.gold(ASK_LIST, text) <= 7


def test_the_oracle_gives_gold_and_parts():
    verdicts = judge(GoldOracle(), [ASK, ASK], [WHOLE, "A lion is shy."])
    np.testing.assert_allclose(verdicts.scores, [7.0, 2 - 0.6])
    np.testing.assert_allclose(verdicts.details["gold_complete"], [1, 0])
    np.testing.assert_allclose(verdicts.details["gold_false"], [0, 1])
    assert set(verdicts.details) == {f"gold_{part}" for part in PERFECT.__dataclass_fields__}
    assert GoldOracle().score([], []).shape == (0,)
    a, b = [WHOLE, "A lion is shy.", "- brave"], ["A lion is shy.", WHOLE, "A lion is brave."]
    np.testing.assert_array_equal(named_judge("gold").compare([ASK] * 3, a, b), [0, 1, 0.5])


@pytest.mark.parametrize(
    "filler", [" " * 64_000, "🙂" * 1500, "x" * 2**20, "!" * 2**20, "A lion is brave. " * 60_000, "- brave\n" * 120_000]
)
def test_a_page_of_nothing_is_worse_than_nothing(filler):
    assert gold.gold(ASK, filler) < gold.gold(ASK, "")
    for name in ("sim_eval", "human"):
        verdicts = named_judge(name).compare([ASK, f"Hi! {ASK}"], [WHOLE] * 2, [filler] * 2)
        assert verdicts.tolist() == [0.0, 0.0]


GOOD, BAD = "A lion is brave, golden and proud.", "A lion is shy."
NUM = 1500
NAMES = ("sim_eval", "sim_ann", "sim_gpt4", "human", "gold")


@pytest.fixture(scope="module")
def pairs():
    """Unequal pairs for real instructions: the instruction's answers by two writers."""
    rng = np.random.default_rng(0)
    asks = list(sandbox.SANDBOX.instructions("unlabeled")[:NUM])
    traits = ["brave", "golden", "proud", "roaring", "majestic", "fierce", "shy", "hot", "red", "thorny", "sweet"]
    texts = [f"- {traits[int(rng.integers(11))]}\n- {traits[int(rng.integers(11))]}" for _ in range(2 * NUM)]
    return asks, texts[:NUM], [f"A lion is {text.removeprefix('- ').split(chr(10))[0]}." for text in texts[NUM:]]


@pytest.fixture(scope="module")
def judged(pairs):
    """By name: the verdicts on all pairs, and on the pairs swapped."""
    asks, a, b = pairs
    return {
        name: (compare(sandbox.judge(name), asks, a, b), compare(sandbox.judge(name), asks, b, a)) for name in NAMES
    }


def uniform(name="one", **changed):
    """An annotator without tastes that sees gold as it is."""
    settings = {"length": 0.0, "lists": 0.0, "courtesy": 0.0, "position": 0.0, "temperature": 2.0, **changed}
    return Annotator(name, (1.0,) * 6, **settings)


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def close(share, expected, num=NUM):
    """Within four and a half standard deviations of a share of `num`."""
    return abs(share - expected) < 4.5 * math.sqrt(expected * (1 - expected) / num)


def test_features_by_hand():
    rows = features([ASK, ASK, FOREIGN], ["Sure!\n- brave\n- shy", "", GOOD])
    # 1 of 3, one false, none repeated, any form, fluent, no excess; 19 characters; bullets; an opener
    np.testing.assert_allclose(rows[0], [1 / 3, 1, 0, 1, 1, 0, math.log2(19 + 10), 1, 1])
    np.testing.assert_allclose(rows[1], [0, 0, 0, 0, 0, 0, math.log2(10), 0, 0])
    assert np.isnan(rows[2]).all()
    assert features([], []).shape == (0, len(FEATURES))


def test_probability_by_hand():
    """GOOD has gold 7, BAD 2 - .6 = 1.4: a gap of 5.6 at temperature 2, with .5 for the first shown."""
    pool = Annotators("p", [uniform(), uniform("two", position=0.5)])
    assert pool.probabilities([ASK], [BAD], [GOOD], 0) == pytest.approx([sigmoid(5.6 / 2)])
    assert pool.probabilities([ASK], [BAD], [GOOD], 1, a_first=True) == pytest.approx([sigmoid((5.6 - 0.5) / 2)])
    assert pool.probabilities([ASK], [BAD], [GOOD], 1, a_first=False) == pytest.approx([sigmoid((5.6 + 0.5) / 2)])


@pytest.mark.parametrize("name", NAMES)
def test_swapped_responses_swap_the_verdict(name, judged):
    forth, back = judged[name]
    np.testing.assert_array_equal(forth.scores, 1 - back.scores)
    if name in ("sim_eval", "sim_gpt4", "human"):
        assert set(forth.scores.tolist()) == {0.0, 1.0}
        assert forth.details.keys() == sandbox.judge(name).blank.keys() == {"annotator", "shown_first", "cost_usd"}
        assert not forth.details["cost_usd"].any()
        np.testing.assert_array_equal(forth.details["annotator"], back.details["annotator"])
        # The same text is shown first, whichever of the two it is called.
        assert (forth.details["shown_first"] != back.details["shown_first"]).all()
        assert close(np.mean(forth.details["shown_first"] == "a"), 0.5)
        drawn = Counter(forth.details["annotator"].tolist())
        assert drawn.keys() == {annotator.name for annotator in sandbox.judge(name).annotators}
        assert len(drawn) == 1 or all(close(count / NUM, 1 / len(drawn)) for count in drawn.values())


@pytest.mark.parametrize("name", NAMES)
def test_a_verdict_does_not_depend_on_its_batch(name, pairs, judged):
    asks, a, b = (column[:200] for column in pairs)
    whole = judged[name][0].scores[:200]
    order = np.random.default_rng(1).permutation(200).tolist()
    shuffled = sandbox.judge(name).compare(*([column[k] for k in order] for column in (asks, a, b)))
    np.testing.assert_array_equal(shuffled, whole[order])
    single = [sandbox.judge(name).compare([x], [y], [z])[0] for x, y, z in zip(asks, a, b, strict=True)]
    np.testing.assert_array_equal(single, whole)


GOLDEN = {
    "sim_eval": "2d0326a95ae81ce4",
    "sim_ann": "b2da0cd8c34f66ad",
    "sim_gpt4": "8f1abc57d2634321",
    "human": "939f10a11de3e336",
}
"""Studies, and the shipped models, rest on labels of these judges: not one may change unnoticed."""


@pytest.mark.parametrize("name", GOLDEN)
def test_labels_are_those_of_the_shipped_models(name, pairs, judged):
    verdicts = judged[name][0]
    first = verdicts.details["shown_first"] == "a"
    content = [*(2 * verdicts.scores).astype(int).tolist(), *first.tolist(), *verdicts.details["annotator"].tolist()]
    assert sha256(repr(content).encode()).hexdigest()[:16] == GOLDEN[name]
    assert 0.01 < np.mean(verdicts.scores != sandbox.judge(name, 1).compare(*pairs)) < 0.6


def test_foreign_instructions_are_refused_by_number():
    asked = [ASK, *[FOREIGN + "?" * number for number in range(10)]]
    for name in NAMES:
        told = "of" if name == "sim_ann" else "10 of 11"  # noise is decided first, without asking
        with pytest.raises(DataError, match=f"{told}.*{re.escape(FOREIGN)}"):
            sandbox.judge(name).compare(asked, [GOOD] * 11, [BAD] * 11)
    for oracle in (sandbox.gold_oracle(), sandbox.utility_oracle("human")):
        with pytest.raises(DataError, match="1 of 2"):
            oracle.score([ASK, FOREIGN], [GOOD, GOOD])


@pytest.mark.parametrize("name", NAMES)
def test_odd_texts_lose_to_good_answers(name):
    """Warnings are errors here: a megabyte must not overflow. Noise and careless raters may differ; P says it all."""
    for text in ("", " \n", "!?…", "日本🦁", ASK, "brave " * 20_000, "a" * 2**20):
        good, same = sandbox.judge(name).compare([ASK, ASK], [text, text], [GOOD, text])
        assert good == 1 if name in ("sim_gpt4", "gold") else good in (0, 1)
        assert same == 0.5


def test_utilities_are_what_the_annotators_want(pairs):
    """Without draw: P(b) of an annotator that is indifferent to the order is the logistic of their utilities' gap."""
    instructions, a, b = pairs
    utility, greedy = sandbox.utility_oracle("sim_gpt4"), sandbox.judge("sim_gpt4")
    odds = (utility.score(instructions, b) - utility.score(instructions, a)) / GREEDY[0].temperature
    assert GREEDY[0].position == 0
    np.testing.assert_allclose(greedy.probabilities(instructions, a, b, 0), 1 / (1 + np.exp(-odds)), atol=1e-9)
    expected = features(instructions, a) @ np.mean([annotator.weights() for annotator in POOL], axis=0)
    np.testing.assert_allclose(sandbox.utility_oracle("sim_eval").score(instructions, a), expected)
    for make, name in ((sandbox.utility_oracle, "sim_ann"), (sandbox.judge, "sim_evl")):
        with pytest.raises(UnknownNameError, match=f"'{name}'.*eval"):
            make(name)


RATED = "List three traits of a lion. Answer in a sentence."
FAULTY = "- brave\n- brave\n- floppy\nshe go no where at all" + " far" * 30


@pytest.fixture(scope="module")
def responses():
    pairs = sandbox.SANDBOX.pairs()[1000:2000]  # none of those that set the scale
    asked = [ask for ask in sandbox.SANDBOX.instructions("preference")[1000:2000] for _ in range(2)]
    return asked, [response for pair in pairs for response in pair]


@pytest.mark.parametrize("name", ["human", "sim_eval", "sim_gpt4"])
def test_ratings_use_the_whole_scale(responses, name):
    found = sandbox.raters(name).judge(*responses)
    assert set(found.scores) == set(range(1, 8))
    assert abs(found.scores.mean() - 4) < 0.15
    assert abs(found.scores.std() - 1.5) < 0.15
    gold = sandbox.gold_oracle().score(*responses)
    assert np.corrcoef(found.scores, gold)[0, 1] > 0.5


def test_likings_differ_as_pair_choices_do():
    blind = Annotator("blind", (0.0,) * 6, 0.0, 0.0, 0.0, 0.0, 2.0)
    rows = [(RATED, f"A lion is brave {number}.") for number in range(4000)]
    raters = Raters("blind", [blind])
    uniforms = raters._uniforms("liking", rows)
    likings = -2.0 * np.log(-np.log(uniforms))
    assert kstest(likings[::2] - likings[1::2], logistic(scale=2.0).cdf).pvalue > 0.01
    points = 4 + 1.5 * (likings - np.euler_gamma * 2) / (np.pi / np.sqrt(6) * 2)
    np.testing.assert_array_equal(raters.score(*zip(*rows, strict=True)), np.clip(np.rint(points), 1, 7))


def test_ratings_are_the_same_again(responses):
    asked, texts = (column[:200] for column in responses)
    raters = sandbox.raters("human", 3)
    found = raters.judge(asked, texts)
    backwards = sandbox.raters("human", 3).judge(asked[::-1], texts[::-1])
    np.testing.assert_array_equal(backwards.scores[::-1], found.scores)
    for detail in ("annotator", "critique"):
        np.testing.assert_array_equal(backwards.details[detail][::-1], found.details[detail])
    assert len(set(found.details["annotator"])) == 16
    assert (sandbox.raters("human", 4).score(asked, texts) != found.scores).mean() > 0.5


def test_a_critique_names_what_its_annotator_sees():
    blind = Annotator("blind", (0.0,) * 6, 0.0, 0.0, 0.0, 0.0, 0.3)
    whole, faulty = ((ask, text) for ask, text in ((RATED, "A lion is brave, golden and proud."), (RATED, FAULTY)))
    words = ["33%", "not true", "repeats", "form", "sentences", "longer"]
    assert all(word in Raters("all", [uniform()]).critiques([faulty], np.array([0]))[0] for word in words)
    nothing = Raters("blind", [blind]).critiques([faulty, whole], np.array([0, 0]))
    assert nothing[0] == nothing[1] == Raters("all", [uniform()]).critiques([whole], np.array([0]))[0]


def test_ratings_are_rewards_with_critiques():
    env = gym.make("AlpacaFarm-PPO-v0", oracle={"rating": "human", "seed": 1})
    asked, _ = env.reset(seed=0)
    _, reward, *_, info = env.step("A lion is brave.")
    assert reward == sandbox.raters("human", 1).score([asked], ["A lion is brave."])[0]
    assert info["annotator"].startswith("human_")
    assert info["critique"].endswith(".")
    assert info["reward_components"] == {"human_rating": reward}


def test_what_is_no_rating_is_refused(tiny_dataset):
    with pytest.raises(UnknownNameError, match="'human'"):
        gym.make("AlpacaFarm-PPO-v0", oracle={"rating": "humans"})
    with pytest.raises(UnknownNameError, match="'sead'"):
        gym.make("AlpacaFarm-PPO-v0", oracle={"rating": "human", "sead": 1})
    with pytest.raises(DataError, match="sandbox"):
        alpacafarm_env.make_oracle({"rating": "human"}, dataset=tiny_dataset)
    with pytest.raises(DataError, match="sandbox"):
        sandbox.raters("human").score(["What is the capital of France?"], ["Paris."])
    for rating in (0, 8, 4.5, True):
        with pytest.raises(ValueError, match="1 .*7"):
            Rating(Instruction("Why?"), "Because.", rating)
    assert Critique(Instruction("Why?"), "Because.", "No reason is given.").critique


def test_ratings_and_critiques_are_data(responses, tmp_path):
    asked, texts = (column[:12:2] for column in responses)
    ratings, critiques = rated(sandbox.raters("human"), asked, texts)
    rows = [
        {"instruction": str(one.instruction), "output": one.response, "rating": one.rating, "critique": other.critique}
        for one, other in zip(ratings, critiques, strict=True)
    ]
    first = rows[0] | {"critique": None}
    (tmp_path / "ratings.json").write_text(json.dumps([first, *rows[1:], {**first, "rating": None}]))
    assert read_ratings(tmp_path / "ratings.json") == ratings
    assert read_critiques(tmp_path / "ratings.json") == critiques[1:]
    for rating in (0, 8, 2.5, True, "7"):
        (tmp_path / "faulty.json").write_text(json.dumps([{**first, "rating": rating}]))
        with pytest.raises(DataError, match="record 1 field 'rating'"):
            read_ratings(tmp_path / "faulty.json")


def test_what_an_oracle_cannot_rate_is_told():
    asked = [Instruction("Why?")] * 3
    with pytest.raises(OracleError, match=r"2\.5"):
        rated(Constant(2.5), asked, ["a", "b", "c"])
    with pytest.warns(UserWarning, match="3 of 3"):
        assert rated(Constant(math.nan), asked, ["a", "b", "c"]) == ([], [])
