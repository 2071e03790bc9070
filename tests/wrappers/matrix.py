"""Every wrapper of Gymnasium's and of ours over every id, single and batched: does it work, and if not, what is said?

    python tests/wrappers/matrix.py > docs/wrappers/matrix.md

prints the page, with the package installed and, beside it, what some of Gymnasium's wrappers need:
`pip install array-api-compat jax moviepy opencv-python-headless pygame`.
"""

import functools
import linecache
import os
import sys
import tempfile
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
from gymnasium.error import DependencyNotInstalled
from gymnasium.vector import AutoresetMode, VectorEnv
from matrix_cases import BATCHED, OURS, SINGLE, Case, Moment, Run

from alpacafarm_env import wrappers
from alpacafarm_env.envs.registration import IDS, TEXT_IDS

MODES: dict[str, tuple[AutoresetMode | None, ...]] = {"single": (None,), "batched": tuple(AutoresetMode)}
CASES = {"single": SINGLE, "batched": BATCHED}
TEXTS = ("A lion is brave, golden and proud.", "- one\n- two\n- three")
SLOTS = 2
VIDEOS = "video_folder"


class Cell(NamedTuple):
    """works, refuses (in words), needs (a package), fails (in any other way) or does wrong; and what is said."""

    verdict: str
    reason: str = ""


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
        yield Moment(pick(observation), float(reward), any(ends), pick(info), env.render() if rendered else None)
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


def told(error: Exception) -> Cell:
    """In words is what a `raise` of Gymnasium's or ours says."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    ours = not {"gymnasium", "alpacafarm_env", "wrappers"}.isdisjoint(Path(last.filename).parts)
    raised = linecache.getline(last.filename, last.lineno or 0).split()[:1] == ["raise"]
    reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}".replace("`", "'")
    if isinstance(error, (DependencyNotInstalled, ImportError)):
        return Cell("needs", reason)
    return Cell("refuses" if ours and raised and str(error) else "fails", reason)


def cell(name: str, case: Case, id: str, mode: AutoresetMode | None) -> Cell:
    """One wrapper over one id; its warnings are of no interest."""
    space = wrappers if name in OURS else gym.wrappers
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        keywords = {**case.keywords, **({VIDEOS: folder} if VIDEOS in case.keywords else {})}
        env = make(id, mode, case.render_mode)
        try:
            env = getattr(space if mode is None else space.vector, name)(env, **keywords)
            worked = case.worked(Run(env, list(moments(env, id, bool(case.render_mode))), plain(id, mode), id))
        except Exception as error:  # noqa: BLE001  # whatever it is, the page tells of it
            return told(error)
        finally:
            env.close()
    return Cell("works" if worked else "does wrong")


def summary(cells: Mapping[AutoresetMode | None, Cell]) -> str:
    """The verdict of all autoreset modes, or of each."""
    verdicts = dict.fromkeys(each.verdict for each in cells.values())
    if len(verdicts) == 1:
        return next(iter(verdicts))
    modes = {verdict: [mode.value for mode in cells if mode and cells[mode].verdict == verdict] for verdict in verdicts}
    return ", ".join(f"{verdict} ({', '.join(of)})" for verdict, of in modes.items())


def row(form: str, name: str, ids: Sequence[str] = IDS) -> tuple[list[str], list[str]]:
    """One wrapper's verdicts over ids, and all that is said."""
    case = {**CASES[form], **OURS}[name]
    found = [{mode: cell(name, case, id, mode) for mode in MODES[form]} for id in ids]
    reasons = dict.fromkeys(each.reason for cells in found for each in cells.values() if each.reason)
    return [summary(cells) for cells in found], list(reasons)


PAGE = """\
# Wrappers: what works

Printed by `python tests/wrappers/matrix.py` with Gymnasium {version}; tests compare it with what they find. Each
wrapper is put over each environment, single (`gym.make`) and batched (`gym.make_vec`, in the three autoreset modes, of
which SameStep is the default), for two episodes, with keywords that make it do something.

*works*: it did what it is for. *refuses*: an exception says what is expected. *fails*: an exception from deeper down; a
limit of Gymnasium's that its own environments have too. Our reward wrappers are the last {ours} of each table.
"""


def page() -> Iterator[str]:
    yield PAGE.format(version=gym.__version__, ours=len(OURS))
    heading = " | ".join(id.removeprefix("AlpacaFarm-").removesuffix("-v0") for id in IDS)
    for form, cases in CASES.items():
        yield f"## {form.capitalize()}\n\n| wrapper | {heading} |\n|{'---|' * (len(IDS) + 1)}"
        said = []
        for name in (*cases, *OURS):
            verdicts, reasons = row(form, name)
            if "needs" in " ".join(verdicts):
                sys.exit(f"{name}: {reasons}")
            yield f"| {name} | {' | '.join(verdicts)} |"
            said += [f"- {name}: `{'`; `'.join(reasons)}`"] if reasons else []
        yield "\nWhat they say:\n\n" + "\n".join(said) + "\n"


if __name__ == "__main__":
    os.environ["SDL_VIDEODRIVER"] = "dummy"  # windows without a screen
    print("\n".join(page()).rstrip())
