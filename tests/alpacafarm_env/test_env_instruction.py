"""InstructionEnv: the contract with Gymnasium, episodes, who scores, the errors, and rendering."""

import copy
import math
import time
import warnings

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.envs.registration import EnvSpec
from gymnasium.error import ResetNeeded
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from alpacafarm_env import DataError, InvalidResponseError, InvalidResponseTypeError, UnknownNameError, UnscoredError
from alpacafarm_env.envs.instruction import InstructionEnv
from alpacafarm_env.envs.registration import IDS, TEXT_IDS, register_envs
from alpacafarm_env.envs.rendering import FRAME_SHAPE, Episode
from alpacafarm_env.envs.vector import InstructionVectorEnv
from alpacafarm_env.instructions import Instruction
from alpacafarm_env.oracles.base import Verdicts
from alpacafarm_env.spaces import MAX_TEXT_LENGTH


@pytest.fixture
def env(tiny_dataset, counting_oracle):
    return InstructionEnv(tiny_dataset, oracle=counting_oracle)


class Undecided:
    """Has no verdict until told otherwise; raises what it is told to."""

    name = "undecided"
    verdict = math.nan
    fault = None

    def judge(self, instructions, responses):
        if self.fault:
            raise self.fault
        scores = np.full(len(responses), self.verdict)
        return Verdicts(scores, {"unscored_reason": np.full(len(responses), "never judged", dtype=object)})

    def score(self, instructions, responses):
        return self.judge(instructions, responses).scores


@pytest.mark.parametrize("id", TEXT_IDS)
def test_check_env_without_a_warning(id):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(gym.make(id).unwrapped)


def test_ids_are_registered_with_json_specs():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        register_envs()
    assert all(EnvSpec.from_json(gym.spec(id).to_json()) == gym.spec(id) for id in IDS)


def test_an_episode(env, counting_oracle):
    with pytest.raises(ResetNeeded):
        env.step("too early")
    instruction, asked = env.reset(seed=0)
    assert isinstance(instruction, Instruction)
    assert asked == {"instruction_id": instruction.id, "split": "unlabeled"}
    observation, reward, terminated, truncated, info = env.step("Hello, wörld!")
    assert observation is instruction
    assert reward == len("Hello, wörld!") / 8 - len(instruction) / 64
    assert (type(reward), terminated, truncated) == (float, True, False)
    assert counting_oracle.calls == [1]
    expected = {
        **asked,
        "response": "Hello, wörld!",
        "response_length": 13,
        "oracle": "counting",
        "scored": True,
        "reward_components": {"counting": reward},
    }
    assert info == expected
    assert {key: type(value) for key, value in info.items()} == {key: type(value) for key, value in expected.items()}
    with pytest.raises(ResetNeeded):
        env.step("one too many")


def test_seeds_generators_and_copies_fix_the_instructions(env, tiny_dataset, constant_oracle):
    def ask(env, seed):
        return [env.reset(seed=seed)[0], *(env.reset()[0] for _ in range(80))]

    first = ask(env, 3)
    assert ask(env, 3) == first
    assert ask(env, 4) != first
    assert ask(InstructionEnv(tiny_dataset, oracle=constant_oracle), 3) == first
    assert set(first) == set(tiny_dataset.instructions("unlabeled"))
    twin = copy.deepcopy(env)
    assert ask(env, None) == ask(twin, None)
    for one in (env, twin):  # each in another place of its stream
        one.reset(seed=1)
        one.np_random = np.random.default_rng(8)
    assert ask(env, None) == ask(twin, None)


def test_an_instruction_can_be_chosen_and_draws_nothing(env):
    env.reset(seed=2)
    expected = env.reset()[0]
    env.reset(seed=2)
    assert env.reset(options={"instruction_id": 107})[1]["instruction_id"] == 107
    assert env.reset(options={"instruction_id": np.int64(100)})[0].id == 100
    assert env.reset()[0] == expected


@pytest.mark.parametrize(
    ("response", "error", "fact"),
    [
        (b"bytes", InvalidResponseTypeError, "bytes: b'bytes'"),
        ("ab\ud83dc", InvalidResponseError, r"'\\ud83d' at position 2"),
        ("x" * (MAX_TEXT_LENGTH + 1), InvalidResponseError, "1048576 .*1048577"),
    ],
)
def test_invalid_responses_leave_the_episode_open(env, counting_oracle, response, error, fact):
    env.reset(seed=0)
    with pytest.raises(error, match=fact):
        env.step(response)
    assert counting_oracle.calls == []
    assert env.step("now a text")[2] is True


def test_failures_leave_the_episode_open(tiny_dataset):
    oracle = Undecided()
    env = InstructionEnv(tiny_dataset, oracle=oracle)
    instruction, _ = env.reset(options={"instruction_id": 103})
    with pytest.raises(UnscoredError, match=r"'undecided' .* 1 of 1 .* 103.*never judged"):
        env.step("A response.")
    oracle.fault = OSError("endpoint unreachable")
    with pytest.raises(OSError, match="unreachable"):
        env.step("A response.")
    oracle.fault, oracle.verdict = None, 0.25
    assert env.step("A response.")[:3] == (instruction, 0.25, True)


def test_the_outermost_oracle_decides_within_its_context(tiny_dataset, make_counting_oracle):
    outer, inner = make_counting_oracle("outer"), make_counting_oracle("inner")
    env = InstructionEnv(tiny_dataset, oracle="surrogate")  # a data set without one: building it would raise
    env.reset()
    with env.scored_by(outer), env.scored_by(inner):
        *_, info = env.step("A response.")
    assert (info["oracle"], outer.calls, inner.calls) == ("outer", [1], [])
    env.reset()
    with pytest.raises(ZeroDivisionError), env.scored_by(outer):
        raise ZeroDivisionError
    with pytest.raises(DataError, match="surrogate"):
        env.step("A response.")


@pytest.mark.parametrize("key", ["response", "episode", "_private", "taken", "response_tokens", "response_truncated"])
def test_a_detail_needs_a_key_of_its_own(tiny_dataset, counting_oracle, key):
    class Nosy(Undecided):
        def judge(self, instructions, responses):
            return Verdicts(np.zeros(len(responses)), {key: np.zeros(len(responses))})

    env = InstructionEnv(tiny_dataset, oracle=Nosy())
    env.reset()
    with env.also_scored_by("taken", counting_oracle), pytest.raises(ValueError, match=f"'undecided'.*'{key}'"):
        env.step("A response.")


@pytest.mark.parametrize(
    ("keywords", "closest"),
    [
        ({"split": "evel"}, "'evel'.*'eval'"),
        ({"render_mode": "asni"}, "'asni'.*'ansi'"),
        ({"on_unscored": "truncated"}, "'truncated'.*'truncate'"),
        ({"dataset": "sandbocks"}, "'sandbocks'.*'sandbox'"),
    ],
)
def test_unknown_names_are_answered_with_the_closest(tiny_dataset, constant_oracle, keywords, closest):
    with pytest.raises(UnknownNameError, match=closest):
        InstructionEnv(**{"dataset": tiny_dataset, "oracle": constant_oracle, **keywords})


def test_unknown_options_and_ids(env):
    with pytest.raises(UnknownNameError, match="'instruction_ids'.*'instruction_id'"):
        env.reset(options={"instruction_ids": [1]})
    for wrong in (7, "107", None, 100.0):
        with pytest.raises(UnknownNameError, match=f"{wrong!r}: .* 12 .* 100 or 111"):
            env.reset(options={"instruction_id": wrong})


def test_empty_splits_and_repeated_ids_are_data_errors(tiny_dataset, constant_oracle):
    tiny_dataset._instructions["val"] = ()
    with pytest.raises(DataError, match="'val' .*'tiny'"):
        InstructionEnv(tiny_dataset, "val", constant_oracle)
    tiny_dataset._instructions["val"] = (Instruction("a"), Instruction("b"))
    env = InstructionEnv(tiny_dataset, "val", constant_oracle)
    env.reset()  # drawing needs no ids
    with pytest.raises(DataError, match="0 and 1 .*'val' .* id -1"):
        env.reset(options={"instruction_id": -1})


@pytest.fixture
def make(tiny_dataset, counting_oracle):
    return lambda mode: InstructionEnv(tiny_dataset, oracle=counting_oracle, render_mode=mode)


@pytest.fixture
def make_batch(tiny_dataset, counting_oracle):
    return lambda mode, autoreset="SameStep": InstructionVectorEnv(
        2, tiny_dataset, oracle=counting_oracle, render_mode=mode, autoreset_mode=autoreset
    )


def is_frame(frame):
    return isinstance(frame, np.ndarray) and (frame.shape, frame.dtype) == (FRAME_SHAPE, np.uint8)


def all_differ(frames):
    return all((a != b).any() for i, a in enumerate(frames) for b in frames[:i])


def test_ansi_rendering_returns_the_episode_so_far(make, capsys):
    env = make(None)
    env.reset()
    with pytest.warns(UserWarning, match="render_mode"):
        assert env.render() is None
    env = make("ansi")
    with pytest.raises(ResetNeeded):
        env.render()
    instruction, _ = env.reset()
    assert instruction in env.render()
    reward = env.step("My 🙂 response")[1]
    assert all(part in env.render() for part in (instruction, "My 🙂 response", "counting", f"{reward:.4f}"))
    env.reset()
    assert "My 🙂 response" not in env.render()
    assert capsys.readouterr().out == ""


def test_human_rendering_prints_by_itself(make, make_batch, capsys):
    env = make("human")
    instruction, _ = env.reset()
    assert instruction in capsys.readouterr().out
    env.step("My response")
    assert "My response" in capsys.readouterr().out
    assert env.render() is None
    assert "My response" in capsys.readouterr().out
    batch = make_batch("human")
    batch.reset()
    batch.step(["first response", "second response"])
    assert "second response" in capsys.readouterr().out


@pytest.mark.parametrize("mode", list(AutoresetMode))
@pytest.mark.parametrize("render_mode", ["ansi", "rgb_array"])
def test_batched_rendering_equals_sync(make, make_batch, mode, render_mode):
    ours = make_batch(render_mode, mode)
    theirs = SyncVectorEnv([lambda: make(render_mode)] * 2, autoreset_mode=mode)
    with pytest.raises(ResetNeeded):
        ours.render()
    for env in (ours, theirs):
        env.reset(seed=3)
    for _ in range(3):
        frames, expected = ours.render(), theirs.render()
        assert type(frames) is type(expected) is tuple
        np.testing.assert_array_equal(frames, expected)
        for env in (ours, theirs):
            env.step(["one", "another one"])
            if mode is AutoresetMode.DISABLED:
                env.reset()


def test_a_frame_shows_instruction_response_and_reward():
    said = ("Name a colour.", "Red.")
    scored = Episode(*said, 0.5, "gold").frame()
    unscored = Episode(*said, math.nan, "gold")
    others = (Episode(*said[:1]), Episode(*said), Episode(*said, 0.75, "gold"), unscored)
    assert all_differ([scored, *(episode.frame() for episode in others)])
    assert "no verdict" in unscored.text()
    np.testing.assert_array_equal(scored, Episode(*said, 0.5, "gold").frame())


@pytest.mark.parametrize("text", ["", "x" * 2**20, "line\n" * 500, "日本語 🙂 \t\r\x00\u2028 é"], ids=len)
def test_any_text_fits_into_a_frame(text):
    start = time.process_time()
    frame, longer = Episode(text, text, 1.0, "gold").frame(), Episode(text, text + "!", 1.0, "gold").frame()
    assert time.process_time() - start < 2
    assert is_frame(frame)
    assert all_differ([frame, longer, Episode(text, text).frame()])
    ink = np.argwhere((frame != 255).any(axis=2))
    assert (ink >= 5).all()
    assert (ink < (FRAME_SHAPE[0] - 5, FRAME_SHAPE[1] - 5)).all()  # nothing runs over the edge


def test_accents_greek_and_cyrillic_are_drawn():
    box = Episode("\U0010fffe").frame()
    assert [letter for letter in "éßč–€≤→βж" if not (Episode(letter).frame() != box).any()] == []


def test_the_token_environment_shows_the_response_so_far():
    env = gym.make("AlpacaFarm-Token-v0", oracle="constant", render_mode="rgb_array", disable_env_checker=True)
    env.reset(seed=0)
    tokens = env.unwrapped.tokenizer("A rose is red.")["input_ids"]
    frames = [env.render()]
    for token in [*tokens[:3], env.unwrapped.eos_token_id]:
        env.step(token)
        frames.append(env.render())
    assert all_differ(frames)
    env.reset(seed=0)
    np.testing.assert_array_equal(env.render(), frames[0])
