"""Oracles and judges by name, so that an environment's reward can be written as JSON.

| oracle | reward |
|---|---|
| "surrogate" | the dataset's surrogate reward model |
| "annotators" | P(response preferred to the reference) by the noisy annotator pool, p_sim^ann (25 % flips) |
| "win_rate" | the same by the pool without added noise, p_sim^eval |
| "human" | the same by the human raters (in the sandbox: 16 simulated ones) |
| "gold" | the sandbox's true reward |
| "recorded" | stored judgements of a recorded dataset, replayed |
| "constant" | the same for every response |

A mapping adds keywords: `{"name": "constant", "value": 1.0}`, `{"name": "recorded", "generator": "gpt4"}`;
`{"reward_model": folder, ...}` takes those of `RewardModel`; `{"judge": name, "flip": 0.25, "both_orders": False,
"seed": 0}` is the win rate by any judge, with added noise if wanted; `{"pool": "alpaca_farm", "base_url": url, ...}` is
the win rate by LLM annotators behind a server, with the keywords of `annotators.make.make_pool`;
`{"ensemble": [oracle, ...], "combine": "uwo", "weight": 0.1}` makes one reward of several oracles, as `Ensemble` does.
Members that draw, such as judges with noise, draw alike unless their mappings have a `seed` each.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

from ..errors import DataError, did_you_mean
from .base import Constant, PreferenceOracle, RewardOracle
from .ensemble import Ensemble
from .judges import BothOrders, Flip, WinRate
from .recorded import Recorded, RecordedDataset, RecordedJudge
from .reward_model import RewardModel

if TYPE_CHECKING:
    from ..data import Dataset

SANDBOX_JUDGES: Final = ("sim_eval", "sim_ann", "sim_gpt4", "human", "gold")
JUDGES: Final = (*SANDBOX_JUDGES, "recorded")
WIN_RATES: Final = {"annotators": "sim_ann", "win_rate": "sim_eval", "human": "human"}
"""Oracles that are a judge's win rate against the references."""

Spec = str | Mapping[str, Any]

# The dataset is kept beside its oracle: as long as the entry lives, its id belongs to no other.
_made: dict[tuple[int, int, str], tuple[Dataset, RewardOracle]] = {}


def make_oracle(spec: Spec | RewardOracle, *, dataset: Dataset, seed: int = 0) -> RewardOracle:
    """Returns the oracle that a name or a mapping stands for; an oracle is returned as it is.

    The same specification, dataset and seed give the same object, so a model is loaded once however many environments
    and wrappers name it.

    Args:
        spec: See the table above.
        dataset: Whose references, judgements or simulated annotators are meant.
        seed: Seeds whatever is random about the oracle, unless the mapping has its own `seed`.

    Raises:
        UnknownNameError: No oracle or judge of that name, or a keyword that it does not take.
        TypeError: The specification is of another type, or names no oracle or more than one.
        DataError: The dataset has not what the oracle needs.
    """
    if isinstance(spec, RewardOracle):
        return spec
    if isinstance(spec, PreferenceOracle):
        raise TypeError(f"{spec.name!r} compares pairs and scores nothing: give {{'judge': it}}, the win rate by it.")
    if not isinstance(spec, str | Mapping):
        raise TypeError(f"An oracle is given by a name, a mapping or an object with name and score, got {spec!r}.")
    key = _key(spec)
    if key is None:
        return _build_oracle(spec, dataset, seed)
    place = (id(dataset), seed, key)
    if place not in _made:
        _made[place] = dataset, _build_oracle(spec, dataset, seed)
    return _made[place][1]


def make_judge(spec: Spec | PreferenceOracle, *, dataset: Dataset, seed: int = 0) -> PreferenceOracle:
    """Returns the judge that a name or a mapping stands for; a judge is returned as it is.

    Args:
        spec: "sim_eval", "sim_ann", "sim_gpt4", "human" or "gold" of the sandbox, "recorded" of a recorded dataset, or
            a mapping {"judge": any of these, "flip": 0.0, "both_orders": False, "seed": 0} or {"pool": name, ...}.
        dataset: Where the judge comes from.
        seed: Seeds the judge's draws, unless the mapping has its own `seed`.

    Raises:
        UnknownNameError: No judge of that name, or an unknown keyword.
        TypeError: The specification is of another type, or a mapping without `judge` or `pool`.
        DataError: The dataset has no such judge.
    """
    if isinstance(spec, PreferenceOracle):
        return spec
    if isinstance(spec, Mapping):
        if ("judge" in spec) == ("pool" in spec):
            keys = ", ".join(map(repr, spec))
            raise TypeError(f"A mapping names a judge by its key 'judge' or 'pool', got one with the keys {keys}.")
        if "pool" in spec:
            from ..annotators.make import make_pool

            return cast(PreferenceOracle, _call(make_pool, {"seed": seed, **spec}))
        return cast(PreferenceOracle, _call(_judge, {"seed": seed, **spec}, dataset=dataset))
    if not isinstance(spec, str):
        raise TypeError(f"A judge is given by a name, a mapping or an object with name and compare, got {spec!r}.")
    if spec not in JUDGES:
        raise did_you_mean("judge", spec, JUDGES)
    if spec == "recorded":
        return RecordedJudge(_recorded(dataset))
    _require_sandbox(dataset, f"judge {spec!r}")
    from .. import sandbox

    return sandbox.judge(spec, seed)


class References(Mapping[str, str]):
    """The references of a dataset by instruction, read a split at a time when they are first asked for.

    An `Instruction` is looked up in its own split; any other text in all splits that have references.

    Raises:
        DataError: The split of an instruction has no references.
    """

    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset
        self._splits: dict[str, dict[str, str]] = {}

    def __getitem__(self, instruction: str) -> str:
        split = getattr(instruction, "split_name", "")
        if split in self._dataset.splits:
            return self._of(split)[instruction]
        return self._all[instruction]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)

    def _of(self, split: str) -> dict[str, str]:
        if split not in self._splits:
            texts = self._dataset.references(split)
            self._splits[split] = dict(zip(self._dataset.instructions(split), texts, strict=True))
        return self._splits[split]

    @cached_property
    def _all(self) -> dict[str, str]:
        found: dict[str, str] = {}
        for split in self._dataset.splits:
            try:
                found |= self._of(split)
            except DataError:  # a split without references answers no question
                continue
        return found


def check_name(spec: Spec | RewardOracle) -> None:
    """Refuses a misspelt oracle or judge before anything is built, so that `gym.make` tells it and not the first step.

    Raises:
        UnknownNameError: No oracle or judge of that name.
        PoolError: No pool of annotators of that name, or its file is not well written.
    """
    given: Mapping[str, Any] = {"name": spec} if isinstance(spec, str) else spec if isinstance(spec, Mapping) else {}
    if "ensemble" in given:
        for member in _members(given):
            check_name(member)
    if "reward_model" in given or "ensemble" in given:
        return  # `name` is then what the reward model or ensemble is to be called
    name, judge = given.get("name"), given.get("judge")
    if isinstance(name, str) and name not in _NAMED and name not in WIN_RATES:
        raise did_you_mean("oracle", name, [*_NAMED, *WIN_RATES])
    if isinstance(judge, str) and judge not in JUDGES:
        raise did_you_mean("judge", judge, JUDGES)
    if "pool" in given:
        from ..annotators.config import load_pool

        load_pool(given["pool"])


def _build_oracle(spec: Spec, dataset: Dataset, seed: int) -> RewardOracle:
    mapping = {"name": spec} if isinstance(spec, str) else dict(spec)
    if "ensemble" in mapping:
        members = [make_oracle(member, dataset=dataset, seed=seed) for member in _members(mapping)]
        del mapping["ensemble"]
        return cast(RewardOracle, _call(Ensemble, mapping, members=members))
    if len(mapping.keys() & {"name", "judge", "pool"}) != 1 and "reward_model" not in mapping:
        raise TypeError(
            "A mapping gives an oracle by 'name', 'reward_model', 'judge', 'pool' or 'ensemble', got one with the keys "
            f"{', '.join(map(repr, mapping))}."
        )
    if "reward_model" in mapping:
        path = mapping.pop("reward_model")
        return cast(RewardOracle, _call(RewardModel, mapping, path=path))
    if "judge" in mapping or "pool" in mapping:
        return _win_rate(dataset, {"seed": seed, **mapping})
    check_name(spec)
    name = mapping.pop("name")
    if name in WIN_RATES:
        return _win_rate(dataset, {"seed": seed, **mapping, "judge": WIN_RATES[name]})
    return cast(RewardOracle, _call(_NAMED[name], mapping, dataset=dataset))


def _members(spec: Mapping[str, Any]) -> Sequence[Spec | RewardOracle]:
    members = spec["ensemble"]
    if not isinstance(members, list | tuple):
        raise TypeError(f"An ensemble's members are a list of oracles, each as it is given alone, got {members!r}.")
    return members


def _surrogate(*, dataset: Dataset, **options: Any) -> RewardOracle:
    _require_sandbox(dataset, "surrogate reward model")
    from .. import sandbox

    return cast(RewardOracle, _call(RewardModel, {"name": "surrogate", **options}, path=sandbox.REWARD_MODEL))


def _gold(*, dataset: Dataset) -> RewardOracle:
    _require_sandbox(dataset, "true reward")
    from .. import sandbox

    return sandbox.gold_oracle()


def _replayed(*, dataset: Dataset, generator: str | None = None) -> RewardOracle:
    return Recorded(_recorded(dataset), generator=generator)


def _constant(*, dataset: Dataset, value: float = 0.0) -> RewardOracle:
    return Constant(value)


_NAMED: Final[Mapping[str, Callable[..., RewardOracle]]] = {
    "surrogate": _surrogate,
    "gold": _gold,
    "recorded": _replayed,
    "constant": _constant,
}


def _win_rate(dataset: Dataset, options: Mapping[str, Any]) -> RewardOracle:
    built = make_judge(options, dataset=dataset)
    # A judge as it is gives its win rate one name, whether it was asked for by the oracle's name or the judge's.
    plain = options.keys() <= {"judge", "seed"}
    names = {judge: name for name, judge in WIN_RATES.items()} if plain else {}
    judge = options.get("judge")
    return WinRate(built, References(dataset), name=names.get(judge) if isinstance(judge, str) else None)


def _judge(
    *, dataset: Dataset, judge: Any, seed: int, flip: float = 0.0, both_orders: bool = False
) -> PreferenceOracle:
    built = make_judge(judge, dataset=dataset, seed=seed)
    if both_orders:
        built = BothOrders(built)
    # Noise comes last: a pair that gets a coin costs no call in either order.
    return Flip(built, flip, seed=seed) if flip else built


def _recorded(dataset: Dataset) -> RecordedDataset:
    if not hasattr(dataset, "recorded_verdicts"):
        raise DataError(
            f"Dataset {dataset.name!r} ({dataset.level}) has no recorded judgements. Give a folder with "
            "eval_instructions, davinci003, outputs/ and preferences_*, or another oracle."
        )
    return cast(RecordedDataset, dataset)


def _require_sandbox(dataset: Dataset, what: str) -> None:
    if dataset.level != "sandbox":
        instead = "'recorded'" if dataset.level == "recorded" else "{'reward_model': folder}"
        instead += " or {'pool': 'alpaca_farm', 'base_url': url}"
        raise DataError(
            f"Only the sandbox has a {what}; dataset {dataset.name!r} is of level {dataset.level!r}. Give "
            f"oracle={instead}, or an oracle object of your own."
        )


def _call(build: Callable[..., Any], keywords: Mapping[str, Any], **fixed: Any) -> Any:
    """Calls with keywords that came from a user: an unknown one is named before anything is built."""
    parameters = inspect.signature(build).parameters
    if not any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        options = [name for name in parameters if name not in fixed]
        for key in keywords:
            if key not in options:
                raise did_you_mean("option", key, options)
    return build(**keywords, **fixed)


def _key(spec: Spec | RewardOracle) -> str | None:
    """The specification as JSON, None if it holds objects; files it names count with their state."""
    try:
        key = json.dumps(spec, sort_keys=True, default=_path)
    except TypeError:
        return None
    if isinstance(spec, Mapping) and "ensemble" in spec:
        return json.dumps([key, *map(_key, _members(spec))])
    if isinstance(spec, Mapping) and "pool" in spec:
        from ..annotators.make import fingerprint

        return json.dumps([key, fingerprint(spec)])
    if not isinstance(spec, Mapping) or "reward_model" not in spec:
        return key
    files = sorted(Path(spec["reward_model"]).glob("*.safetensors"))
    return json.dumps([key, *((file.name, file.stat().st_mtime_ns, file.stat().st_size) for file in files)])


def _path(value: object) -> str:
    if isinstance(value, PathLike):
        return str(fspath(value))
    raise TypeError
