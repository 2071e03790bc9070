"""Rendering: the episode as text and as a picture, single, batched and token by token, and in whom it is used by."""

import math
import time

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.error import ResetNeeded
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import AddRenderObservation, RecordVideo, RenderCollection
from stable_baselines3 import PPO
from stable_baselines3.common.env_util import make_vec_env

from alpacafarm_env.envs.instruction import InstructionEnv
from alpacafarm_env.envs.registration import IDS, TEXT_IDS
from alpacafarm_env.envs.rendering import FRAME_SHAPE, Episode
from alpacafarm_env.envs.vector import InstructionVectorEnv

WHITE = 255


def is_frame(frame):
    return isinstance(frame, np.ndarray) and (frame.shape, frame.dtype) == (FRAME_SHAPE, np.uint8)


def differ(one, other):
    return bool((one != other).any())


# --- Modes -----------------------------------------------------------------------------------------------------------


def test_ansi_rendering_returns_the_episode_so_far(tiny_dataset, constant_oracle, capsys):
    env = InstructionEnv(tiny_dataset, oracle=constant_oracle, render_mode="ansi")
    with pytest.raises(ResetNeeded):
        env.render()
    instruction, _ = env.reset()
    assert instruction in env.render()
    env.step("My 🙂 response")
    for part in (instruction, "My 🙂 response", "constant", "0.5000"):
        assert part in env.render()
    env.reset()
    assert "My 🙂 response" not in env.render()
    assert capsys.readouterr().out == ""


def test_human_rendering_prints_by_itself(tiny_dataset, constant_oracle, capsys):
    env = InstructionEnv(tiny_dataset, oracle=constant_oracle, render_mode="human")
    instruction, _ = env.reset()
    assert instruction in capsys.readouterr().out
    env.step("My response")
    assert "My response" in capsys.readouterr().out
    assert env.render() is None
    assert "My response" in capsys.readouterr().out


def test_rendering_without_a_mode_warns(tiny_dataset, constant_oracle):
    env = InstructionEnv(tiny_dataset, oracle=constant_oracle)
    env.reset()
    with pytest.warns(UserWarning, match="render_mode"):
        assert env.render() is None


def test_batched_rendering(tiny_dataset, constant_oracle, capsys):
    env = InstructionVectorEnv(2, tiny_dataset, oracle=constant_oracle, render_mode="ansi", autoreset_mode="Disabled")
    with pytest.raises(ResetNeeded):
        env.render()
    observations, _ = env.reset()
    env.step(["first response", "second response"])
    frames = env.render()
    assert [observations[i] in frames[i] and "0.5000" in frames[i] for i in range(2)] == [True, True]
    assert "second response" in frames[1]
    assert capsys.readouterr().out == ""
    human = InstructionVectorEnv(2, tiny_dataset, oracle=constant_oracle, render_mode="human")
    human.reset()
    human.step(["first response", "second response"])
    assert "second response" in capsys.readouterr().out


@pytest.mark.parametrize("mode", list(AutoresetMode))
@pytest.mark.parametrize("render_mode", ["ansi", "rgb_array"])
def test_batched_rendering_equals_sync(tiny_dataset, constant_oracle, mode, render_mode):
    keywords = {"dataset": tiny_dataset, "oracle": constant_oracle, "render_mode": render_mode}
    ours = InstructionVectorEnv(2, **keywords, autoreset_mode=mode)
    theirs = SyncVectorEnv([lambda: InstructionEnv(**keywords)] * 2, autoreset_mode=mode)
    for env in (ours, theirs):
        env.reset(seed=3)
    for _ in range(3):
        frames, expected = ours.render(), theirs.render()
        assert type(frames) is type(expected) is tuple
        np.testing.assert_array_equal(frames, expected)
        for env in (ours, theirs):
            env.step(["one", "two"])
            if mode is AutoresetMode.DISABLED:
                env.reset()


@pytest.mark.parametrize("id", IDS)
def test_every_id_draws_a_frame(id):
    env = gym.make(id, oracle="constant", render_mode="rgb_array")
    assert "rgb_array" in env.metadata["render_modes"]
    env.reset(seed=0)
    asked = env.render()
    env.step(env.unwrapped.eos_token_id if "Token" in id else "A response.")
    assert is_frame(asked)
    assert is_frame(env.render())
    assert differ(asked, env.render())


@pytest.mark.parametrize("id", TEXT_IDS)
def test_every_batch_draws_a_tuple_of_frames(id):
    envs = gym.make_vec(id, num_envs=3, oracle="constant", render_mode="rgb_array")
    envs.reset(seed=0)
    frames = envs.render()
    assert isinstance(frames, tuple)
    assert [is_frame(frame) for frame in frames] == [True] * 3
    assert differ(frames[0], frames[1])


# --- The picture -----------------------------------------------------------------------------------------------------


def test_a_frame_shows_instruction_response_and_reward():
    asked = Episode("Name a colour.").frame()
    answered = Episode("Name a colour.", "Red.").frame()
    scored = Episode("Name a colour.", "Red.", 0.5, "gold").frame()
    other = Episode("Name a colour.", "Red.", 0.75, "gold").frame()
    unscored = Episode("Name a colour.", "Red.", math.nan, "gold").frame()
    frames = [asked, answered, scored, other, unscored]
    assert all(differ(a, b) for i, a in enumerate(frames) for b in frames[:i])
    assert "no verdict" in Episode("", "", math.nan).text()
    assert not differ(scored, Episode("Name a colour.", "Red.", 0.5, "gold").frame())


@pytest.mark.parametrize(
    "text", ["", "word " * 10_000, "x" * 2**20, "line\n" * 500, "日本語 🙂 \t\r\x00\u2028 é", "\n" * 300], ids=len
)
def test_any_text_fits_and_its_end_is_seen(text):
    start = time.process_time()
    frame, longer = Episode(text, text, 1.0, "gold").frame(), Episode(text, text + "!", 1.0, "gold").frame()
    assert time.process_time() - start < 2
    assert is_frame(frame)
    assert differ(frame, longer)
    height, width, _ = FRAME_SHAPE
    ink = np.argwhere((frame != WHITE).any(axis=2))
    assert (ink >= 5).all()
    assert (ink < (height - 5, width - 5)).all()  # nothing runs over the edge
    without = Episode(text, text).frame()
    assert differ(frame, without)  # the reward is seen beside any text


def test_letters_with_accents_greek_and_cyrillic_are_no_boxes():
    box = Episode("\U0010fffe").frame()
    for letter in "éßč–€≤→βж":
        assert differ(Episode(letter).frame(), box), letter


# --- Who uses it -----------------------------------------------------------------------------------------------------


def test_the_token_environment_shows_the_response_so_far():
    env = gym.make("AlpacaFarm-Token-v0", oracle="constant", render_mode="rgb_array", disable_env_checker=True)
    env.reset(seed=0)
    tokens = env.unwrapped.tokenizer("A rose is red.")["input_ids"]
    frames = [env.render()]
    for token in [*tokens[:3], env.unwrapped.eos_token_id]:
        env.step(token)
        frames.append(env.render())
    assert all(differ(a, b) for i, a in enumerate(frames) for b in frames[:i])
    env.reset(seed=0)
    assert not differ(env.render(), frames[0])


@pytest.mark.parametrize("make", [lambda: make_vec_env("AlpacaFarm-Token-v0", n_envs=2), lambda: "AlpacaFarm-Token-v0"])
def test_stable_baselines3_takes_the_id(make):
    agent = PPO("MultiInputPolicy", make(), n_steps=4, batch_size=4, n_epochs=1, device="cpu", seed=0)
    agent.learn(4)
    assert is_frame(agent.get_env().get_images()[0])


def test_gymnasiums_wrappers_of_frames(tiny_dataset, constant_oracle):
    def make():
        return InstructionEnv(tiny_dataset, oracle=constant_oracle, render_mode="rgb_array")

    env = AddRenderObservation(make())
    observation, _ = env.reset(seed=0)
    assert is_frame(observation)
    assert observation in env.observation_space
    env = RenderCollection(make())
    env.reset(seed=0)
    env.step("A response.")
    assert [is_frame(frame) for frame in env.render()] == [True, True]


def test_gymnasium_records_videos(tiny_dataset, constant_oracle, tmp_path):
    pytest.importorskip("moviepy")
    env = InstructionEnv(tiny_dataset, oracle=constant_oracle, render_mode="rgb_array")
    env = RecordVideo(env, str(tmp_path / "videos"), episode_trigger=lambda episode: True)
    env.reset(seed=0)
    env.step("A response.")
    env.close()
    assert [path.stat().st_size > 0 for path in tmp_path.rglob("*.mp4")] == [True]
