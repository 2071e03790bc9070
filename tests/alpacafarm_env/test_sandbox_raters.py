"""The sandbox's raters: their scale, what their draws are keyed on, what critiques name; ratings as rewards."""

import json
import math

import gymnasium as gym
import numpy as np
import pytest
from scipy.stats import kstest, logistic

import alpacafarm_env
from alpacafarm_env import Critique, Instruction, Rating, sandbox
from alpacafarm_env.data import read_critiques, read_ratings
from alpacafarm_env.errors import DataError, UnknownNameError
from alpacafarm_env.oracles import Constant, OracleError, rated
from alpacafarm_env.sandbox.judges import GREEDY, Annotator
from alpacafarm_env.sandbox.raters import Raters

ASK = "List three traits of a lion. Answer in a sentence."
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
    assert np.corrcoef(found.scores, gold)[0, 1] > (0.9 if name == "sim_gpt4" else 0.5)


def test_likings_differ_as_pair_choices_do():
    blind = Annotator("blind", (0.0,) * 6, 0.0, 0.0, 0.0, 0.0, 2.0)
    rows = [(ASK, f"A lion is brave {number}.") for number in range(4000)]
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
    whole, faulty = ((ask, text) for ask, text in ((ASK, "A lion is brave, golden and proud."), (ASK, FAULTY)))
    words = ["33%", "not true", "repeats", "form", "sentences", "longer"]
    assert all(word in Raters("all", GREEDY).critiques([faulty], np.array([0]))[0] for word in words)
    nothing = Raters("blind", [blind]).critiques([faulty, whole], np.array([0, 0]))
    assert nothing[0] == nothing[1] == Raters("all", GREEDY).critiques([whole], np.array([0]))[0]


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
