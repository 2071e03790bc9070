"""InstructionVectorEnv: equal to SyncVectorEnv of single environments, its options and its errors."""

import gymnasium as gym
import numpy as np
import pandas as pd
import pytest
from equality import assert_same
from gymnasium.error import ResetNeeded
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers.vector import DictInfoToList

from alpacafarm_env import DataError, InvalidResponseError, InvalidResponseTypeError, UnknownNameError, UnscoredError
from alpacafarm_env.envs.instruction import InstructionEnv
from alpacafarm_env.envs.registration import TEXT_IDS
from alpacafarm_env.envs.vector import InstructionVectorEnv
from alpacafarm_env.oracles.base import Constant, Verdicts
from alpacafarm_env.seeding import keyed_uniforms

NUM_ENVS = 5
each_mode = pytest.mark.parametrize("mode", list(AutoresetMode))


class Detailed:
    """A verdict that varies with the text, sometimes missing, with details of every type."""

    name = "detailed"

    def judge(self, instructions, responses):
        draws = keyed_uniforms(0, "detailed", list(zip(instructions, responses, strict=True)))
        details = {
            "annotator": np.where(draws < 0.4, "a", "b"),
            "shown_first": (draws * 10).astype(np.int32),
            "noised": draws < 0.1,
            "cost_usd": draws.astype(np.float32),
            "note": np.array([None if draw < 0.5 else "long" for draw in draws], dtype=object),
        }
        return Verdicts(np.where(draws < 0.8, draws, np.nan), details)

    def score(self, instructions, responses):
        return self.judge(instructions, responses).scores


def pair(dataset, mode):
    keywords = {"dataset": dataset, "oracle": Detailed(), "on_unscored": "truncate"}
    ours = InstructionVectorEnv(NUM_ENVS, **keywords, autoreset_mode=mode)
    theirs = SyncVectorEnv([lambda: InstructionEnv(**keywords)] * NUM_ENVS, autoreset_mode=mode)
    return ours, theirs


@pytest.fixture
def env(tiny_dataset, constant_oracle):
    return InstructionVectorEnv(4, tiny_dataset, oracle=constant_oracle)


@each_mode
def test_batched_equals_sync_with_partial_and_seeded_resets(tiny_dataset, mode):
    """Under NEXT_STEP such resets put slots out of phase: some are scored while others are reset."""
    ours, theirs = pair(tiny_dataset, mode)
    rng = np.random.default_rng(0)
    assert ours.reset(seed=[3, None, 3, 0, 2**40])[0][2] == theirs.reset(seed=[3, None, 3, 0, 2**40])[0][2]
    assert_same(ours.reset(seed=5), theirs.reset(seed=5))
    for step in range(100):
        if step % 3 == 1 or mode is AutoresetMode.DISABLED:
            masks = [rng.random(NUM_ENVS) < 0.5, np.ones(NUM_ENVS, dtype=bool)]
            for mask in [mask for mask in masks if mask.any()]:
                seed = [None, step, [step * i if i % 2 else None for i in range(NUM_ENVS)]][step % 3]
                options = {"reset_mask": mask}  # ours leaves them as they are: Sync is asked with the same
                assert_same(ours.reset(seed=seed, options=options), theirs.reset(seed=seed, options=options))
                if step % 2 and mode is not AutoresetMode.DISABLED:
                    break
        responses = tuple(f"response {step} of {slot} 🙂" * (step % 3) for slot in range(NUM_ENVS))
        assert_same(ours.step(responses), theirs.step(responses))


@pytest.mark.parametrize("id", TEXT_IDS)
def test_ids_make_batches_that_equal_sync(id):
    ours = gym.make_vec(id, num_envs=3)
    assert isinstance(ours, InstructionVectorEnv)
    assert ours.metadata["autoreset_mode"] is AutoresetMode.SAME_STEP
    mode = {"autoreset_mode": AutoresetMode.SAME_STEP}
    theirs = gym.make_vec(id, num_envs=3, vectorization_mode="sync", vector_kwargs=mode)
    assert_same(ours.reset(seed=1), theirs.reset(seed=1))
    for step in range(3):
        responses = [f"Step {step}, slot {slot}: fire is warm and bright." for slot in range(3)]
        # A learned model's sums depend on the batch in the last bits.
        assert_same(ours.step(responses), theirs.step(responses), rtol=1e-4)
    single = gym.make(id)
    infos = [single.reset()[1], single.step(responses[0])[4]]
    batch = [info["final_info"] for info in DictInfoToList(ours).step(responses)[4]]
    for rows, said in ((infos, responses[:1]), (batch, responses)):
        table = pd.json_normalize(rows)
        assert table["response"].tolist()[-len(said) :] == said
        assert table.map(pd.api.types.is_scalar).all(axis=None)
        assert len(pd.DataFrame(rows)) == len(rows)


def test_infos_are_new_objects_each_step(tiny_dataset):
    env = InstructionVectorEnv(3, tiny_dataset, oracle=Detailed(), on_unscored="truncate", autoreset_mode="NextStep")
    env.reset(seed=0)
    arrays = [a for _ in range(3) for a in env.step(["a"] * 3)[4].values() if isinstance(a, np.ndarray)]
    assert not any(np.shares_memory(a, b) for i, a in enumerate(arrays) for b in arrays[:i])


@each_mode
def test_one_oracle_call_a_step(tiny_dataset, counting_oracle, mode):
    env = InstructionVectorEnv(512, tiny_dataset, oracle=counting_oracle, autoreset_mode=mode)
    env.reset(seed=0)
    env.step(["a"] * 512)
    assert counting_oracle.calls == [512]
    if mode is AutoresetMode.NEXT_STEP:
        assert env.step(["ignored"] * 512)[1].sum() == 0
        assert counting_oracle.calls == [512]


def group_sizes(observations, size):
    """How many different instructions each group of slots holds."""
    return [len(set(observations[i : i + size])) for i in range(0, len(observations), size)]


@each_mode
def test_num_generations_repeats_each_instruction(tiny_dataset, constant_oracle, mode):
    env = InstructionVectorEnv(12, tiny_dataset, oracle=constant_oracle, autoreset_mode=mode)
    plain, _ = env.reset(seed=0)
    grouped, infos = env.reset(seed=0, options={"num_generations": 4})
    assert group_sizes(grouped, 4) == [1, 1, 1]
    assert grouped[::4] == plain[::4]  # drawn by the first slot's stream
    assert infos["instruction_id"].tolist() == [i.id for i in grouped]
    if mode is not AutoresetMode.DISABLED:  # holds through automatic resets ...
        assert all(group_sizes(env.step([""] * 12)[0], 4) == [1, 1, 1] for _ in range(4))
    last = {"num_generations": 4, "reset_mask": np.arange(12) >= 8}
    assert all(group_sizes(env.reset(options=last)[0], 4) == [1, 1, 1] for _ in range(9))
    assert any(group_sizes(env.reset()[0], 4) != [1, 1, 1] for _ in range(5))  # ... until the next explicit one


def test_instruction_ids_are_asked_and_draw_nothing(env):
    env.reset(seed=0)
    expected, _ = env.reset()
    env.reset(seed=0)
    observations, infos = env.reset(options={"instruction_ids": [111, 100, 105, 105]})
    assert [i.id for i in observations] == infos["instruction_id"].tolist() == [111, 100, 105, 105]
    observations, _ = env.reset(options={"instruction_ids": np.array([103, 104]), "num_generations": 2})
    assert [i.id for i in observations] == [103, 103, 104, 104]
    assert env.reset()[0] == expected


@pytest.mark.parametrize(
    ("options", "error", "fact"),
    [
        *(({"num_generations": wrong}, ValueError, "num_generations") for wrong in (0, -1, 3, 5, 1.5, "2", None)),
        ({"instruction_ids": [100, 101]}, ValueError, "4 instruction_ids"),
        ({"instruction_ids": [100] * 4, "num_generations": 2}, ValueError, "2 instruction_ids"),
        ({"instruction_ids": "1000"}, ValueError, "4 instruction_ids"),
        ({"instruction_ids": [100, 101, 102, 99]}, UnknownNameError, "99"),
        ({"instruction_id": 100}, UnknownNameError, "'instruction_ids'"),
        ({"reset_mask": [True] * 4}, ValueError, r"bool .*\(4,\)"),
        ({"reset_mask": np.zeros(4, dtype=bool)}, ValueError, "reset_mask"),
        ({"reset_mask": np.array([True, True, True, False]), "num_generations": 2}, ValueError, "groups"),
    ],
)
def test_wrong_options_are_refused_and_change_nothing(env, tiny_dataset, constant_oracle, options, error, fact):
    twin = InstructionVectorEnv(4, tiny_dataset, oracle=constant_oracle)
    assert env.reset(seed=0)[0] == twin.reset(seed=0)[0]
    with pytest.raises(error, match=fact):
        env.reset(options=options)
    assert_same(env.step([""] * 4), twin.step([""] * 4))


def test_seeds_are_one_per_slot_and_shown(env):
    for wrong in ([1, 2, 3], [1] * 5, 1.5, "abcd", {1, 2, 3, 4}):
        with pytest.raises(ValueError, match="seed"):
            env.reset(seed=wrong)
    assert len(env.np_random) == 4
    env.reset(seed=40)
    assert env.np_random_seed == (40, 41, 42, 43)


@each_mode
def test_left_out_instructions_are_never_drawn(tiny_dataset, mode):
    batched, sync = pair(tiny_dataset, mode)
    kept = {100, 103, 107}
    for env in (*(single.unwrapped for single in sync.envs), batched):
        env.leave_out(id for id in range(100, 112) if id not in kept)
    seen = set()
    for step in range(20):
        if step % 2 == 0 or mode is AutoresetMode.DISABLED:
            (ours, _), (theirs, _) = (env.reset(seed=step if step else 7) for env in (batched, sync))
        else:
            ours, theirs = (env.step(["x"] * NUM_ENVS)[0] for env in (batched, sync))
        assert ours == tuple(theirs)
        seen |= {observation.id for observation in ours}
    assert seen == kept


def test_leaving_out_in_mid_stream(tiny_dataset, constant_oracle):
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
    with pytest.raises(UnknownNameError, match="99"):
        env.leave_out([99])
    with pytest.raises(DataError, match="'unlabeled' .*'tiny'"):
        env.leave_out(range(100, 112))
    assert draws(env, 20) == draws(same, 20)


@each_mode
def test_step_needs_a_reset_of_all_slots(tiny_dataset, constant_oracle, mode):
    env = InstructionVectorEnv(2, tiny_dataset, oracle=constant_oracle, autoreset_mode=mode)
    first = {"reset_mask": np.array([True, False])}
    with pytest.raises(ResetNeeded):
        env.step(["a", "b"])
    with pytest.raises(ResetNeeded):
        env.reset(options=first)
    env.reset()
    env.step(["a", "b"])
    if mode is AutoresetMode.DISABLED:
        with pytest.raises(ResetNeeded, match="2 of 2"):
            env.step(["a", "b"])
        env.reset(options=first)
        with pytest.raises(ResetNeeded, match="1 of 2"):
            env.step(["a", "b"])


@pytest.mark.parametrize(
    ("responses", "error", "fact"),
    [
        ("ab", InvalidResponseTypeError, "2 responses.*str"),
        (["a"], InvalidResponseError, "2 responses.* 1"),
        (["a", 2], InvalidResponseTypeError, "slot 1.*int: 2"),
        (["\ud800", "b"], InvalidResponseError, "slot 0.*surrogate"),
        (["a", "x" * (2**20 + 1)], InvalidResponseError, "slot 1.* 1048577"),
    ],
)
def test_wrong_responses_change_nothing(tiny_dataset, counting_oracle, responses, error, fact):
    for mode in AutoresetMode:
        env, twin = (
            InstructionVectorEnv(2, tiny_dataset, oracle=counting_oracle, autoreset_mode=mode) for _ in range(2)
        )
        env.reset(seed=0), twin.reset(seed=0)
        with pytest.raises(error, match=fact):
            env.step(responses)
        assert counting_oracle.calls == []
        assert_same(env.step(["a", "b"]), twin.step(np.array(["a", "b"], dtype=object)))
        counting_oracle.calls.clear()


@each_mode
def test_no_verdict_changes_nothing(tiny_dataset, mode):
    env = InstructionVectorEnv(50, tiny_dataset, oracle=Detailed(), autoreset_mode=mode)
    observations, _ = env.reset(seed=0)
    responses = [f"response {i}" for i in range(50)]
    with pytest.raises(UnscoredError, match=r"'detailed' .* \d+ of 50"):
        env.step(responses)
    with env.scored_by(Constant(1.0)), env.also_scored_by("detailed_score", Detailed()):
        *_, infos = env.step(responses)
    infos = infos["final_info"] if mode is AutoresetMode.SAME_STEP else infos
    assert infos["instruction_id"].tolist() == [i.id for i in observations]
    assert np.isnan(infos["detailed_score"]).any()  # a report may lack a verdict: the reward has one


def test_wrong_arguments(tiny_dataset, constant_oracle):
    for keywords, error, fact in (
        ({"autoreset_mode": "SameSteps"}, UnknownNameError, "'SameSteps'.*'SameStep'"),
        ({"split": "evl"}, UnknownNameError, "'evl'.*'eval'"),
        ({"num_envs": 0}, ValueError, "num_envs.* 0"),
    ):
        with pytest.raises(error, match=fact):
            InstructionVectorEnv(**{"num_envs": 2, "dataset": tiny_dataset, "oracle": constant_oracle, **keywords})
