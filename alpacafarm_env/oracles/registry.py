"""Oracles and judges by name or mapping, see `specs`: checked when an environment is made, built when first asked."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from os import PathLike, fspath
from typing import TYPE_CHECKING, Any, cast

from ..plugins import find_attribute
from ..pretrained import file_states
from .base import PreferenceOracle, RewardOracle
from .judges import References as References
from .own import NAMES, is_own, parts_of

if TYPE_CHECKING:
    from ..data import Dataset

Spec = str | Mapping[str, Any]

# The dataset and what a user's names stand for are kept too, so that their ids belong to no others.
_made: dict[tuple[Any, ...], tuple[list[Any], RewardOracle]] = {}


def make_oracle(spec: Spec | RewardOracle, *, dataset: Dataset, seed: int = 0) -> RewardOracle:
    """Returns the oracle that a name or a mapping (see `specs`) stands for; an oracle is returned as it is.

    A function of instructions and responses becomes a `FunctionOracle`.

    The same specification, dataset and seed give the same object, so a model is loaded once however many environments
    and wrappers name it. A user's own module that is reloaded gives another one. A mapping's own `seed` counts more.

    Raises:
        UnknownNameError: No oracle or judge of that name, or a keyword that it does not take.
        TypeError, ValueError: The specification is of another type, or names no oracle or more than one.
        DataError: A value is not as expected, or the dataset lacks what the oracle needs.
    """
    from .specs import plan

    build, key = plan("oracle", spec), _key(spec)
    if key is None:
        return cast(RewardOracle, build(dataset, seed))
    kept = [dataset, *(find_attribute("Oracle", part) for part in _parts(spec) if is_own(part))]
    place = (*map(id, kept), seed, key)
    if place not in _made:
        _made[place] = kept, build(dataset, seed)
    return _made[place][1]


def make_judge(spec: Spec | PreferenceOracle, *, dataset: Dataset, seed: int = 0) -> PreferenceOracle:
    """Returns the judge that a name or a mapping stands for; a judge is returned as it is. Errors as of `make_oracle`.

    `spec` is "sim_eval", "sim_ann", "sim_gpt4", "human" or "gold" of the sandbox, "recorded" of a recorded dataset,
    "module:Name" or {"name": "module:Name", ...} of one's own, or a mapping {"judge": any of these, "flip": 0.0,
    "both_orders": False, "seed": 0}, {"pool": name, ...}, {"pool": name, "policy": agent} or {"human": file}.
    """
    from .specs import plan

    return cast(PreferenceOracle, plan("judge", spec)(dataset, seed))


def check_oracle(spec: object) -> None:
    """Refuses what can be no oracle before anything is built, so that `gym.make` reports it and not the first step.

    Errors are those of `make_oracle`, or PoolError for an unknown or badly written pool of annotators.
    """
    if spec not in NAMES["oracle"]:  # else it is right, and pydantic takes a tenth of a second to load
        from .specs import plan

        plan("oracle", spec)


def _key(spec: Any) -> str | None:
    """The specification as JSON, None if it holds objects; files it names count with their state."""
    try:
        key = json.dumps(spec, sort_keys=True, default=_path)
    except TypeError:
        return None
    return json.dumps([key, *(_state(part) for part in _parts(spec) if isinstance(part, Mapping))])


def _parts(spec: Any) -> Iterator[Any]:
    """A specification, and those that it is made of."""
    yield spec
    if isinstance(spec, Mapping):
        for part in parts_of(spec):
            yield from _parts(part)


def _state(spec: Mapping[str, Any]) -> list[Any]:
    """What the files and variables that a mapping names hold now."""
    state: list[Any] = [file_states(spec[name]) for name in ("reward_model", "human", "policy") if name in spec]
    if "pool" in spec:
        from ..annotators.pool import fingerprint

        state.append(fingerprint(spec))
    return state


def _path(value: object) -> str:
    if isinstance(value, PathLike):
        return str(fspath(value))
    raise TypeError
