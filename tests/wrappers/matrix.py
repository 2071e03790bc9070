"""Every wrapper of Gymnasium's and of ours over every id, single and batched: does it work, and if not, what is said?

    python tests/wrappers/matrix.py > docs/wrappers/matrix.md

prints the page, with the package installed and, beside it, what some of Gymnasium's wrappers need:
`pip install array-api-compat jax moviepy opencv-python-headless pygame`.
"""

import functools
import linecache
import os
import tempfile
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import torch
from gymnasium.error import DependencyNotInstalled
from gymnasium.vector import AutoresetMode, VectorEnv

from alpacafarm_env import wrappers
from alpacafarm_env.envs.registration import IDS, TEXT_IDS

MODES: dict[str, tuple[AutoresetMode | None, ...]] = {"single": (None,), "batched": tuple(AutoresetMode)}
TEXTS = ("A lion is brave, golden and proud.", "- one\n- two\n- three")
SLOTS = 2


class Moment(NamedTuple):
    """What a reset or a step returns, of a batch's first slot; the reward of a reset is NaN."""

    observation: Any
    reward: float
    ended: bool
    info: dict[str, Any]


class Case(NamedTuple):
    """A wrapper's keywords, and what it changes; everything else must stay what it is without the wrapper."""

    keywords: Mapping[str, Any] = {}
    changes: str = ""
    """A part of `parts`, "" for none. Another response changes all that follows from it, and so does another end."""
    render_mode: str | None = None

    @property
    def does_something(self) -> bool:
        """Our rewards need not: over an environment that has the same one already they change nothing."""
        return bool(self.changes) and self not in OURS.values()


def louder(observation: Any) -> Any:
    if isinstance(observation, tuple):
        return tuple(map(louder, observation))
    return observation.upper() if isinstance(observation, str) else {key: 2 * observation[key] for key in observation}


def shout(action: Any) -> Any:
    """Another text, another token."""
    if isinstance(action, list):
        return list(map(shout, action))
    return action.upper() if isinstance(action, str) else action + (action == 5)


LOUDER = {"func": louder, "observation_space": None}
SHOUT = {"func": shout, "action_space": None}
DOUBLE = {"func": lambda reward: 2 * reward}
BOTH = {
    "FilterObservation": Case({"filter_keys": ["input_ids"]}, "observation"),
    "FlattenObservation": Case({}, "observation"),
    "GrayscaleObservation": Case(),
    "ResizeObservation": Case({"shape": (8, 8)}),
    "ReshapeObservation": Case({"shape": (2, 128)}),
    "RescaleObservation": Case({"min_obs": np.float32(0), "max_obs": np.float32(1)}),
    "DtypeObservation": Case({"dtype": np.float32}),
    "NormalizeObservation": Case(),
    "TransformObservation": Case(LOUDER, "observation"),
    "TransformAction": Case(SHOUT, "response"),
    "ClipAction": Case(),
    "RescaleAction": Case({"min_action": np.float32(-1), "max_action": np.float32(1)}),
    "TransformReward": Case(DOUBLE, "reward"),
    "ClipReward": Case({"min_reward": 0.1, "max_reward": 0.2}, "reward"),
    "NormalizeReward": Case({}, "reward"),
    "RecordEpisodeStatistics": Case(),
    "RecordVideo": Case({"video_folder": ""}, "", "rgb_array"),
    "HumanRendering": Case({}, "", "rgb_array"),
    "ArrayConversion": Case({"env_xp": np, "target_xp": torch}),
    "JaxToNumpy": Case(),
    "JaxToTorch": Case(),
    "NumpyToTorch": Case(),
}
SINGLE = {
    **BOTH,
    "AtariPreprocessing": Case(),
    "DelayObservation": Case({"delay": 1}, "observation"),
    "DiscretizeObservation": Case({"bins": 4}),
    "FrameStackObservation": Case({"stack_size": 2}, "observation"),
    "MaxAndSkipObservation": Case({"skip": 2}),
    "AddRenderObservation": Case({}, "observation", "rgb_array"),
    "TimeAwareObservation": Case(),
    "DiscretizeAction": Case({"bins": 4}),
    "StickyAction": Case({"repeat_action_probability": 0.999}, "response"),
    "RepeatAction": Case({"num_repeats": 2}, "response"),
    "TimeLimit": Case({"max_episode_steps": 1}, "episodes"),
    "Autoreset": Case(),
    "PassiveEnvChecker": Case(),
    "OrderEnforcing": Case(),
    "AddWhiteNoise": Case({"probability_of_noise_per_pixel": 0.5}, "", "rgb_array"),
    "ObstructView": Case({"obstructed_pixels_ratio": 0.5, "obstruction_width": 4}, "", "rgb_array"),
    "RenderCollection": Case({}, "", "rgb_array"),
}
BATCHED = {
    **BOTH,
    "VectorizeTransformObservation": Case({"wrapper": gym.wrappers.TransformObservation, **LOUDER}, "observation"),
    "VectorizeTransformAction": Case({"wrapper": gym.wrappers.TransformAction, **SHOUT}, "response"),
    "VectorizeTransformReward": Case({"wrapper": gym.wrappers.TransformReward, **DOUBLE}, "reward"),
    "DictInfoToList": Case(),
}
OURS = {
    "SurrogateReward": Case({"oracle": {"name": "constant", "value": 3}}, "reward"),
    "EnsembleReward": Case({"oracles": ["gold", {"name": "constant", "value": 99}]}, "reward"),
    "AnnotatorReward": Case({}, "reward"),
    "WinRateReward": Case({}, "reward"),
    "GoldReward": Case({}, "reward"),
    "AddScore": Case(),
    "RewardAudit": Case({"seconds": {"other": "constant"}}),
}
CASES = {"single": SINGLE, "batched": BATCHED}


def make(id: str, mode: AutoresetMode | None, render_mode: str | None = None) -> Any:
    if mode is None:
        return gym.make(id, render_mode=render_mode)
    return gym.make_vec(id, num_envs=SLOTS, render_mode=render_mode, autoreset_mode=mode)


@functools.cache
def tokens() -> tuple[int, ...]:
    """A response of two words."""
    return 5, 9, make("AlpacaFarm-Token-v0", None).unwrapped.eos_token_id


def first(batch: Any) -> Any:
    """The first slot's part of observations, infos or numbers; what ended is in its info."""
    if not isinstance(batch, Mapping):
        return batch[0]
    named = {key: first(value) for key, value in batch.items() if not key.startswith(("_", "final_"))}
    return named | (first(batch["final_info"]) if "final_info" in batch else {})


def moments(env: Any, id: str, rendered: bool) -> Iterator[Moment]:
    """Two episodes; every slot of a batch is given the same answers."""
    batched = isinstance(env, VectorEnv)
    mode = env.metadata["autoreset_mode"] if batched else AutoresetMode.DISABLED
    pick = first if batched else lambda value: value
    returned, step, done = env.reset(seed=0), 0, 0
    while True:
        observation, *outcome, info = returned
        reward, *ends = map(pick, outcome) if outcome else (np.nan, False)
        yield Moment(pick(observation), float(reward), any(ends), pick(info))
        if rendered:
            assert env.render() is not None
        done += any(ends)
        if done == len(TEXTS):
            return
        if any(ends):
            step = -1 if mode is AutoresetMode.NEXT_STEP else 0  # whose next step only resets
        if any(ends) and mode is AutoresetMode.DISABLED:
            returned = env.reset()
            continue
        action = TEXTS[done] if id in TEXT_IDS else tokens()[min(step, 2)]
        many = [action] * SLOTS if id in TEXT_IDS else np.full(SLOTS, action)
        returned, step = env.step(many if batched else action), step + 1


@functools.cache
def plain(id: str, mode: AutoresetMode | None) -> list[Moment]:
    return list(moments(make(id, mode), id, rendered=False))


def parts(seen: Sequence[Moment]) -> dict[str, Any]:
    """What a wrapper may change, or must not: texts, too, that pass through conversions of arrays."""
    ends = [moment.info.get("final_info", moment.info) for moment in seen if moment.ended]
    return {
        "observation": [moment.observation for moment in seen],
        "reward": [moment.reward for moment in seen],
        "episodes": [moment.ended for moment in seen],
        "response": [(info.get("split"), info.get("response")) for info in ends],
    }


def works(case: Case, seen: Sequence[Moment], expected: Sequence[Moment]) -> bool:
    """Whether a wrapper changes what it is there to change, and nothing else."""
    if case.changes in ("response", "episodes"):  # which a text environment may not show: it ends at once
        return True
    before, after = parts(expected), parts(seen)
    if case.does_something and equal(after[case.changes], before[case.changes]):
        return False
    return all(part == case.changes or equal(values, before[part]) for part, values in after.items())


def equal(values: Any, expected: Any) -> bool:
    try:
        np.testing.assert_equal(values, expected)
    except (AssertionError, TypeError, ValueError):
        return False
    return True


def verdict_of(error: Exception) -> str:
    """In words is what a `raise` of Gymnasium's or ours says."""
    if isinstance(error, (DependencyNotInstalled, ImportError)):
        return "needs a package"
    last = traceback.extract_tb(error.__traceback__)[-1]
    ours = not {"gymnasium", "alpacafarm_env", "wrappers"}.isdisjoint(Path(last.filename).parts)
    raised = linecache.getline(last.filename, last.lineno or 0).split()[:1] == ["raise"]
    return "refuses" if ours and raised and str(error) else "fails"


def cell(name: str, case: Case, id: str, mode: AutoresetMode | None) -> str:
    """One wrapper over one id: works, refuses (in words), needs a package, fails (in any other way) or does wrong."""
    space = wrappers if name in OURS else gym.wrappers
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        keywords = {**case.keywords, **({"video_folder": folder} if name == "RecordVideo" else {})}
        env = make(id, mode, case.render_mode)
        try:
            env = getattr(space if mode is None else space.vector, name)(env, **keywords)
            worked = works(case, list(moments(env, id, bool(case.render_mode))), plain(id, mode))
        except Exception as error:  # noqa: BLE001  # whatever it is, the page tells of it
            return verdict_of(error)
        finally:
            env.close()
    return "works" if worked else "does wrong"


def row(form: str, name: str, ids: Sequence[str] = IDS) -> list[str]:
    """One wrapper's verdicts over ids, in all autoreset modes or in each."""
    case = {**CASES[form], **OURS}[name]
    verdicts = []
    for id in ids:
        by_mode = {mode: cell(name, case, id, mode) for mode in MODES[form]}
        modes: dict[str, list[str]] = {}
        for mode, verdict in by_mode.items():
            modes.setdefault(verdict, []).append(mode.value if mode else "")
        parts = [f"{verdict} ({', '.join(of)})" if len(modes) > 1 else verdict for verdict, of in modes.items()]
        verdicts.append(", ".join(parts))
    return verdicts


PAGE = """\
# Wrappers: what works

Printed by `python tests/wrappers/matrix.py` with Gymnasium {version}; tests compare it with what they find. Each
wrapper is put over each environment, single (`gym.make`) and batched (`gym.make_vec`, in the three autoreset modes, of
which SameStep is the default), for two episodes, with keywords that make it do something.

*works*: it ran, and changed nothing but what it is for. *refuses*: an exception says what is expected. *fails*: an
exception from deeper down; a limit of Gymnasium's that its own environments have too. Our reward wrappers are the last
{ours} of each table.
"""


def page() -> Iterator[str]:
    yield PAGE.format(version=gym.__version__, ours=len(OURS))
    heading = " | ".join(id.removeprefix("AlpacaFarm-").removesuffix("-v0") for id in IDS)
    for form, cases in CASES.items():
        yield f"## {form.capitalize()}\n\n| wrapper | {heading} |\n|{'---|' * (len(IDS) + 1)}"
        for name in (*cases, *OURS):
            yield f"| {name} | {' | '.join(row(form, name))} |"
        yield ""


if __name__ == "__main__":
    os.environ["SDL_VIDEODRIVER"] = "dummy"  # windows without a screen
    print("\n".join(page()).rstrip())
