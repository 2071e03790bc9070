"""Simulated annotators: their formula by hand, their symmetry, what their draws are keyed on, and the noise."""

import math
import re
from collections import Counter
from hashlib import sha256

import numpy as np
import pytest

from alpacafarm_env import sandbox
from alpacafarm_env.errors import DataError, UnknownNameError
from alpacafarm_env.oracles import compare
from alpacafarm_env.sandbox import gold
from alpacafarm_env.sandbox.judges import FEATURES, GREEDY, POOL, Annotator, Annotators, features

ASK = "List three traits of a lion."
FOREIGN = "What is the capital of France?"
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


@pytest.mark.parametrize(
    ("taste", "b", "gap"),
    [
        ("length", "Sure! A lion is brave.", math.log2(32 / 26)),
        ("lists", "- brave", 1.0),
        ("courtesy", "Sure! A lion is brave.", 1.0),
    ],
)
def test_tastes_by_hand(taste, b, gap):
    """Each pair has equal gold, so that only the taste is left."""
    a = "A lion is brave."
    assert gold.gold(ASK, a) == gold.gold(ASK, b)
    pool = Annotators("p", [uniform(**{taste: 3.0})])
    assert pool.probabilities([ASK], [a], [b], 0) == pytest.approx([sigmoid(3 * gap / 2)])


@pytest.mark.parametrize("name", NAMES)
def test_swapping_the_responses_swaps_the_verdict_and_each_annotator_is_drawn_equally_often(name, judged):
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
    "sim_gpt4": "eaff8bdd8ff8a175",
    "human": "939f10a11de3e336",
}
"""Shipped models were trained on labels of these judges: not one may change."""


@pytest.mark.parametrize("name", GOLDEN)
def test_labels_are_those_of_the_shipped_models_and_another_seed_is_another_opinion(name, pairs, judged):
    verdicts = judged[name][0]
    first = verdicts.details["shown_first"] == "a"
    content = [*(2 * verdicts.scores).astype(int).tolist(), *first.tolist(), *verdicts.details["annotator"].tolist()]
    assert sha256(repr(content).encode()).hexdigest()[:16] == GOLDEN[name]
    assert 0.01 < np.mean(verdicts.scores != sandbox.judge(name, 1).compare(*pairs)) < 0.6


def test_instructions_of_another_world_are_refused_with_their_number():
    asked = [ASK, *[FOREIGN + "?" * number for number in range(10)]]
    for name in NAMES:
        told = "of" if name == "sim_ann" else "10 of 11"  # noise is decided first, without asking
        with pytest.raises(DataError, match=f"{told}.*{re.escape(FOREIGN)}"):
            sandbox.judge(name).compare(asked, [GOOD] * 11, [BAD] * 11)
    for oracle in (sandbox.gold_oracle(), sandbox.utility_oracle("human")):
        with pytest.raises(DataError, match="1 of 2"):
            oracle.score([ASK, FOREIGN], [GOOD, GOOD])


@pytest.mark.parametrize("name", NAMES)
def test_odd_texts_get_a_verdict_lose_to_a_good_answer_and_tie_with_themselves(name):
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
        with pytest.raises(UnknownNameError, match=f"'{name}'.*sim_eval"):
            make(name)
