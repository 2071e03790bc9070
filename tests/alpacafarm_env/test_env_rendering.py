"""Rendering: the episode as text and as a picture, single, batched and token by token, and in whom it is used by."""

import math
import time

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.error import ResetNeeded
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from stable_baselines3 import PPO

from alpacafarm_env.envs.instruction import InstructionEnv
from alpacafarm_env.envs.rendering import FRAME_SHAPE, Episode
from alpacafarm_env.envs.vector import InstructionVectorEnv


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


def test_rendering_without_a_mode_warns(make):
    env = make(None)
    env.reset()
    with pytest.warns(UserWarning, match="render_mode"):
        assert env.render() is None


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


@pytest.mark.parametrize(
    "text", ["", "word " * 10_000, "x" * 2**20, "line\n" * 500, "日本語 🙂 \t\r\x00\u2028 é", "\n" * 300], ids=len
)
def test_any_text_fits_and_its_end_and_its_reward_are_seen(text):
    start = time.process_time()
    frame, longer = Episode(text, text, 1.0, "gold").frame(), Episode(text, text + "!", 1.0, "gold").frame()
    assert time.process_time() - start < 2
    assert is_frame(frame)
    assert all_differ([frame, longer, Episode(text, text).frame()])
    ink = np.argwhere((frame != 255).any(axis=2))
    assert (ink >= 5).all()
    assert (ink < (FRAME_SHAPE[0] - 5, FRAME_SHAPE[1] - 5)).all()  # nothing runs over the edge


def test_letters_with_accents_greek_and_cyrillic_are_no_boxes():
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


def test_stable_baselines3_takes_the_id_and_its_frames():
    agent = PPO("MultiInputPolicy", "AlpacaFarm-Token-v0", n_steps=4, batch_size=4, n_epochs=1, device="cpu", seed=0)
    agent.learn(4)
    assert is_frame(agent.get_env().get_images()[0])
