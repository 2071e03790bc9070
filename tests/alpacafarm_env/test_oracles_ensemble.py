"""Ensembles: the formulas on numbers by hand, who is asked, what is told, and what is refused."""

import json
import math
import shutil

import numpy as np
import pytest
from tiny_reward_model import make_tiny_reward_model

from alpacafarm_env import sandbox
from alpacafarm_env.envs.instruction import InstructionEnv
from alpacafarm_env.errors import CheckpointError, DataError, UnknownNameError
from alpacafarm_env.oracles import Constant, Ensemble, OracleError, Verdicts, judge, make_oracle

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
    ("combine", "weight", "expected"),
    [
        ("mean", None, MEANS),
        ("min", None, LOWEST),
        ("uwo", None, [3 - 7 / 3, 2.0, -2.0, -0.25]),
        ("uwo", 0.1, [3 - 1.4 / 3, 2.0, -1.2, -0.05]),
        ("uwo", 0, MEANS),
        ("uwo", 3, [3 - 14, 2.0, -7.0, -1.5]),
    ],
)
def test_the_three_ways_to_combine(combine, weight, expected):
    ensemble = Ensemble(members(), combine, weight)
    verdicts = judge(ensemble, ASKED, ANSWERED)
    np.testing.assert_allclose(verdicts.scores, expected, rtol=1e-14, atol=1e-15)
    np.testing.assert_allclose(verdicts.details["disagreement"], np.sqrt(VARIANCES), rtol=1e-14)
    for name, scores in zip("abc", SCORES, strict=True):
        assert verdicts.details[f"score:{name}"].tolist() == scores
    assert verdicts.details["unscored_reason"].tolist() == [""] * 4
    assert verdicts.details.keys() == {"disagreement", "unscored_reason", "score:a", "score:b", "score:c"}
    np.testing.assert_array_equal(ensemble.score(ASKED, ANSWERED), verdicts.scores)


def test_each_member_is_asked_once_about_the_whole_batch():
    three = members()
    judge(Ensemble(three, "min"), ASKED, ANSWERED)
    assert [member.calls for member in three] == [[(ASKED, ANSWERED)]] * 3


def test_one_member_is_its_own_score_and_never_disagrees():
    for combine in ("mean", "min", "uwo"):
        verdicts = judge(Ensemble([Given(SCORES[2])], combine), ASKED, ANSWERED)
        assert verdicts.scores.tolist() == SCORES[2]
        assert verdicts.details["disagreement"].tolist() == [0.0] * 4


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


def test_what_the_members_tell():
    one = Given([0.0, 0.0], "one", cost_usd=[0.25, 0.0], noised=[True, False], annotator=["gpt4", "lazy"])
    two = Given([1.0, 1.0], "two", cost_usd=[0.5, 1.0], noised=[False, False], annotator=["gpt4", "keen"])
    details = judge(Ensemble([one, two, Constant(0.5)]), ["i", "j"], ["x", "y"]).details
    assert details["cost_usd"].tolist() == [0.75, 1.0]
    assert details["noised"].tolist() == [True, False]
    assert details["annotator:one"].tolist() == ["gpt4", "lazy"]
    assert details["annotator:two"].tolist() == ["gpt4", "keen"]
    assert "annotator" not in details


def test_what_a_member_tells_does_not_replace_the_ensembles_own_details():
    taken = Given([1.0, 2.0], "m", score=[99.0, 99.0], disagreement=[True, True], listed=[3, 4])
    details = judge(
        Ensemble([taken, Given([3.0, 2.0], "n", disagreement=[False, True])]), ["i", "j"], ["x", "y"]
    ).details
    assert details["score:m"].tolist() == [1.0, 2.0]
    assert details["disagreement"].tolist() == [1.0, 0.0]
    assert details["listed:m"].tolist() == [3, 4]
    assert next(iter(details)) == "disagreement"


def test_members_may_come_from_a_generator():
    assert Ensemble(each for each in members()).score(ASKED, ANSWERED).tolist() == MEANS
    with pytest.raises(ValueError, match="one or more members, got none"):
        Ensemble(each for each in ())


def test_ensembles_nest():
    inner = Ensemble(members()[:2], "min", name="inner")
    verdicts = judge(Ensemble([inner, members()[2]]), ASKED, ANSWERED)
    assert verdicts.scores.tolist() == [(1 + 6) / 2, 2.0, -1.5, -0.25]
    assert verdicts.details["score:inner"].tolist() == [1.0, 2.0, -3.0, 0.5]
    assert verdicts.details["score:a:inner"].tolist() == SCORES[0]
    assert verdicts.details["disagreement:inner"].tolist() == [0.5, 0.0, 1.5, 0.0]


@pytest.mark.parametrize("size", [1, 2, 7, 300])
def test_a_rows_score_does_not_round_with_its_batch(size):
    """Bit-equal, for numpy adds up an array's rows in another order than a single one."""
    scores = np.random.default_rng(0).normal(size=(37, 300))

    def combined(rows, combine):
        ensemble = Ensemble([Given(member[rows]) for member in scores], combine)
        return ensemble.score([""] * len(scores[0, rows]), [""] * len(scores[0, rows]))

    for combine in ("mean", "min", "uwo"):
        np.testing.assert_array_equal(
            combined(slice(size), combine), combined(slice(300), combine)[:size], strict=True, err_msg=combine
        )


def test_a_wrong_answer_names_the_member():
    with pytest.raises(OracleError, match="'broken' must answer finite scores"):
        judge(Ensemble([Constant(), Given([0.0, math.inf], "broken")]), ["i", "j"], ["x", "y"])
    with pytest.raises(OracleError, match=r"'short' must answer 2 rows"):
        judge(Ensemble([Constant(), Given([0.0], "short")]), ["i", "j"], ["x", "y"])


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ("ab", ("a", "b")),
        ("aba", ("a#1", "b", "a#2")),
        (["a", "a#1", "a"], ("a#2", "a#1", "a#3")),
        (["a#1", "a", "a", "a#1"], ("a#1#1", "a#2", "a#3", "a#1#2")),
    ],
)
def test_members_that_share_a_name_are_numbered(names, expected):
    ensemble = Ensemble([Given([float(i)], name) for i, name in enumerate(names)])
    assert ensemble.member_names == expected
    details = judge(ensemble, ["i"], ["x"]).details
    assert [details[f"score:{name}"].tolist() for name in expected] == [[float(i)] for i in range(len(names))]


@pytest.mark.parametrize(
    ("keywords", "name"),
    [
        ({}, "ensemble:mean"),
        ({"combine": "min"}, "ensemble:min"),
        ({"combine": "uwo"}, "ensemble:uwo0.5"),
        ({"combine": "uwo", "weight": 0.1}, "ensemble:uwo0.1"),
        ({"combine": "uwo", "name": "mine"}, "mine"),
    ],
)
def test_its_name_says_how(keywords, name):
    assert Ensemble([Constant()], **keywords).name == name


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (([],), ValueError, "one or more members, got none"),
        (([Constant()], "mim"), UnknownNameError, r"Unknown combination 'mim'\. Did you mean 'min'\?.*mean, min, uwo"),
        (([Constant()], "wco"), UnknownNameError, "the worst case is called 'min'"),
        (([Constant()], "uwo", -0.1), ValueError, "0 or a positive number, got -0.1"),
        (([Constant()], "uwo", math.nan), ValueError, "0 or a positive number, got nan"),
        (([Constant()], "uwo", math.inf), ValueError, "0 or a positive number, got inf"),
        (([Constant()], "mean", 0.5), ValueError, "goes with combine='uwo'; got 0.5 with 'mean'"),
        (([Constant()], "min", 0.0), ValueError, "goes with combine='uwo'; got 0.0 with 'min'"),
        ((["constant"],), TypeError, "oracles with name and score, got 'constant'"),
        (([Constant(), sandbox.judge("sim_eval", 0)],), TypeError, "it compares pairs; give the win rate by it"),
    ],
)
def test_what_is_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        Ensemble(*arguments)


def test_by_mapping(tiny_dataset):
    members = [{"name": "constant", "value": 1.0}, "constant", Constant(5.0)]
    ensemble = make_oracle({"ensemble": members, "combine": "uwo", "weight": 0.1}, dataset=tiny_dataset)
    assert isinstance(ensemble, Ensemble)
    assert ensemble.member_names == ("constant#1", "constant#2", "constant#3")
    np.testing.assert_allclose(ensemble.score(["i"], ["x"]), [2 - 0.1 * (1 + 4 + 9) / 3], rtol=1e-14)
    named = make_oracle({"ensemble": ("constant",), "name": "mine"}, dataset=tiny_dataset)
    assert (named.name, named.combine) == ("mine", "mean")


def test_members_draw_by_their_own_seed(tiny_dataset):
    class Even:
        name = "even"

        def compare(self, instructions, a, b):
            return np.full(len(a), 0.5)

    noisy = {"judge": Even(), "flip": 0.5}
    instructions, texts = tiny_dataset.instructions("val") * 4, [f"response {i}" for i in range(48)]

    def disagreement(**seed):
        ensemble = make_oracle({"ensemble": [noisy, {**noisy, **seed}]}, dataset=tiny_dataset)
        return judge(ensemble, instructions, texts).details["disagreement"]

    assert not disagreement().any()
    assert set(disagreement(seed=1).tolist()) == {0.0, 0.5}


def test_a_mapping_is_built_once_and_anew_when_a_members_weights_are(tiny_dataset, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(sandbox.REWARD_MODEL, folder)
    spec = {"ensemble": [{"reward_model": str(folder)}, {"reward_model": str(sandbox.REWARD_MODEL_CLEAN)}]}
    spec = {"ensemble": [spec, "constant"], "combine": "min"}
    first = make_oracle(spec, dataset=tiny_dataset)
    assert make_oracle(json.loads(json.dumps(spec)), dataset=tiny_dataset) is first
    assert make_oracle({**spec, "combine": "mean"}, dataset=tiny_dataset) is not first
    # A model is loaded once, however many ensembles it is a member of.
    alone = make_oracle({"reward_model": str(folder)}, dataset=tiny_dataset)
    assert first.members[0].members[0] is alone
    shutil.copyfile(sandbox.REWARD_MODEL_CLEAN / "model.safetensors", folder / "model.safetensors")
    assert make_oracle(spec, dataset=tiny_dataset) is not first


def test_reward_models_together(tiny_dataset, tmp_path):
    folders = [make_tiny_reward_model(tmp_path / name / "reward_model") for name in ("one", "two")]
    spec = {"ensemble": [{"reward_model": str(folder)} for folder in folders], "combine": "min"}
    details = judge(make_oracle(spec, dataset=tiny_dataset), tiny_dataset.instructions("val"), ["text"] * 12).details
    assert {"score:reward_model:reward_model#1", "score:reward_model:reward_model#2"} < details.keys()
    assert details["reward_input_truncated"].tolist() == [False] * 12


@pytest.mark.parametrize(
    ("spec", "error", "message"),
    [
        ({"ensemble": []}, ValueError, "one or more members"),
        ({"ensemble": "constant"}, TypeError, "members are a list of oracles.* got 'constant'"),
        ({"ensemble": None}, TypeError, "members are a list of oracles.* got None"),
        ({"ensemble": ["constant", 3]}, TypeError, "An oracle is given by a name.* got 3"),
        ({"ensemble": ["constant", "constnat"]}, UnknownNameError, "Did you mean 'constant'"),
        ({"ensemble": [{"judge": "sim_evil"}]}, UnknownNameError, "Did you mean 'sim_eval'"),
        ({"ensemble": ["constant"], "combin": "min"}, UnknownNameError, "Did you mean 'combine'"),
        ({"ensemble": ["constant"], "members": []}, UnknownNameError, "Unknown option 'members'"),
        ({"ensemble": ["constant"], "judge": "human"}, UnknownNameError, "Unknown option 'judge'"),
        ({"ensemble": ["gold"]}, DataError, "Only the sandbox has a true reward"),
        ({"ensemble": [{"reward_model": "/no/such/folder"}]}, CheckpointError, "found none"),
    ],
)
def test_a_wrong_mapping(tiny_dataset, spec, error, message):
    with pytest.raises(error, match=message):
        make_oracle(spec, dataset=tiny_dataset)


@pytest.mark.parametrize("members", [["constnat"], [{"ensemble": ["constant", {"judge": "sim_evil"}]}]])
def test_a_misspelt_member_is_told_when_the_environment_is_made(tiny_dataset, members):
    with pytest.raises(UnknownNameError, match="Did you mean"):
        InstructionEnv(tiny_dataset, oracle={"ensemble": members, "name": "mine"})
