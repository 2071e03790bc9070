"""Reward wrappers, single and batched: who decides, who is asked, and that nothing else changes."""

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import alpacafarm_env  # noqa: F401  # registers the ids
from alpacafarm_env import wrappers
from alpacafarm_env.envs.instruction import InstructionEnv
from alpacafarm_env.envs.vector import InstructionVectorEnv
from alpacafarm_env.errors import DataError, UnknownNameError, UnscoredError
from alpacafarm_env.oracles import Constant
from alpacafarm_env.wrappers import vector

NAMES = ("SurrogateReward", "EnsembleReward", "AnnotatorReward", "WinRateReward", "GoldReward", "AddScore")
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


class Unsure:
    """Never has a verdict."""

    name = "unsure"

    def score(self, instructions, responses):
        return np.full(len(responses), np.nan)


@pytest.fixture(params=["single", "batched"])
def form(request, tiny_dataset):
    """(module of wrappers, environment maker, how to answer): the same tests for both forms."""

    def single(oracle="constant", **keywords):
        return InstructionEnv(dataset=tiny_dataset, split="val", oracle=oracle, **keywords)

    def batched(oracle="constant", **keywords):
        mode = AutoresetMode.DISABLED
        return InstructionVectorEnv(
            4, dataset=tiny_dataset, split="val", oracle=oracle, autoreset_mode=mode, **keywords
        )

    if request.param == "single":
        return wrappers, single, lambda text: text
    return vector, batched, lambda text: [text] * 4


def one_step(env, action, seed=0):
    env.reset(seed=seed)
    return env.step(action)


def test_the_outermost_decides_and_alone_is_asked(form, make_counting_oracle):
    module, make, answer = form
    base, inner, outer = (make_counting_oracle(name) for name in ("base", "inner", "outer"))
    env = module.SurrogateReward(module.SurrogateReward(make(base), oracle=inner), oracle=outer)
    _, reward, _, _, info = one_step(env, answer("hello"))
    observation, _ = env.reset(seed=0)
    asked = [observation] if isinstance(observation, str) else observation
    np.testing.assert_array_equal(np.atleast_1d(reward), make_counting_oracle().score(asked, ["hello"] * len(asked)))
    assert set(np.atleast_1d(info["oracle"])) == {"outer"}
    assert (len(base.calls), len(inner.calls), len(outer.calls)) == (0, 0, 1)


def test_without_its_wrapper_the_environment_decides_again(form, make_counting_oracle):
    module, make, answer = form
    base, wrapper = make_counting_oracle("base"), make_counting_oracle("wrapper")
    env = make(base)
    one_step(module.SurrogateReward(env, oracle=wrapper), answer("hello"))
    _, _, _, _, info = one_step(env, answer("hello"))
    assert set(np.atleast_1d(info["oracle"])) == {"base"}
    assert (len(base.calls), len(wrapper.calls)) == (1, 1)


def test_the_environments_own_oracle_is_not_even_built(form):
    module, make, answer = form
    env = make({"reward_model": "/no/such/folder"})
    _, reward, _, _, _ = one_step(module.SurrogateReward(env, oracle=Constant(2.0)), answer("hello"))
    assert (np.asarray(reward) == 2.0).all()


@pytest.mark.parametrize("name", ["AnnotatorReward", "WinRateReward"])
def test_a_judge_becomes_a_win_rate_against_the_references(form, name):
    module, make, answer = form
    referee = Longer()
    env = getattr(module, name)(make(), judge=referee)
    for text, expected in (("x" * 99, 1.0), ("", 0.0)):
        _, reward, _, _, info = one_step(env, answer(text))
        assert (np.asarray(reward) == expected).all()
        assert set(np.atleast_1d(info["oracle"])) == {"win_rate:longer"}
    assert len(referee.calls) == 2


@pytest.mark.parametrize("name", ["AnnotatorReward", "WinRateReward"])
def test_a_judge_with_noise(form, name):
    module, make, answer = form
    env = getattr(module, name)(make(), judge={"judge": Longer(), "flip": 0.5})
    _, _, _, _, info = one_step(env, answer("x" * 99))
    assert np.atleast_1d(info["noised"]).all()


@pytest.mark.parametrize("name", ["AnnotatorReward", "WinRateReward"])
def test_a_pool_behind_a_server_is_a_judge_too(form, name, tmp_path):
    module, make, _ = form
    pool = {"pool": "ann", "models": "sandbox", "base_url": "http://127.0.0.1:9/v1", "ledger": str(tmp_path / "l.db")}
    assert getattr(module, name)(make(), judge=pool).oracle.name.startswith("win_rate:ann")


def test_an_ensemble_decides_by_all_its_members_asked_once(form, make_counting_oracle):
    module, make, answer = form
    one, three = make_counting_oracle("one", 1.0), make_counting_oracle("three", 3.0)
    env = module.EnsembleReward(make(), oracles=[one, three], combine="uwo", weight=0.1)
    _, reward, _, _, info = one_step(env, answer("hello"))
    assert len(one.calls) == len(three.calls) == 1
    scores = info["score:one"]
    np.testing.assert_array_equal(info["score:three"], 3 * np.asarray(scores))
    np.testing.assert_allclose(reward, 2 * np.asarray(scores) - 0.1 * np.square(scores), rtol=1e-12)
    np.testing.assert_allclose(info["disagreement"], np.abs(scores), rtol=1e-12)
    np.testing.assert_array_equal(info["reward_components"]["ensemble:uwo0.1"], reward)
    assert set(np.atleast_1d(info["oracle"])) == {"ensemble:uwo0.1"}


def test_an_ensemble_with_an_unsure_member_has_no_verdict(form):
    module, make, answer = form
    env = module.EnsembleReward(make(), oracles=[Constant(1.0), Unsure()])
    with pytest.raises(UnscoredError, match=r"'ensemble:mean' gave no verdict .*\(unsure: no verdict\)"):
        one_step(env, answer("hello"))
    env = module.EnsembleReward(make(on_unscored="truncate"), oracles=[Constant(1.0), Unsure()])
    _, _, terminated, truncated, info = one_step(env, answer("hello"))
    assert np.asarray(truncated).all()
    assert not np.asarray(terminated).any()
    assert (np.asarray(info["score:constant"]) == 1.0).all()
    assert np.isnan(info["score:unsure"]).all()


def test_an_ensembles_members_are_checked_when_the_wrapper_is_made(form):
    module, make, _ = form
    with pytest.raises(UnknownNameError, match="Did you mean 'constant'"):
        module.EnsembleReward(make(), oracles=["constant", "constnat"])
    with pytest.raises(UnknownNameError, match="Did you mean 'min'"):
        module.EnsembleReward(make(), oracles=["constant"], combine="mim")
    with pytest.raises(ValueError, match="goes with combine='uwo'"):
        module.EnsembleReward(make(), oracles=["constant"], weight=0.1)
    with pytest.raises(ValueError, match="one or more members, got none"):
        module.EnsembleReward(make(), oracles=[])
    with pytest.raises(TypeError, match="members are a list of oracles.* got 'constant'"):
        module.EnsembleReward(make(), oracles="constant")


def test_add_score_changes_no_bit_of_the_reward(form, make_counting_oracle):
    module, make, answer = form
    plain, scored = make(make_counting_oracle("base", 1 / 3)), make(make_counting_oracle("base", 1 / 3))
    scored = module.AddScore(scored, key="second", oracle=make_counting_oracle("second", 7.0))
    for seed in range(30):
        observation, reward, terminated, truncated, info = one_step(plain, answer("a" * seed), seed)
        observation2, reward2, terminated2, truncated2, info2 = one_step(scored, answer("a" * seed), seed)
        assert np.asarray(reward).tobytes() == np.asarray(reward2).tobytes()
        assert observation == observation2
        np.testing.assert_array_equal([terminated, truncated], [terminated2, truncated2])
        np.testing.assert_allclose(info2["second"], 21 * np.asarray(reward), rtol=1e-12)
        assert info2.keys() - info.keys() <= {"second", "_second"}
        assert str(info["reward_components"]) == str(info2["reward_components"])


def test_add_score_may_have_no_verdict(form):
    module, make, answer = form
    _, reward, terminated, _, info = one_step(module.AddScore(make(), key="unsure", oracle=Unsure()), answer("hello"))
    assert np.isnan(info["unsure"]).all()
    assert (np.asarray(reward) == 0.0).all()
    assert np.asarray(terminated).all()


def test_an_oracle_that_overwrites_its_batch_changes_neither_info_nor_other_scores(form, counting_oracle):
    class Editing(Unsure):
        def score(self, instructions, responses):
            if isinstance(responses, list):
                responses[:] = [""] * len(responses)
            return np.zeros(len(responses))

    module, make, answer = form
    _, expected, *_ = one_step(make(counting_oracle), answer("hello"))
    env = module.AddScore(make(Editing()), key="length", oracle=counting_oracle)
    _, _, _, _, info = one_step(env, answer("hello"))
    assert set(np.atleast_1d(info["response"])) == {"hello"}
    np.testing.assert_array_equal(info["length"], expected)


def test_add_score_reports_wherever_it_stands(form, make_counting_oracle):
    module, make, answer = form
    inner, outer, deciding = (make_counting_oracle(name) for name in ("inner", "outer", "deciding"))
    env = module.AddScore(make(), key="inner", oracle=inner)
    env = module.AddScore(module.SurrogateReward(env, oracle=deciding), key="outer", oracle=outer)
    _, reward, _, _, info = one_step(env, answer("hello"))
    np.testing.assert_array_equal(info["inner"], reward)
    np.testing.assert_array_equal(info["outer"], reward)
    assert [len(oracle.calls) for oracle in (inner, outer, deciding)] == [1, 1, 1]


@pytest.mark.parametrize("key", ["", "_score", "oracle", "response_truncated", "episode", "final_info", 3])
def test_add_score_needs_a_key_of_its_own(form, key):
    module, make, _ = form
    with pytest.raises(ValueError, match="must be a text without a leading underscore"):
        module.AddScore(make(), key=key, oracle=Constant())


def test_two_scores_under_one_key(form):
    module, make, _ = form
    env = module.SurrogateReward(module.AddScore(make(), key="gold", oracle=Constant()), oracle=Constant())
    with pytest.raises(ValueError, match="already reports a score under 'gold'"):
        module.AddScore(env, key="gold", oracle=Constant())


def test_wrappers_do_not_change_what_is_asked(form):
    module, make, _ = form
    plain, wrapped = make(), module.AddScore(module.SurrogateReward(make(), oracle=Constant(1.0)), oracle=Constant(2.0))
    asked = [(env.reset(seed=5)[0], *(env.reset()[0] for _ in range(20))) for env in (plain, wrapped)]
    assert asked[0] == asked[1]


def test_an_unscored_step_raises_and_can_be_repeated(form):
    module, make, answer = form
    env = make()
    with pytest.raises(UnscoredError):
        one_step(module.SurrogateReward(env, oracle=Unsure()), answer("hello"))
    _, reward, _, _, _ = env.step(answer("hello"))  # the wrapper has left nothing behind
    assert (np.asarray(reward) == 0.0).all()


@pytest.mark.parametrize("name", NAMES)
def test_an_environment_that_is_not_ours(name):
    with pytest.raises(TypeError, match=rf"{name} needs an AlpacaFarm environment.*gym\.make\('AlpacaFarm"):
        getattr(wrappers, name)(gym.make("CartPole-v1"), **REQUIRED.get(name, {}))
    with pytest.raises(TypeError, match=rf"{name} needs an AlpacaFarm environment.*gym\.make_vec"):
        getattr(vector, name)(gym.make_vec("CartPole-v1", num_envs=2), **REQUIRED.get(name, {}))


@pytest.mark.parametrize("name", NAMES)
def test_the_wrong_form(name, tiny_dataset):
    single = InstructionEnv(dataset=tiny_dataset, oracle="constant")
    batched = InstructionVectorEnv(2, dataset=tiny_dataset, oracle="constant")
    with pytest.raises(TypeError, match=rf"use wrappers\.vector\.{name}"):
        getattr(wrappers, name)(batched, **REQUIRED.get(name, {}))
    with pytest.raises(TypeError, match=rf"use wrappers\.{name}"):
        getattr(vector, name)(single, **REQUIRED.get(name, {}))
    with pytest.raises(TypeError, match="no vectorization_mode"):
        getattr(vector, name)(SyncVectorEnv([lambda: single]), **REQUIRED.get(name, {}))


@pytest.mark.parametrize("name", NAMES)
def test_both_forms_take_the_same_keywords(name):
    assert getattr(wrappers, name).__init__.__kwdefaults__ == getattr(vector, name).__init__.__kwdefaults__


def test_a_wrong_oracle_is_found_when_the_wrapper_is_made(form):
    module, make, _ = form
    with pytest.raises(UnknownNameError, match="Did you mean 'surrogate'"):
        module.SurrogateReward(make(), oracle="surogate")
    with pytest.raises(UnknownNameError, match="Did you mean 'human'"):
        module.WinRateReward(make(), judge="humen")
    with pytest.raises(DataError, match="Only the sandbox has a true reward"):
        module.GoldReward(make())


def test_the_spec_survives_json(tmp_path):
    """Names and mappings are JSON; the environment made from it stacks the same wrappers with the same rewards."""
    (tmp_path / "val.json").write_text('[{"instruction": "Say one."}, {"instruction": "Say two."}]')
    env = gym.make("AlpacaFarm-PPO-v0", dataset=str(tmp_path), split="val", oracle={"name": "constant", "value": 1.0})
    env = wrappers.SurrogateReward(env, oracle={"name": "constant", "value": 2.0})
    env = wrappers.AddScore(env, key="third", oracle="constant")
    again = gym.make(EnvSpec.from_json(env.spec.to_json()))
    assert isinstance(again, wrappers.AddScore)
    assert again.key == "third"
    again.reset(seed=0)
    _, reward, _, _, info = again.step("hello")
    assert reward == 2.0
    assert info["third"] == 0.0


def test_an_ensembles_spec_survives_json(tmp_path):
    (tmp_path / "val.json").write_text('[{"instruction": "Say one."}, {"instruction": "Say two."}]')
    members = [{"name": "constant", "value": value} for value in (1.0, 4.0)]
    inner = {"ensemble": [*members, "constant"], "combine": "min"}
    env = gym.make("AlpacaFarm-PPO-v0", dataset=str(tmp_path), split="val", oracle=inner)
    wrapped = wrappers.EnsembleReward(env, oracles=members, combine="uwo", weight=0.1)
    for made, reward in ((env, 0.0), (wrapped, 2.5 - 0.1 * 1.5**2)):
        again = gym.make(EnvSpec.from_json(made.spec.to_json()))
        again.reset(seed=0)
        assert again.step("hello")[1] == pytest.approx(reward, rel=1e-12)
    assert isinstance(again, wrappers.EnsembleReward)


def test_the_spec_does_not_copy_an_oracle(tiny_dataset):
    env = gym.make("AlpacaFarm-PPO-v0", dataset=tiny_dataset, oracle="constant")
    oracle = Constant(1.0)
    wrapped = wrappers.SurrogateReward(env, oracle=oracle)
    assert wrapped.spec.additional_wrappers[-1].kwargs["oracle"] is oracle


def test_gymnasiums_wrappers_may_stand_anywhere(tiny_dataset):
    env = gym.make("AlpacaFarm-PPO-v0", dataset=tiny_dataset, oracle="constant")
    env = gym.wrappers.TransformReward(wrappers.SurrogateReward(env, oracle=Constant(3.0)), lambda reward: 2 * reward)
    env = wrappers.AddScore(gym.wrappers.RecordEpisodeStatistics(env), key="half", oracle=Constant(0.5))
    _, reward, _, _, info = one_step(env, "hello")
    assert (reward, info["half"], info["episode"]["r"]) == (6.0, 0.5, 6.0)


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_a_batch_of_512_under_four_wrappers_is_one_call(tiny_dataset, make_counting_oracle, mode):
    base, *reward = (make_counting_oracle(name) for name in ("base", "one", "two", "three", "four"))
    env = gym.make_vec("AlpacaFarm-PPO-v0", num_envs=512, dataset=tiny_dataset, oracle=base, autoreset_mode=mode)
    for oracle in reward:
        env = vector.SurrogateReward(env, oracle=oracle)
    one_step(env, ["hello"] * 512)
    assert reward[-1].calls == [512]
    assert [oracle.calls for oracle in (base, *reward[:-1])] == [[]] * 4


@pytest.mark.parametrize("mode", list(AutoresetMode))
@pytest.mark.parametrize("combine", ["mean", "min", "uwo"])
def test_a_batched_ensemble_equals_a_batch_of_singles(tiny_dataset, make_counting_oracle, combine, mode):
    """To the last bit, with so many members that a sum could round differently."""
    oracles = [make_counting_oracle("member", 1 / (3 + i)) for i in range(11)]
    oracles += [{"judge": Longer(), "flip": 0.25}, Unsure()]
    keywords = {"dataset": tiny_dataset, "split": "val", "oracle": "constant", "on_unscored": "truncate"}
    for members in (oracles[:-1], oracles):
        batched = vector.EnsembleReward(
            InstructionVectorEnv(4, autoreset_mode=mode, **keywords), oracles=members, combine=combine
        )

        def single(members=members):
            return wrappers.EnsembleReward(InstructionEnv(**keywords), oracles=members, combine=combine)

        sync = SyncVectorEnv([single] * 4, autoreset_mode=mode)
        results = [env.reset(seed=3) for env in (batched, sync)]
        for step in range(7):
            same(*results)
            if mode is AutoresetMode.DISABLED and step:
                same(*(env.reset(options={"reset_mask": np.ones(4, bool)}) for env in (batched, sync)))
            results = [env.step([f"response {step} {slot}" * slot for slot in range(4)]) for env in (batched, sync)]


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_the_batched_form_equals_a_batch_of_singles(tiny_dataset, make_counting_oracle, mode):
    def single():
        env = InstructionEnv(dataset=tiny_dataset, split="val", oracle="constant")
        env = wrappers.AnnotatorReward(env, judge={"judge": Longer(), "flip": 0.25})
        return wrappers.AddScore(env, key="length", oracle=make_counting_oracle())

    batched = InstructionVectorEnv(4, dataset=tiny_dataset, split="val", oracle="constant", autoreset_mode=mode)
    batched = vector.AnnotatorReward(batched, judge={"judge": Longer(), "flip": 0.25})
    batched = vector.AddScore(batched, key="length", oracle=make_counting_oracle())
    sync = SyncVectorEnv([single] * 4, autoreset_mode=mode)
    results = [env.reset(seed=3) for env in (batched, sync)]
    for step in range(25):
        same(*results)
        if mode is AutoresetMode.DISABLED and step:
            same(*(env.reset(options={"reset_mask": np.ones(4, bool)}) for env in (batched, sync)))
        results = [env.step([f"response {step} {slot}" * slot for slot in range(4)]) for env in (batched, sync)]


def same(left, right):
    """Equal, types and masks of nested infos included."""
    assert type(left) is type(right)
    if isinstance(left, dict):
        assert left.keys() == right.keys()
        for key in left:
            same(left[key], right[key])
    elif isinstance(left, tuple):
        assert len(left) == len(right)
        for one, other in zip(left, right, strict=True):
            same(one, other)
    elif isinstance(left, np.ndarray):
        assert left.dtype == right.dtype
        np.testing.assert_array_equal(left, right)
    else:
        assert left == right
