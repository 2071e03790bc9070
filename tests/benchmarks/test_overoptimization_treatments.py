"""Treatments of the over-optimization study: data, names, rewards, and wrappers of one's own."""

import numpy as np
import pytest
from gymnasium.vector import VectorWrapper

from alpacafarm_env import sandbox
from alpacafarm_env.benchmarks.experiment import treatments as overoptimization_treatments
from alpacafarm_env.benchmarks.experiment.treatments import (
    EnvOracle,
    Labels,
    Treatment,
    find_treatment,
    sft_answers,
)
from alpacafarm_env.errors import UnknownNameError
from alpacafarm_env.oracles import Constant, make_oracle
from alpacafarm_env.oracles.base import Verdicts, judge

EVAL = sandbox.SANDBOX.instructions("eval")[:7]
TEXTS = ["Yes.", "A long answer. " * 9, "No.", "- a\n- b", "Blue.", "", "It is 4."]
SHIPPED, NO_MODELS = (sandbox.REWARD_MODEL,), ()
OWN = """from gymnasium.vector import VectorWrapper
from alpacafarm_env.benchmarks.experiment.treatments import Treatment
class Halved(VectorWrapper):
    def step(self, actions):
        observations, rewards, *rest = self.env.step(actions)
        return observations, rewards / 2, *rest
TREATMENT = Treatment("mine", "Mine", flip=0.25, wrap=Halved)
NUMBER = 4
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """The name of a module with a treatment of one's own."""
    name = f"own_treatments_{abs(hash(str(tmp_path)))}"
    (tmp_path / f"{name}.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    return name


class TwoMinds:
    """An oracle that tells a disagreement, as an ensemble does."""

    name = "two_minds"

    def judge(self, instructions, responses):
        lengths = np.array([float(len(text)) for text in responses])
        return Verdicts(lengths, {"disagreement": lengths / 10})

    def score(self, instructions, responses):
        return self.judge(instructions, responses).scores


def test_25_percent_flips_are_the_paper_s_annotators():
    pairs = sandbox.SANDBOX.pairs("preference")[:400]
    inputs = (sandbox.SANDBOX.instructions("preference")[:400], [a for a, _ in pairs], [b for _, b in pairs])
    plain = Labels("sim_eval", 0.0, 10).annotator(3).compare(*inputs)
    noisy = {flip: Labels("sim_eval", flip, 10).annotator(3).judge(*inputs) for flip in (0.175, 0.25, 0.35)}
    np.testing.assert_array_equal(noisy[0.25].scores, sandbox.judge("sim_ann", 3).compare(*inputs))
    # One noise at three strengths: a pair that gets a coin under the weaker one gets it under the stronger one too.
    coins = {flip: verdicts.details["noised"] for flip, verdicts in noisy.items()}
    assert (coins[0.175] <= coins[0.25]).all()
    assert (coins[0.25] <= coins[0.35]).all()
    for flip, verdicts in noisy.items():
        assert abs((verdicts.scores != plain).mean() - flip) < 0.06  # 2.5 standard errors of 400 pairs


def test_an_ensemble_s_reward_is_made_of_its_members():
    cell = (sandbox.REWARD_MODEL, sandbox.REWARD_MODEL_CLEAN, sandbox.REWARD_MODEL)
    models = [make_oracle({"reward_model": str(x)}, dataset=sandbox.SANDBOX) for x in cell]
    raw = np.stack([model.score(EVAL, TEXTS) for model in models])
    inputs, fixed = [each for each in EVAL for _ in range(4)], [text for each in sft_answers(EVAL) for text in each]
    members = raw - [model.score(inputs, fixed).reshape(-1, 4).mean(axis=1) for model in models]
    assert (raw.argmin(axis=0) != members.argmin(axis=0)).any()
    expected = {
        "mean": members.mean(axis=0),
        "min": members.min(axis=0),
        "uwo": members.mean(axis=0) - 0.5 * members.var(axis=0),
    }
    for combine, scores in expected.items():
        treatment = Treatment("x", "X", members=3, combine=combine)
        verdicts = judge(treatment.reward(cell), EVAL, TEXTS)
        np.testing.assert_allclose(verdicts.scores, scores, atol=1e-5)
        np.testing.assert_allclose(verdicts.details["disagreement"], members.std(axis=0), atol=1e-5)


def test_sft_s_answers_do_not_depend_on_what_else_is_asked(monkeypatch):
    monkeypatch.setattr(overoptimization_treatments, "_ANSWERS", {})  # nothing is known
    third = sft_answers([EVAL[3], EVAL[3]])
    assert third[0] == third[1]
    monkeypatch.setattr(overoptimization_treatments, "_ANSWERS", {})
    together = sft_answers(EVAL)
    assert together[3] == third[0]
    assert {len(each) for each in together} == {4}
    assert len({text for each in together for text in each}) > 4 * len(EVAL) / 2  # samples, not one answer four times


def test_a_wrapper_decides_in_training_and_in_scoring(own):
    wrapped, plain = find_treatment(f"{own}:TREATMENT"), Treatment("x", "X")
    env, bare = (treatment.env(SHIPPED, 4) for treatment in (wrapped, plain))
    inputs = [each.reset(seed=0)[0] for each in (env, bare)]
    assert inputs[0] == inputs[1]
    np.testing.assert_array_equal(env.step(TEXTS[:4])[1], bare.step(TEXTS[:4])[1] / 2)
    bare_scores = plain.proxy(SHIPPED).score(EVAL, TEXTS)
    np.testing.assert_allclose(wrapped.proxy(SHIPPED).score(EVAL, TEXTS), bare_scores / 2, atol=1e-5)
    # A single model's scores are as they come, less nothing.
    model = make_oracle({"reward_model": str(sandbox.REWARD_MODEL)}, dataset=sandbox.SANDBOX)
    np.testing.assert_array_equal(bare_scores, model.score(EVAL, TEXTS))


@pytest.mark.parametrize("slots", [3, 100])
def test_stepping_scores_each_response_to_its_own_instruction(slots, monkeypatch):
    monkeypatch.setattr(overoptimization_treatments, "SLOTS", slots)
    treatment, sizes = Treatment("x", "X", members=0, oracle=TwoMinds(), wrap=VectorWrapper), []

    def make(num_envs):
        sizes.append(num_envs)
        return treatment.env(NO_MODELS, num_envs, "eval")

    verdicts = judge(EnvOracle("x", make), EVAL * 2, TEXTS * 2)
    np.testing.assert_array_equal(verdicts.scores, [len(text) for text in TEXTS * 2])
    np.testing.assert_array_equal(verdicts.details["disagreement"], verdicts.scores / 10)
    assert len(sizes) == len(set(sizes)) <= 2  # an environment a size, not a step
    gold = Treatment("x", "X", members=0, oracle=sandbox.gold_oracle(), wrap=VectorWrapper)
    # Sums over a batch of one and of several may differ in the last bit, by processor.
    np.testing.assert_allclose(
        gold.proxy(NO_MODELS).score(EVAL, TEXTS), sandbox.gold_oracle().score(EVAL, TEXTS), rtol=1e-12
    )


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("an", "'ann'"),
        ("no_such_module:X", "expected module:attribute that can be imported"),
        ("{own}:nothing", "AttributeError"),
        ("{own}:NUMBER", "expected a Treatment, got int"),
    ],
)
def test_what_is_no_treatment_is_told(own, name, expected):
    with pytest.raises(UnknownNameError, match=expected):
        find_treatment(name.format(own=own))


@pytest.mark.parametrize(
    "changes", [{"name": "a/b"}, {"flip": 0.6}, {"num_labels": 0}, {"layers": 0}, {"combine": "max"}, {"members": 0}]
)
def test_a_wrong_field_is_named(changes):
    (name,) = changes
    with pytest.raises(ValueError, match=name):
        Treatment(**{"name": "x", "title": "X", **changes})


def test_settings_are_what_decides_a_reward():
    assert Treatment("x", "X", members=0, oracle=Constant()).settings()["oracle"] is True
    # How members are combined decides nothing where there is one.
    assert Treatment("x", "X", combine="min").settings() == Treatment("x", "X").settings()
    one, other = (Treatment("x", "X", members=3, combine=combine).settings() for combine in ("min", "mean"))
    assert one != other
