"""InstructionVectorEnv: equal to SyncVectorEnv of single environments, its options and its errors."""

import gymnasium as gym
import numpy as np
import pandas as pd
import pytest
from gymnasium.error import ResetNeeded
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers.vector import DictInfoToList

from alpacafarm_env.envs.infos import merge, scatter
from alpacafarm_env.envs.instruction import InstructionEnv
from alpacafarm_env.envs.registration import TEXT_IDS
from alpacafarm_env.envs.vector import InstructionVectorEnv
from alpacafarm_env.errors import (
    DataError,
    InvalidResponseError,
    InvalidResponseTypeError,
    UnknownNameError,
    UnscoredError,
)
from alpacafarm_env.oracles.base import Constant, Verdicts
from alpacafarm_env.seeding import keyed_uniforms

NUM_ENVS = 5
MODES = list(AutoresetMode)


class Detailed:
    """A verdict that varies with the text, sometimes missing, with details of every type."""

    name = "detailed"

    def judge(self, instructions, responses):
        draws = keyed_uniforms(0, "detailed", list(zip(instructions, responses, strict=True)))
        judged = draws < 0.8
        details = {
            "annotator": np.where(draws < 0.4, "a", "b"),
            "shown_first": (draws * 10).astype(np.int32),
            "noised": draws < 0.1,
            "cost_usd": draws.astype(np.float32),
            "note": np.array([None if draw < 0.5 else "long" for draw in draws], dtype=object),
        }
        return Verdicts(np.where(judged, draws, np.nan), details)

    def score(self, instructions, responses):
        return self.judge(instructions, responses).scores


def assert_same(ours, theirs, where="result"):
    """Equality of values, types, dtypes and keys, all the way down; NaN equals NaN."""
    assert type(ours) is type(theirs), where
    if isinstance(ours, dict):
        assert ours.keys() == theirs.keys(), where
        for key in ours:
            assert_same(ours[key], theirs[key], f"{where}[{key!r}]")
    elif isinstance(ours, tuple):
        for index, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
            assert_same(mine, other, f"{where}[{index}]")
    elif isinstance(ours, np.ndarray):
        assert ours.dtype == theirs.dtype, where
        np.testing.assert_array_equal(ours, theirs, where)
    else:
        assert ours == theirs, where


def pair(dataset, mode, oracle=None):
    keywords = {"dataset": dataset, "oracle": oracle or Detailed(), "on_unscored": "truncate"}
    ours = InstructionVectorEnv(NUM_ENVS, **keywords, autoreset_mode=mode)
    theirs = SyncVectorEnv([lambda: InstructionEnv(**keywords)] * NUM_ENVS, autoreset_mode=mode)
    return ours, theirs


# --- Equality with singles -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_batched_equals_sync_for_200_steps(tiny_dataset, mode):
    ours, theirs = pair(tiny_dataset, mode)
    assert_same(ours.reset(seed=11), theirs.reset(seed=11))
    for step in range(200):
        responses = tuple(f"response {step} of {slot} 🙂" * (step % 3) for slot in range(NUM_ENVS))
        assert_same(ours.step(responses), theirs.step(responses))
        if mode is AutoresetMode.DISABLED:
            assert_same(ours.reset(), theirs.reset())


@pytest.mark.parametrize("mode", MODES)
def test_batched_equals_sync_with_partial_and_seeded_resets(tiny_dataset, mode):
    """Under NEXT_STEP such resets put slots out of phase: some are scored while others are reset."""
    ours, theirs = pair(tiny_dataset, mode)
    rng = np.random.default_rng(0)
    assert_same(ours.reset(seed=[3, None, 3, 0, 2**40])[0][2], theirs.reset(seed=[3, None, 3, 0, 2**40])[0][2])
    assert_same(ours.reset(seed=5), theirs.reset(seed=5))
    for step in range(200):
        if step % 3 == 1 or mode is AutoresetMode.DISABLED:
            masks = np.stack([rng.random(NUM_ENVS) < 0.5, np.ones(NUM_ENVS, dtype=bool)])
            for mask in masks[~np.array([not m.any() for m in masks])]:
                seed = [None, step, [step * i if i % 2 else None for i in range(NUM_ENVS)]][step % 3]
                results = [env.reset(seed=seed, options={"reset_mask": mask.copy()}) for env in (ours, theirs)]
                assert_same(*results)
                if step % 2 and mode is not AutoresetMode.DISABLED:
                    break
        responses = [f"{step} {slot}" for slot in range(NUM_ENVS)]
        assert_same(ours.step(responses), theirs.step(responses))


@pytest.mark.parametrize("id", TEXT_IDS)
@pytest.mark.parametrize("oracle", [{"oracle": "constant"}, {}], ids=["constant", "default"])
def test_ids_make_the_batched_environment_equal_to_sync(id, oracle):
    ours = gym.make_vec(id, num_envs=3, **oracle)
    assert isinstance(ours, InstructionVectorEnv)
    mode = {"autoreset_mode": AutoresetMode.SAME_STEP}
    theirs = gym.make_vec(id, num_envs=3, vectorization_mode="sync", vector_kwargs=mode, **oracle)
    assert ours.metadata["autoreset_mode"] is AutoresetMode.SAME_STEP
    assert_same(ours.reset(seed=1), theirs.reset(seed=1))
    for step in range(3):
        responses = [f"Step {step}, slot {slot}: fire is warm and bright." for slot in range(3)]
        for mine, other in zip(ours.step(responses), theirs.step(responses), strict=True):
            # A learned model's sums depend on the batch in the last bits.
            assert_close(mine, other)


def assert_close(ours, theirs):
    if isinstance(ours, dict):
        assert ours.keys() == theirs.keys()
        for key in ours:
            assert_close(ours[key], theirs[key])
    elif isinstance(ours, np.ndarray) and ours.dtype.kind == "f":
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)
    else:
        assert_same(ours, theirs)


def test_infos_are_new_objects_each_step(tiny_dataset):
    env = InstructionVectorEnv(3, tiny_dataset, oracle=Detailed(), on_unscored="truncate", autoreset_mode="NextStep")
    env.reset(seed=0)
    infos = [env.step(["a"] * 3)[4], env.step(["a"] * 3)[4], env.step(["a"] * 3)[4]]
    arrays = [a for info in infos for a in info.values() if isinstance(a, np.ndarray)]
    assert not any(np.shares_memory(a, b) for i, a in enumerate(arrays) for b in arrays[:i])


# --- One call --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_one_oracle_call_a_step(tiny_dataset, counting_oracle, mode):
    env = InstructionVectorEnv(512, tiny_dataset, oracle=counting_oracle, autoreset_mode=mode)
    env.reset(seed=0)
    env.step(["a"] * 512)
    assert counting_oracle.calls == [512]
    if mode is AutoresetMode.NEXT_STEP:
        assert env.step(["ignored"] * 512)[1].sum() == 0
        assert counting_oracle.calls == [512]


def test_the_outermost_decides_for_the_batch(tiny_dataset, counting_oracle, make_counting_oracle):
    gold = make_counting_oracle("gold", scale=2.0)
    env = InstructionVectorEnv(4, tiny_dataset, oracle="surrogate", autoreset_mode="Disabled")
    env.reset(seed=0)
    with env.also_scored_by("gold_reward", gold), env.scored_by(counting_oracle), env.scored_by(Constant(9.0)):
        _, rewards, *_, infos = env.step(["ab", "", "abc", "d"])
    assert (counting_oracle.calls, gold.calls) == ([4], [4])
    np.testing.assert_array_equal(infos["gold_reward"], 2 * rewards)
    np.testing.assert_array_equal(infos["reward_components"]["counting"], rewards)


# --- Options of reset ------------------------------------------------------------------------------------------------


def groups(observations, size):
    return [set(observations[i : i + size]) for i in range(0, len(observations), size)]


@pytest.mark.parametrize("mode", MODES)
def test_num_generations_repeats_each_instruction(tiny_dataset, constant_oracle, mode):
    env = InstructionVectorEnv(12, tiny_dataset, oracle=constant_oracle, autoreset_mode=mode)
    plain, _ = env.reset(seed=0)
    grouped, infos = env.reset(seed=0, options={"num_generations": 4})
    assert all(len(group) == 1 for group in groups(grouped, 4))
    assert grouped[::4] == plain[::4]  # drawn by the first slot's stream
    assert infos["instruction_id"].tolist() == [i.id for i in grouped]
    if mode is not AutoresetMode.DISABLED:  # holds through automatic resets ...
        for _ in range(4):
            assert all(len(group) == 1 for group in groups(env.step([""] * 12)[0], 4))
    seen = {tuple(len(group) for group in groups(env.reset()[0], 4)) for _ in range(5)}
    assert seen != {(1, 1, 1)}  # ... and until the next explicit one


def test_num_generations_of_single_slots_afterwards(tiny_dataset, constant_oracle):
    env = InstructionVectorEnv(4, tiny_dataset, oracle=constant_oracle, autoreset_mode="NextStep")
    env.reset(seed=0, options={"num_generations": 2})
    second = np.array([False, False, True, True])
    for _ in range(20):
        observations, _ = env.reset(options={"num_generations": 2, "reset_mask": second})
        assert observations[2] == observations[3]
        assert observations[0] == observations[1]


@pytest.mark.parametrize("num_generations", [0, -1, 5, 13, 1.5, "2", None])
def test_other_num_generations_are_refused(tiny_dataset, constant_oracle, num_generations):
    env = InstructionVectorEnv(12, tiny_dataset, oracle=constant_oracle)
    with pytest.raises(ValueError, match="Expected num_generations"):
        env.reset(options={"num_generations": num_generations})


def test_instruction_ids_are_asked_and_draw_nothing(tiny_dataset, constant_oracle):
    env = InstructionVectorEnv(4, tiny_dataset, oracle=constant_oracle)
    env.reset(seed=0)
    expected, _ = env.reset()
    env.reset(seed=0)
    observations, infos = env.reset(options={"instruction_ids": [111, 100, 105, 105]})
    assert [i.id for i in observations] == infos["instruction_id"].tolist() == [111, 100, 105, 105]
    observations, _ = env.reset(options={"instruction_ids": np.array([103, 104]), "num_generations": 2})
    assert [i.id for i in observations] == [103, 103, 104, 104]
    assert env.reset()[0] == expected


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"instruction_ids": [100, 101]}, ValueError, "Expected 4 instruction_ids"),
        ({"instruction_ids": [100] * 4, "num_generations": 2}, ValueError, "Expected 2 instruction_ids"),
        ({"instruction_ids": "1000"}, ValueError, "Expected 4 instruction_ids"),
        ({"instruction_ids": 100}, ValueError, "Expected 4 instruction_ids"),
        ({"instruction_ids": [100, 101, 102, 99]}, UnknownNameError, "Unknown instruction_id 99"),
        ({"instruction_id": 100}, UnknownNameError, "Did you mean 'instruction_ids'"),
        ({"reset_mask": [True] * 4}, ValueError, r"bool array of shape \(4,\)"),
        ({"reset_mask": np.ones(3, dtype=bool)}, ValueError, r"bool array of shape \(4,\)"),
        ({"reset_mask": np.zeros(4, dtype=bool)}, ValueError, "at least one"),
        ({"reset_mask": np.array([True, True, True, False]), "num_generations": 2}, ValueError, "whole groups"),
    ],
)
def test_wrong_options_are_refused_and_change_nothing(tiny_dataset, constant_oracle, options, error, message):
    env, twin = (InstructionVectorEnv(4, tiny_dataset, oracle=constant_oracle) for _ in range(2))
    assert env.reset(seed=0)[0] == twin.reset(seed=0)[0]
    with pytest.raises(error, match=message):
        env.reset(options=options)
    assert_same(env.step([""] * 4), twin.step([""] * 4))


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_what_is_left_out_is_drawn_no_more_and_batched_still_equals_sync(tiny_dataset, mode):
    batched, sync = pair(tiny_dataset, mode)
    kept = {100, 103, 107}
    for env in (*(single.unwrapped for single in sync.envs), batched):
        env.leave_out(id for id in range(100, 112) if id not in kept)
    seen = set()
    for step in range(40):
        if step % 2 == 0 or mode is AutoresetMode.DISABLED:
            (ours, _), (theirs, _) = (env.reset(seed=step if step else 7) for env in (batched, sync))
        else:
            ours, theirs = (env.step(["x"] * batched.num_envs)[0] for env in (batched, sync))
        assert ours == tuple(theirs)
        seen |= {observation.id for observation in ours}
    assert seen == kept


def test_leaving_out_in_mid_stream_an_unknown_one_nothing_or_everything(tiny_dataset, constant_oracle):
    def draws(env, count):
        return [env.reset()[0].id for _ in range(count)]

    env, same, without = (InstructionEnv(tiny_dataset, oracle=constant_oracle) for _ in range(3))
    for one in (env, same, without):
        one.reset(seed=3)
    same.leave_out([])
    assert draws(env, 20) == draws(same, 20)
    without.leave_out([100, 101])
    without.leave_out([102])
    assert min(draws(without, 200)) == 103
    assert without.reset(options={"instruction_id": 100})[0].id == 100
    with pytest.raises(UnknownNameError, match="instruction_id 99"):
        env.leave_out([99])
    with pytest.raises(DataError, match="every instruction is left out"):
        env.leave_out(range(100, 112))
    assert draws(env, 20) == draws(same, 20)


def test_options_are_not_changed(tiny_dataset, constant_oracle):
    env = InstructionVectorEnv(2, tiny_dataset, oracle=constant_oracle)
    env.reset(seed=0)
    options = {"reset_mask": np.array([True, False])}
    env.reset(options=options)
    assert options.keys() == {"reset_mask"}


@pytest.mark.parametrize("seed", [[1, 2, 3], [1] * 5, 1.5, "abcd", {1, 2, 3, 4}])
def test_seeds_must_be_one_per_slot(tiny_dataset, constant_oracle, seed):
    with pytest.raises(ValueError, match="seed"):
        InstructionVectorEnv(4, tiny_dataset, oracle=constant_oracle).reset(seed=seed)


def test_generators_and_seeds_are_shown_per_slot(tiny_dataset, constant_oracle):
    env = InstructionVectorEnv(3, tiny_dataset, oracle=constant_oracle)
    assert len(env.np_random) == 3
    env.reset(seed=40)
    assert env.np_random_seed == (40, 41, 42)


# --- Errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_step_needs_a_first_reset_of_all_slots(tiny_dataset, constant_oracle, mode):
    env = InstructionVectorEnv(2, tiny_dataset, oracle=constant_oracle, autoreset_mode=mode)
    with pytest.raises(ResetNeeded):
        env.step(["a", "b"])
    with pytest.raises(ResetNeeded, match="first reset"):
        env.reset(options={"reset_mask": np.array([True, False])})


def test_disabled_needs_a_reset_of_every_slot(tiny_dataset, constant_oracle):
    env = InstructionVectorEnv(2, tiny_dataset, oracle=constant_oracle, autoreset_mode="Disabled")
    env.reset()
    env.step(["a", "b"])
    with pytest.raises(ResetNeeded, match="2 of 2 slots"):
        env.step(["a", "b"])
    env.reset(options={"reset_mask": np.array([True, False])})
    with pytest.raises(ResetNeeded, match="1 of 2 slots"):
        env.step(["a", "b"])


@pytest.mark.parametrize(
    ("responses", "error", "message"),
    [
        ("ab", InvalidResponseTypeError, "sequence of 2 responses, one per slot, got str"),
        (None, InvalidResponseTypeError, "got NoneType"),
        ({"a", "b"}, InvalidResponseTypeError, "got set"),
        (["a"], InvalidResponseError, "Expected 2 responses, one per slot, got 1"),
        (["a", 2], InvalidResponseTypeError, "in slot 1, got int: 2"),
        (["\ud800", "b"], InvalidResponseError, "in slot 0, got a lone surrogate"),
        (["a", "x" * (2**20 + 1)], InvalidResponseError, "in slot 1, got 1048577"),
    ],
)
@pytest.mark.parametrize("mode", MODES)
def test_wrong_responses_change_nothing(tiny_dataset, counting_oracle, mode, responses, error, message):
    env, twin = (InstructionVectorEnv(2, tiny_dataset, oracle=counting_oracle, autoreset_mode=mode) for _ in range(2))
    env.reset(seed=0), twin.reset(seed=0)
    with pytest.raises(error, match=message):
        env.step(responses)
    assert counting_oracle.calls == []
    assert_same(env.step(["a", "b"]), twin.step(np.array(["a", "b"], dtype=object)))


@pytest.mark.parametrize("mode", MODES)
def test_no_verdict_changes_nothing(tiny_dataset, mode):
    env = InstructionVectorEnv(50, tiny_dataset, oracle=Detailed(), autoreset_mode=mode)
    observations, _ = env.reset(seed=0)
    with pytest.raises(UnscoredError, match=r"'detailed' gave no verdict on \d+ of 50"):
        env.step([f"response {i}" for i in range(50)])
    with env.scored_by(Constant(1.0)), env.also_scored_by("detailed_score", Detailed()):
        result = env.step([f"response {i}" for i in range(50)])
    infos = result[4]["final_info"] if mode is AutoresetMode.SAME_STEP else result[4]
    assert infos["instruction_id"].tolist() == [i.id for i in observations]
    assert np.isnan(infos["detailed_score"]).any()  # a report may lack a verdict: the reward has one


def test_wrong_arguments(tiny_dataset, constant_oracle):
    with pytest.raises(UnknownNameError, match="Unknown autoreset_mode 'SameSteps'. Did you mean 'SameStep'"):
        InstructionVectorEnv(2, tiny_dataset, oracle=constant_oracle, autoreset_mode="SameSteps")
    with pytest.raises(UnknownNameError, match="Unknown split"):
        InstructionVectorEnv(2, tiny_dataset, "evl", constant_oracle)
    with pytest.raises(ValueError, match="num_envs of at least 1, got 0"):
        InstructionVectorEnv(0, tiny_dataset, oracle=constant_oracle)


# --- Infos -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_infos_as_a_list_are_those_of_single_environments_and_make_a_table(tiny_dataset, mode):
    def info_of(slot):
        env = InstructionEnv(tiny_dataset, oracle=Detailed(), on_unscored="truncate")
        asked = env.reset(seed=7 + slot)[1]
        return asked, env.step(f"response {slot}")[4]

    expected = [info_of(slot) for slot in range(NUM_ENVS)]
    envs = InstructionVectorEnv(NUM_ENVS, tiny_dataset, oracle=Detailed(), on_unscored="truncate", autoreset_mode=mode)
    envs = DictInfoToList(envs)
    _, asked = envs.reset(seed=7)
    *_, infos = envs.step([f"response {slot}" for slot in range(NUM_ENVS)])
    judged = [info["final_info"] for info in infos] if mode is AutoresetMode.SAME_STEP else infos
    np.testing.assert_equal(list(zip(asked, judged, strict=True)), expected)
    for table in (pd.json_normalize(judged), pd.json_normalize([info for _, info in expected])):
        assert table["response"].tolist() == [f"response {slot}" for slot in range(NUM_ENVS)]
        np.testing.assert_array_equal(
            table["reward_components.detailed"], [info["reward_components"]["detailed"] for _, info in expected]
        )


def test_scatter_and_merge_by_hand():
    columns = {"score": np.array([1.0, 2.0]), "name": np.array(["a", "b"], dtype=object)}
    infos = scatter(columns, np.array([1, 3]), 4)
    assert infos["score"].tolist() == [0, 1, 0, 2]
    assert infos["name"].tolist() == [None, "a", None, "b"]
    assert infos["_score"].tolist() == infos["_name"].tolist() == [False, True, False, True]
    merged = merge(infos, scatter({"score": np.array([5.0]), "new": np.array([True])}, np.array([0]), 4))
    assert merged["score"].tolist() == [5, 1, 0, 2]
    assert merged["_score"].tolist() == [True, True, False, True]
    assert merged["_new"].tolist() == merged["new"].tolist() == [True, False, False, False]
