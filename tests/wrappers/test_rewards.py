"""Reward wrappers, single and batched: who decides, who is asked, and that nothing else changes."""

from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
from equality import assert_same
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import SyncVectorEnv

from alpacafarm_env import wrappers
from alpacafarm_env.envs.instruction import InstructionEnv
from alpacafarm_env.envs.vector import InstructionVectorEnv
from alpacafarm_env.errors import DataError, UnknownNameError
from alpacafarm_env.oracles import Constant
from alpacafarm_env.wrappers import vector

NAMES = sorted(set(wrappers.__all__) - {"vector"})
REQUIRED = {"EnsembleReward": {"oracles": ["constant"]}}


class Longer:
    """A judge that prefers the longer text, counting its calls."""

    name = "longer"

    def __init__(self):
        self.calls = []

    def compare(self, instructions, a, b):
        self.calls.append(len(instructions))
        return np.array([(np.sign(len(y) - len(x)) + 1) / 2 for x, y in zip(a, b, strict=True)])

    def __deepcopy__(self, memo):
        return self


class Form:
    """The wrappers and environments of one form: the same tests for both, with arrays of one or of four rows."""

    def __init__(self, name, dataset):
        self.module, self.dataset, self.size = (wrappers, dataset, 1) if name == "single" else (vector, dataset, 4)

    def make(self, oracle="constant", **keywords):
        keywords = {"dataset": self.dataset, "split": "val", "oracle": oracle, **keywords}
        if self.size == 1:
            return InstructionEnv(**keywords)
        return InstructionVectorEnv(self.size, autoreset_mode="Disabled", **keywords)

    def step(self, env, text):
        return env.step(text if self.size == 1 else [text] * self.size)

    def one_step(self, env, text="hello", seed=0):
        """Observations, rewards, terminations, truncations and infos, after a reset."""
        env.reset(seed=seed)
        return self.step(env, text)


@pytest.fixture(params=["single", "batched"])
def form(request, tiny_dataset):
    return Form(request.param, tiny_dataset)


def test_only_the_outermost_wrapper_is_asked(form, make_counting_oracle):
    base, inner, outer = (make_counting_oracle(name) for name in ("base", "inner", "outer"))
    env = form.make(base)
    wrapped = form.module.SurrogateReward(form.module.SurrogateReward(env, oracle=inner), oracle=outer)
    observation, reward, *_, info = form.one_step(wrapped)
    asked = [observation] if form.size == 1 else observation
    np.testing.assert_array_equal(np.atleast_1d(reward), make_counting_oracle().score(asked, ["hello"] * form.size))
    assert set(np.atleast_1d(info["oracle"])) == {"outer"}
    assert (base.calls, inner.calls, outer.calls) == ([], [], [form.size])
    assert set(np.atleast_1d(form.one_step(env)[4]["oracle"])) == {"base"}
    assert (base.calls, inner.calls, outer.calls) == ([form.size], [], [form.size])


@pytest.mark.parametrize("name", ["AnnotatorReward", "WinRateReward"])
def test_judges_become_win_rates(form, name, tmp_path):
    wrapper, referee = getattr(form.module, name), Longer()
    env = wrapper(form.make(), judge=referee)
    for text, expected in (("x" * 99, 1.0), ("", 0.0)):
        _, reward, *_, info = form.one_step(env, text)
        assert (np.asarray(reward) == expected).all()
        assert set(np.atleast_1d(info["oracle"])) == {"win_rate:longer"}
    assert len(referee.calls) == 2
    noisy = wrapper(form.make(), judge={"judge": Longer(), "flip": 0.5})
    assert np.atleast_1d(form.one_step(noisy, "x" * 99)[4]["noised"]).all()
    pool = {"pool": "ann", "models": "sandbox", "base_url": "http://127.0.0.1:9/v1", "ledger": str(tmp_path / "l.db")}
    assert wrapper(form.make(), judge=pool).oracle.name.startswith("win_rate:ann")


def test_add_score_changes_no_bit_of_the_reward(form, make_counting_oracle):
    plain, scored = form.make(make_counting_oracle("base", 1 / 3)), form.make(make_counting_oracle("base", 1 / 3))
    scored = form.module.AddScore(scored, key="second", oracle=make_counting_oracle("second", 7.0))
    for seed in range(30):
        *outcome, info = form.one_step(plain, "a" * seed, seed)
        *outcome2, info2 = form.one_step(scored, "a" * seed, seed)
        assert_same(tuple(outcome), tuple(outcome2))
        np.testing.assert_allclose(info2.pop("second"), 21 * np.asarray(outcome[1]), rtol=1e-12)
        info2.pop("_second", None)
        assert_same(info, info2)


def test_add_score_reports_wherever_it_stands(form, make_counting_oracle):
    inner, outer, deciding = (make_counting_oracle(name) for name in ("inner", "outer", "deciding"))
    env = form.module.AddScore(form.make(), key="inner", oracle=inner)
    env = form.module.AddScore(form.module.SurrogateReward(env, oracle=deciding), key="outer", oracle=outer)
    env = form.module.AddScore(env, key="again", oracle=deciding)  # whose answer is read, not asked a second time
    _, reward, *_, info = form.one_step(env)
    for key in ("inner", "outer", "again"):
        np.testing.assert_array_equal(info[key], reward)
    assert [oracle.calls for oracle in (inner, outer, deciding)] == [[form.size]] * 3


def test_add_score_needs_a_key_of_its_own(form):
    for key in ("", "_score", "oracle", "response_truncated", "episode", "final_info", 3):
        with pytest.raises(ValueError, match=f"{key!r}; taken"):
            form.module.AddScore(form.make(), key=key, oracle=Constant())
    with pytest.raises(ValueError, match="key"):  # it would be called gold
        form.module.AddScore(form.make(), oracle=Constant())
    env = form.module.AddScore(form.make(), key="gold", oracle=Constant())
    with pytest.raises(ValueError, match="'gold'"):
        form.module.AddScore(form.module.SurrogateReward(env, oracle=Constant()), key="gold", oracle=Constant())


@pytest.mark.parametrize("name", NAMES)
def test_both_forms_take_the_same_keywords(name, tiny_dataset):
    ours, batched = getattr(wrappers, name), getattr(vector, name)
    assert ours.__init__.__kwdefaults__ == batched.__init__.__kwdefaults__
    single = InstructionEnv(dataset=tiny_dataset, oracle="constant")
    batch = InstructionVectorEnv(2, dataset=tiny_dataset, oracle="constant")
    for wrapper, env, fact in (
        (ours, gym.make("CartPole-v1"), r"gym\.make\('AlpacaFarm"),
        (batched, gym.make_vec("CartPole-v1", num_envs=2), r"gym\.make_vec"),
        (ours, batch, rf"wrappers\.vector\.{name}"),
        (batched, single, rf"wrappers\.{name}"),
        (batched, SyncVectorEnv([lambda: single]), "no vectorization_mode"),
    ):
        with pytest.raises(TypeError, match=f"{name} .*{fact}"):
            wrapper(env, **REQUIRED.get(name, {}))


@pytest.mark.parametrize(
    ("name", "keywords", "error", "fact"),
    [
        ("SurrogateReward", {"oracle": "surogate"}, UnknownNameError, "'surrogate'"),
        ("WinRateReward", {"judge": "humen"}, UnknownNameError, "'human'"),
        ("GoldReward", {}, DataError, "'tiny'"),
        ("EnsembleReward", {"oracles": ["constant", "constnat"]}, UnknownNameError, "'constant'"),
        ("EnsembleReward", {"oracles": ["constant"], "weight": 0.1}, ValueError, "'uwo'"),
    ],
)
def test_wrappers_refuse_wrong_oracles(form, name, keywords, error, fact):
    with pytest.raises(error, match=fact):
        getattr(form.module, name)(form.make(), **keywords)


def test_the_spec_survives_json(tmp_path):
    """Names and mappings are JSON; the environment made from it stacks the same wrappers with the same rewards."""
    (tmp_path / "val.json").write_text('[{"instruction": "Say one."}, {"instruction": "Say two."}]')
    members = [{"name": "constant", "value": value} for value in (1.0, 4.0)]
    inner = {"ensemble": [*members, "constant"], "combine": "min"}
    plain = gym.make("AlpacaFarm-PPO-v0", dataset=str(tmp_path), split="val", oracle=inner)
    ensemble = wrappers.EnsembleReward(plain, oracles=members, combine="uwo", weight=0.1)
    surrogate = wrappers.SurrogateReward(plain, oracle={"name": "constant", "value": 2.0})
    scored = wrappers.AddScore(surrogate, key="third", oracle="constant")
    audited = wrappers.RewardAudit(scored, seconds={"other": "constant"})
    for made, expected in ((plain, 0.0), (ensemble, 2.5 - 0.1 * 1.5**2), (audited, 2.0)):
        again = gym.make(EnvSpec.from_json(made.spec.to_json()))
        assert type(again) is type(made)
        again.reset(seed=0)
        _, reward, *_, info = again.step("hello")
        assert reward == pytest.approx(expected, rel=1e-12)
    assert info["third"] == info["other_reward"] == 0.0


def test_specs_copy_no_oracle(tiny_dataset):
    env = gym.make("AlpacaFarm-PPO-v0", dataset=tiny_dataset, oracle="constant")
    # It says nothing of how it is to be copied.
    unsure = SimpleNamespace(name="unsure", score=lambda instructions, responses: np.zeros(len(responses)))
    spec = wrappers.SurrogateReward(env, oracle=unsure).spec
    assert spec.additional_wrappers[-1].kwargs["oracle"] is unsure
    wrapped = wrappers.SurrogateReward(env, oracle=Constant(3.0))
    env = gym.wrappers.RecordEpisodeStatistics(gym.wrappers.TransformReward(wrapped, lambda reward: 2 * reward))
    env = wrappers.AddScore(env, key="half", oracle=Constant(0.5))
    env.reset(seed=0)
    _, reward, *_, info = env.step("hello")
    assert (reward, info["half"], info["episode"]["r"]) == (6.0, 0.5, 6.0)
