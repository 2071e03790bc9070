"""Simulated annotators: their formula by hand, their symmetry, what their draws are keyed on, and the noise."""

import json
import math
import re
from collections import Counter
from hashlib import sha256

import gymnasium as gym
import numpy as np
import pytest

from alpacafarm_env import sandbox
from alpacafarm_env.errors import DataError, UnknownNameError
from alpacafarm_env.oracles import compare
from alpacafarm_env.sandbox import gold
from alpacafarm_env.sandbox.judges import FEATURES, GREEDY, HUMANS, POOL, Annotator, Annotators, features
from alpacafarm_env.wrappers import AddScore

ASK = "List three traits of a lion."
FOREIGN = "What is the capital of France?"
GOOD, BAD = "A lion is brave, golden and proud.", "A lion is shy."
NUM = 4000
NAMES = ("sim_eval", "sim_ann", "sim_gpt4", "human", "gold")
ALL = (*POOL, *GREEDY, *HUMANS)


@pytest.fixture(scope="module")
def pairs():
    """Unequal pairs for real instructions: the instruction's answers by two writers."""
    rng = np.random.default_rng(0)
    asks = list(sandbox.SANDBOX.instructions("unlabeled")[:NUM])
    traits = ["brave", "golden", "proud", "roaring", "majestic", "fierce", "shy", "hot", "red", "thorny", "sweet"]
    texts = [f"- {traits[int(rng.integers(11))]}\n- {traits[int(rng.integers(11))]}" for _ in range(2 * NUM)]
    return asks, texts[:NUM], [f"A lion is {text.removeprefix('- ').split(chr(10))[0]}." for text in texts[NUM:]]


def uniform(name="one", **changed):
    """An annotator without tastes that sees gold as it is."""
    settings = {"length": 0.0, "lists": 0.0, "courtesy": 0.0, "position": 0.0, "temperature": 2.0, **changed}
    return Annotator(name, (1.0,) * 6, **settings)


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


# ----------------------------------------------------------------------------------------------------------- who is who


def test_thirteen_annotators_in_families_of_five_four_and_four():
    families = Counter(annotator.name.rsplit("_", 1)[0] for annotator in POOL)
    assert families == {"gpt4": 5, "chatgpt": 4, "davinci003": 4}
    assert len(GREEDY) == 1
    assert len(HUMANS) == 16
    assert len({annotator.name for annotator in ALL}) == 30
    assert len(set(HUMANS)) == 16
    assert all(annotator.temperature > 0 for annotator in ALL)


def test_families_differ_in_attention():
    """The stronger model's annotators see more of what is true than the weaker ones'."""
    seen = {
        family: np.mean([a.attention[1] for a in POOL if a.name.startswith(family)])
        for family in ("gpt4", "chatgpt", "davinci003")
    }
    assert seen["gpt4"] > seen["chatgpt"] > seen["davinci003"]


def test_unknown_judge():
    with pytest.raises(UnknownNameError, match="Unknown judge 'sim_evl'. Did you mean 'sim_eval'"):
        sandbox.judge("sim_evl")


# ---------------------------------------------------------------------------------------------------------- the formula


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
    ("taste", "a", "b", "gap"),
    [
        ("length", "A lion is brave.", "Sure! A lion is brave.", math.log2(32 / 26)),
        ("lists", "A lion is brave.", "- brave", 1.0),
        ("courtesy", "A lion is brave.", "Sure! A lion is brave.", 1.0),
    ],
)
def test_tastes_by_hand(taste, a, b, gap):
    """Each pair has equal gold, so that only the taste is left."""
    assert gold.gold(ASK, a) == gold.gold(ASK, b)
    pool = Annotators("p", [uniform(**{taste: 3.0})])
    assert pool.probabilities([ASK], [a], [b], 0) == pytest.approx([sigmoid(3 * gap / 2)])


def test_verdicts_are_drawn_with_the_probability():
    """Over 3,000 seeds, half of them shown in either order: within four standard errors of the mean over both."""
    annotator, num = uniform(position=1.0, temperature=5.0), 3000
    verdicts = [Annotators("p", [annotator], seed=seed).compare([ASK], [BAD], [GOOD])[0] for seed in range(num)]
    expected = (sigmoid((5.6 - 1) / 5) + sigmoid((5.6 + 1) / 5)) / 2
    assert np.mean(verdicts) == pytest.approx(expected, abs=4 * math.sqrt(expected * (1 - expected) / num))


def test_each_annotator_is_drawn_equally_often(pairs):
    drawn = Counter(compare(sandbox.judge("sim_eval"), *pairs).details["annotator"].tolist())
    share = 1 / len(POOL)
    assert set(drawn) == {annotator.name for annotator in POOL}
    for count in drawn.values():
        assert count / NUM == pytest.approx(share, abs=4.5 * math.sqrt(share * (1 - share) / NUM))


# --------------------------------------------------------------------------------------------- symmetry and determinism


@pytest.mark.parametrize("name", NAMES)
def test_swapping_the_responses_swaps_the_verdict(name, pairs):
    asks, a, b = pairs
    judge = sandbox.judge(name)
    np.testing.assert_array_equal(judge.compare(asks, a, b), 1 - judge.compare(asks, b, a))


def test_annotator_and_position_belong_to_the_unordered_pair(pairs):
    asks, a, b = pairs
    forth, back = (compare(sandbox.judge("sim_eval"), asks, *order).details for order in ((a, b), (b, a)))
    np.testing.assert_array_equal(forth["annotator"], back["annotator"])
    # The same text is shown first, whichever of the two it is called.
    assert (forth["shown_first"] != back["shown_first"]).all()
    assert np.mean(forth["shown_first"] == "a") == pytest.approx(0.5, abs=4 * 0.5 / math.sqrt(NUM))


@pytest.mark.parametrize("name", NAMES)
def test_a_verdict_does_not_depend_on_its_batch(name, pairs):
    asks, a, b = (column[:200] for column in pairs)
    judge = sandbox.judge(name)
    whole = judge.compare(asks, a, b)
    np.testing.assert_array_equal(whole, judge.compare(asks, a, b))
    order = np.random.default_rng(1).permutation(200).tolist()
    shuffled = judge.compare(*([column[k] for k in order] for column in (asks, a, b)))
    np.testing.assert_array_equal(shuffled, whole[order])
    single = [sandbox.judge(name).compare([x], [y], [z])[0] for x, y, z in zip(asks, a, b, strict=True)]
    np.testing.assert_array_equal(single, whole)


GOLDEN = {
    "sim_eval": "c1fd8d7fea1a0d48",
    "sim_ann": "2e27babb0a5f6fec",
    "sim_gpt4": "a9f9ca37db871b8b",
    "human": "86f5f0aad8d61fc9",
}
"""Shipped models were trained on labels of these judges: not one may change."""


def digest(verdicts):
    labels, first = verdicts.scores, verdicts.details["shown_first"] == "a"
    content = [*(2 * labels).astype(int).tolist(), *first.tolist(), *verdicts.details["annotator"].tolist()]
    return sha256(repr(content).encode()).hexdigest()[:16]


@pytest.mark.parametrize("name", GOLDEN)
def test_labels_are_those_that_the_shipped_models_were_trained_on(name, pairs):
    assert digest(compare(sandbox.judge(name), *pairs)) == GOLDEN[name]
    assert digest(compare(sandbox.judge(name, 1), *pairs)) != GOLDEN[name]


@pytest.mark.parametrize("name", ["sim_eval", "sim_ann", "sim_gpt4", "human"])
def test_another_seed_is_another_opinion(name, pairs):
    first, second = (sandbox.judge(name, seed).compare(*pairs) for seed in (0, 1))
    assert 0.01 < np.mean(first != second) < 0.6


def test_pools_of_other_names_draw_on_their_own(pairs):
    one, other = (Annotators(name, POOL).judge(*pairs).details["annotator"] for name in ("p", "q"))
    assert np.mean(one == other) < 0.2


@pytest.mark.parametrize("name", NAMES)
def test_identical_responses_tie(name):
    np.testing.assert_array_equal(sandbox.judge(name).compare([ASK, ASK], [GOOD, ""], [GOOD, ""]), [0.5, 0.5])


def test_instructions_of_another_world_are_refused_with_their_number():
    asked = [ASK, *[FOREIGN + "?" * number for number in range(10)]]
    for name in NAMES:
        told = "of" if name == "sim_ann" else "10 of 11"  # noise is decided first, without asking
        with pytest.raises(DataError, match=f"{told}.*{re.escape(FOREIGN)}"):
            sandbox.judge(name).compare(asked, [GOOD] * 11, [BAD] * 11)
    with pytest.raises(DataError, match="1 of 2"):
        sandbox.gold_oracle().score([ASK, FOREIGN], [GOOD, GOOD])


@pytest.mark.parametrize("oracle", [sandbox.gold_oracle(), {"judge": sandbox.judge("sim_eval")}])
def test_no_response_to_ones_own_instructions_goes_unscored_silently(oracle, tmp_path):
    (tmp_path / "eval.json").write_text(json.dumps([{"instruction": FOREIGN, "output": BAD}]))
    own = {"id": "AlpacaFarm-WinRate-v0", "dataset": str(tmp_path), "on_unscored": "truncate"}
    for env in (gym.make(**own, oracle=oracle), AddScore(gym.make(**own, oracle="constant"), oracle=oracle)):
        env.reset(seed=0)
        with pytest.raises(DataError, match=re.escape(FOREIGN)):
            env.step(GOOD)


def test_verdicts_are_zero_or_one_with_details(pairs):
    verdicts = compare(sandbox.judge("human"), *pairs)
    assert set(verdicts.scores.tolist()) == {0.0, 1.0}
    assert set(verdicts.details) == {"annotator", "shown_first", "cost_usd"}
    assert set(verdicts.details) == set(sandbox.judge("human").blank)
    assert not verdicts.details["cost_usd"].any()


def test_noise_flips_a_quarter(pairs):
    clean, noisy = sandbox.judge("sim_eval").compare(*pairs), compare(sandbox.judge("sim_ann"), *pairs)
    flipped, noised = clean != noisy.scores, noisy.details["noised"]
    assert np.mean(flipped) == pytest.approx(0.25, abs=4 * math.sqrt(0.25 * 0.75 / NUM))
    assert np.mean(noised) == pytest.approx(0.5, abs=4 * 0.5 / math.sqrt(NUM))
    assert not flipped[~noised].any()


# --------------------------------------------------------------------------------------------------- odd texts and size


@pytest.mark.parametrize("text", ["", " \n", "!?…", "日本🦁", ASK, "brave " * 175_000, "a" * 2**20])
@pytest.mark.parametrize("name", NAMES)
def test_odd_texts_get_a_verdict_and_lose_to_a_good_answer(name, text):
    """Warnings are errors here: a megabyte must not overflow. Noise and careless raters may differ; P says it all."""
    assert sandbox.judge(name).compare([ASK], [text], [GOOD])[0] in (0.0, 1.0)
    if name in ("sim_gpt4", "gold"):
        assert sandbox.judge(name).compare([ASK], [text], [GOOD])[0] == 1.0


def test_every_annotator_can_be_asked_alone():
    for pool in (POOL, GREEDY, HUMANS):
        for index in range(len(pool)):
            (chance,) = Annotators("p", pool).probabilities([ASK], [BAD], [GOOD], index)
            assert 0 < chance < 1


def test_utilities_are_what_the_annotators_want(pairs):
    """Without draw: P(b) of an annotator that is indifferent to the order is the logistic of their utilities' gap."""
    instructions, a, b = pairs
    utility, greedy = sandbox.utility_oracle("sim_gpt4"), sandbox.judge("sim_gpt4")
    gaps = utility.score(instructions, b) - utility.score(instructions, a)
    odds = gaps / GREEDY[0].temperature
    assert GREEDY[0].position == 0
    np.testing.assert_allclose(greedy.probabilities(instructions, a, b, 0), 1 / (1 + np.exp(-odds)), atol=1e-9)
    alone = [sandbox.judge("sim_eval").annotators[i].weights() for i in range(13)]
    expected = features(instructions, a) @ np.mean(alone, axis=0)
    np.testing.assert_allclose(sandbox.utility_oracle("sim_eval").score(instructions, a), expected)
    with pytest.raises(DataError, match="another"):
        utility.score(["Of another world?"], ["Yes."])
    with pytest.raises(UnknownNameError, match="judge with utilities 'sim_ann'"):
        sandbox.utility_oracle("sim_ann")
