"""The wrappers of the matrix: keywords with which each does something, and how to see that it did."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import torch

from alpacafarm_env.envs.registration import TEXT_IDS
from alpacafarm_env.envs.rendering import FRAME_SHAPE


class Moment(NamedTuple):
    """What a reset or a step returns, of a batch's first slot; the reward of a reset is NaN."""

    observation: Any
    reward: float
    ended: bool
    info: dict[str, Any]
    frames: Any


class Run(NamedTuple):
    """Episodes with the wrapper, and the same ones without it."""

    env: Any
    found: list[Moment]
    plain: list[Moment]
    id: str


class Case(NamedTuple):
    """A wrapper's keywords, and whether it did what it is for."""

    keywords: Mapping[str, Any]
    worked: Callable[[Run], bool]
    render_mode: str | None = None


def equal(found: Any, expected: Any) -> bool:
    try:
        np.testing.assert_equal(found, expected)
    except AssertionError:
        return False
    return True


def observed(moments: list[Moment]) -> list[Any]:
    return [moment.observation for moment in moments]


def rewards(moments: list[Moment]) -> list[float]:
    return [moment.reward for moment in moments]


def at_the_end(moments: list[Moment], key: str) -> list[Any]:
    return [moment.info[key] for moment in moments if moment.ended]


def same(run: Run) -> bool:
    return equal([moment[:3] for moment in run.found], [moment[:3] for moment in run.plain])


def never(run: Run) -> bool:
    """Of a wrapper that has nothing to do here: it is to refuse."""
    return False


# Observations


def observes(change: Callable[[Any], Any]) -> Callable[[Run], bool]:
    return lambda run: equal(observed(run.found), [change(each) for each in observed(run.plain)])


def louder(observation: Any) -> Any:
    if isinstance(observation, tuple):
        return tuple(map(louder, observation))
    return observation.upper() if isinstance(observation, str) else {key: 2 * observation[key] for key in observation}


def flattens(run: Run) -> bool:
    inner = run.env.env
    space = inner.single_observation_space if isinstance(inner, gym.vector.VectorEnv) else inner.observation_space
    return equal(observed(run.found), [gym.spaces.flatten(space, each) for each in observed(run.plain)])


def delays(run: Run) -> bool:
    """By a step; nothing is seen at a reset."""
    seen, last = [], None
    for moment in run.plain:
        seen.append(last if moment.reward == moment.reward else None)
        last = moment.observation
    found = [
        each if np.any(each if isinstance(each, str) else each["input_ids"]) else None for each in observed(run.found)
    ]
    return equal(found, seen)


def stacks(run: Run) -> bool:
    """The last observation and this one; after a reset this one twice."""
    for before, moment, found in zip([None, *run.plain], run.plain, observed(run.found), strict=False):
        pair = [moment if before is None or moment.reward != moment.reward else before, moment]
        parts = [{key: found[key][i] for key in found} for i in (0, 1)] if isinstance(found, dict) else list(found)
        if not equal(parts, observed(pair)):
            return False
    return True


def converts(kind: type) -> Callable[[Run], bool]:
    """To arrays of a kind; texts stay what they were."""

    def worked(run: Run) -> bool:
        arrays = run.id in TEXT_IDS or all(isinstance(each["input_ids"], kind) for each in observed(run.found))
        texts = [at_the_end(moments, key) for key in ("split", "response") for moments in (run.found, run.plain)]
        return arrays and equal(observed(run.found), observed(run.plain)) and texts[0::2] == texts[1::2]

    return worked


# Actions


def shout(action: Any) -> Any:
    """Another text, another token."""
    if isinstance(action, list):
        return list(map(shout, action))
    return action.upper() if isinstance(action, str) else action + (action == 5)


def shouts(run: Run) -> bool:
    found, responses = at_the_end(run.found, "response"), at_the_end(run.plain, "response")
    if run.id in TEXT_IDS:
        return found == [text.upper() for text in responses]
    return found == [run.env.unwrapped.tokenizer.decode([6, 9])] * len(responses) != responses


def repeats(run: Run) -> bool:
    """The first token; an episode of one response repeats nothing."""
    if run.id in TEXT_IDS:
        return same(run)
    twice = run.env.unwrapped.tokenizer.decode([5, 5])
    return all(text.startswith(twice) for text in at_the_end(run.found, "response"))


# Rewards


def pays(change: Callable[[float], float]) -> Callable[[Run], bool]:
    return lambda run: equal(rewards(run.found), [change(each) for each in rewards(run.plain)])


def normalizes(run: Run) -> bool:
    """Other numbers of the same sign; nothing stays nothing."""
    found, expected = rewards(run.found), rewards(run.plain)
    return equal(np.sign(found), np.sign(expected)) and (not np.nansum(np.abs(expected)) or not equal(found, expected))


def counts(run: Run) -> bool:
    sums = [episode["r"] for episode in at_the_end(run.found, "episode")]
    return same(run) and np.allclose(sums, [moment.reward for moment in run.plain if moment.ended])


def decides(run: Run) -> bool:
    """Its oracle alone, whose rewards are numbers."""
    told = at_the_end(run.found, "oracle")
    ended = [moment.reward for moment in run.found if moment.ended]
    return told == [run.env.oracle.name] * 2 and bool(np.isfinite(ended).all())


def adds(run: Run) -> bool:
    return same(run) and bool(np.isfinite(at_the_end(run.found, "gold_reward")).all())


# Episodes and pictures


def cuts(run: Run) -> bool:
    """After each step."""
    return all(moment.ended for moment in run.found if moment.reward == moment.reward)


def resets(run: Run) -> bool:
    """By the step after the end."""
    _, reward, terminated, truncated, info = run.env.step(None)
    return same(run) and not (reward or terminated or truncated or "response" in info)


def guards(run: Run) -> bool:
    try:
        type(run.env)(run.env.unwrapped).step(None)
    except gym.error.ResetNeeded:
        return same(run)
    return False


def lists(run: Run) -> bool:
    return same(run) and isinstance(run.env.reset()[1], list)


def pictures(run: Run) -> bool:
    return all(each.shape == FRAME_SHAPE for each in observed(run.found))


def spoils(run: Run) -> bool:
    return same(run) and not equal(run.env.render(), run.env.env.render())


def collects(run: Run) -> bool:
    return same(run) and all(moment.frames[0].shape == FRAME_SHAPE for moment in run.found)


def records(run: Run) -> bool:
    run.env.close()
    return same(run) and any(path.stat().st_size > 1000 for path in Path(run.env.video_folder).glob("*.mp4"))


def shows(run: Run) -> bool:
    return same(run) and run.env.window is not None


DOUBLE = {"func": lambda reward: 2 * reward}
LOUDER = {"func": louder, "observation_space": None}
SHOUT = {"func": shout, "action_space": None}
BOTH = {
    "FilterObservation": Case({"filter_keys": ["input_ids"]}, observes(lambda each: {"input_ids": each["input_ids"]})),
    "FlattenObservation": Case({}, flattens),
    "GrayscaleObservation": Case({}, never),
    "ResizeObservation": Case({"shape": (8, 8)}, never),
    "ReshapeObservation": Case({"shape": (2, 128)}, never),
    "RescaleObservation": Case({"min_obs": np.float32(0), "max_obs": np.float32(1)}, never),
    "DtypeObservation": Case({"dtype": np.float32}, never),
    "NormalizeObservation": Case({}, never),
    "TransformObservation": Case(LOUDER, observes(louder)),
    "TransformAction": Case(SHOUT, shouts),
    "ClipAction": Case({}, never),
    "RescaleAction": Case({"min_action": np.float32(-1), "max_action": np.float32(1)}, never),
    "TransformReward": Case(DOUBLE, pays(lambda reward: 2 * reward)),
    "ClipReward": Case({"min_reward": 0.1, "max_reward": 0.2}, pays(lambda reward: float(np.clip(reward, 0.1, 0.2)))),
    "NormalizeReward": Case({}, normalizes),
    "RecordEpisodeStatistics": Case({}, counts),
    "RecordVideo": Case({"video_folder": ""}, records, "rgb_array"),
    "HumanRendering": Case({}, shows, "rgb_array"),
    "ArrayConversion": Case({"env_xp": np, "target_xp": torch}, converts(torch.Tensor)),
    "JaxToNumpy": Case({}, converts(np.ndarray)),
    "JaxToTorch": Case({}, converts(torch.Tensor)),
    "NumpyToTorch": Case({}, converts(torch.Tensor)),
}
SINGLE = {
    **BOTH,
    "AtariPreprocessing": Case({}, never),
    "DelayObservation": Case({"delay": 1}, delays),
    "DiscretizeObservation": Case({"bins": 4}, never),
    "FrameStackObservation": Case({"stack_size": 2}, stacks),
    "MaxAndSkipObservation": Case({"skip": 2}, never),
    "AddRenderObservation": Case({}, pictures, "rgb_array"),
    "TimeAwareObservation": Case({}, never),
    "DiscretizeAction": Case({"bins": 4}, never),
    "StickyAction": Case({"repeat_action_probability": 0.999}, repeats),
    "RepeatAction": Case({"num_repeats": 2}, repeats),
    "TimeLimit": Case({"max_episode_steps": 1}, cuts),
    "Autoreset": Case({}, resets),
    "PassiveEnvChecker": Case({}, same),
    "OrderEnforcing": Case({}, guards),
    "AddWhiteNoise": Case({"probability_of_noise_per_pixel": 0.5}, spoils, "rgb_array"),
    "ObstructView": Case({"obstructed_pixels_ratio": 0.5, "obstruction_width": 4}, spoils, "rgb_array"),
    "RenderCollection": Case({}, collects, "rgb_array"),
}
BATCHED = {
    **BOTH,
    "VectorizeTransformObservation": Case({"wrapper": gym.wrappers.TransformObservation, **LOUDER}, observes(louder)),
    "VectorizeTransformAction": Case({"wrapper": gym.wrappers.TransformAction, **SHOUT}, shouts),
    "VectorizeTransformReward": Case(
        {"wrapper": gym.wrappers.TransformReward, **DOUBLE}, pays(lambda reward: 2 * reward)
    ),
    "DictInfoToList": Case({}, lists),
}
OURS = {
    "SurrogateReward": Case({}, decides),
    "EnsembleReward": Case({"oracles": ["gold", "constant"]}, decides),
    "AnnotatorReward": Case({}, decides),
    "WinRateReward": Case({}, decides),
    "GoldReward": Case({}, decides),
    "AddScore": Case({}, adds),
}
