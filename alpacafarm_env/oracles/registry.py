"""Oracles and judges by name, so that an environment's reward can be written as JSON.

| oracle | reward |
|---|---|
| "surrogate" | the dataset's surrogate reward model |
| "annotators" | a drawn verdict, 1 or 0 (0.5 for equal texts), against the reference: by the noisy pool (25 % flips) |
| "win_rate" | the same by the pool without added noise, p_sim^eval |
| "human" | the same by the human raters (in the sandbox: 16 simulated ones) |
| "gold" | the sandbox's true reward |
| "recorded" | stored judgements of a recorded dataset, replayed |
| "constant" | the same for every response |
| "module:Name" | one of a user's own, see `own` |

A mapping adds keywords: `{"name": "constant", "value": 1.0}`, `{"name": "module:Name", "weight": 2.0}`;
`{"reward_model": folder, ...}` takes those of `RewardModel`; `{"judge": name, "flip": 0.25, "both_orders": False,
"seed": 0}` is the win rate by any judge, with added noise if wanted; `{"pool": "alpaca_farm", "base_url": url, ...}` is
the win rate by LLM annotators behind a server, with the keywords of `annotators.pool.make_pool`;
`{"ensemble": [oracle, ...], "combine": "uwo", "weight": 0.1}` makes one reward of several oracles, as `Ensemble` does.
Members that draw, such as judges with noise, draw alike unless their mappings have a `seed` each.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from os import PathLike, fspath
from typing import TYPE_CHECKING, Any, Final, cast

from ..errors import DataError, did_you_mean
from ..plugins import find_attribute
from ..pretrained import file_states
from .base import Constant, PreferenceOracle, RewardOracle
from .ensemble import Ensemble
from .judges import BothOrders, Flip, WinRate
from .own import check_options, check_own, is_object, is_own, make_own, own_names
from .recorded import Recorded, RecordedDataset, RecordedJudge
from .reward_model import RewardModel

if TYPE_CHECKING:
    from ..data import Dataset

SANDBOX_JUDGES: Final = ("sim_eval", "sim_ann", "sim_gpt4", "human", "gold")
JUDGES: Final = (*SANDBOX_JUDGES, "recorded")
WIN_RATES: Final = {"annotators": "sim_ann", "win_rate": "sim_eval", "human": "human"}
"""Oracles that are a judge's win rate against the references."""

Spec = str | Mapping[str, Any]

# The dataset and what a user's names stand for are kept beside the oracle: as long as the entry lives, their ids belong
# to no others.
_made: dict[tuple[Any, ...], tuple[list[Any], RewardOracle]] = {}


def make_oracle(spec: Spec | RewardOracle, *, dataset: Dataset, seed: int = 0) -> RewardOracle:
    """Returns the oracle that a name or a mapping stands for; an oracle is returned as it is.

    The same specification, dataset and seed give the same object, so a model is loaded once however many environments
    and wrappers name it. A user's own module that is reloaded gives another one.

    Args:
        spec: See the table above.
        dataset: Whose references, judgements or simulated annotators are meant.
        seed: Seeds whatever is random about the oracle, unless the mapping has its own `seed`.

    Raises:
        UnknownNameError: No oracle or judge of that name, or a keyword that it does not take.
        TypeError: The specification is of another type.
        ValueError: A mapping names no oracle or more than one.
        DataError: The dataset has not what the oracle needs.
    """
    check_oracle(spec)
    if not isinstance(spec, str | Mapping):
        return spec
    key = _key(spec)
    if key is None:
        return _build_oracle(spec, dataset, seed)
    kept = [dataset, *(find_attribute("Oracle", name) for name in own_names(spec))]
    place = (*map(id, kept), seed, key)
    if place not in _made:
        _made[place] = kept, _build_oracle(spec, dataset, seed)
    return _made[place][1]


def make_judge(spec: Spec | PreferenceOracle, *, dataset: Dataset, seed: int = 0) -> PreferenceOracle:
    """Returns the judge that a name or a mapping stands for; a judge is returned as it is.

    Args:
        spec: "sim_eval", "sim_ann", "sim_gpt4", "human" or "gold" of the sandbox, "recorded" of a recorded dataset,
            "module:Name" or {"name": "module:Name", ...} of one's own, or a mapping {"judge": any of these, "flip":
            0.0, "both_orders": False, "seed": 0} or {"pool": name, ...}.
        dataset: Where the judge comes from.
        seed: Seeds the judge's draws, unless the mapping has its own `seed`.

    Raises:
        UnknownNameError: No judge of that name, or an unknown keyword.
        TypeError: The specification is of another type.
        ValueError: A mapping without `judge` or `pool`, or with both.
        DataError: The dataset has no such judge.
    """
    check_judge(spec)
    if isinstance(spec, Mapping):
        if "pool" in spec:
            from ..annotators.pool import make_pool

            return make_pool(**{"seed": seed, **spec})
        if "name" in spec:
            return cast(PreferenceOracle, make_own("judge", spec, dataset=dataset, seed=seed))
        return _judge(**{"seed": seed, **spec}, dataset=dataset)
    if not isinstance(spec, str):
        return spec
    if is_own(spec):
        return cast(PreferenceOracle, make_own("judge", spec, dataset=dataset, seed=seed))
    if spec == "recorded":
        return RecordedJudge(_recorded(dataset))
    _require_sandbox(dataset, f"judge {spec!r}")
    from .. import sandbox

    return sandbox.judge(spec, seed)


class References(Mapping[str, str]):
    """The references of a dataset by instruction, read a split at a time when they are first asked for.

    An `Instruction` is looked up in its own split; any other text in all splits that have references. Of several
    references to one instruction the first counts, with a warning.

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
            known = self._splits[split] = {}
            rows = list(zip(self._dataset.instructions(split), self._dataset.references(split), strict=True))
            passed = sum(known.setdefault(instruction, reference) != reference for instruction, reference in rows)
            if passed:
                text = f"{passed} of {len(rows)} references of {split} are passed over"
                warnings.warn(f"{text}: their instruction stands above with another one, which counts.", stacklevel=4)
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


def check_oracle(spec: object) -> None:
    """Refuses what can be no oracle before anything is built, so that `gym.make` tells it and not the first step.

    Raises:
        UnknownNameError: No oracle or judge of that name, or a keyword that it does not take.
        TypeError: The specification is of another type.
        ValueError: A mapping names no oracle or more than one.
        PoolError: No pool of annotators of that name, or its file is not well written.
    """
    if isinstance(spec, str | Mapping):
        _check_keywords({"name": spec} if isinstance(spec, str) else spec)
        return
    scores = is_object(spec, "oracle")
    if not scores and is_object(spec, "judge"):
        raise TypeError(f"{spec!r} compares pairs and scores nothing: give {{'judge': it}}, the win rate by it.")
    if not scores:
        raise TypeError(
            "An oracle is given by a name, a mapping or an object with name (a text) and score (a method), "
            f"got {'the class ' if isinstance(spec, type) else ''}{spec!r}."
        )


def check_judge(spec: object) -> None:
    """Refuses what can be no judge before anything is built.

    Raises:
        UnknownNameError, TypeError, ValueError, PoolError: As `check_oracle`.
    """
    if isinstance(spec, str):
        if is_own(spec):
            check_own("judge", spec)
        elif spec not in JUDGES:
            raise did_you_mean("judge", spec, JUDGES)
    elif isinstance(spec, Mapping):
        if is_own(spec.get("name")) and not spec.keys() & {"judge", "pool"}:
            check_own("judge", spec)
        elif ("judge" in spec) == ("pool" in spec):
            keys = ", ".join(map(repr, spec))
            raise ValueError(f"A mapping names a judge by its key 'judge' or 'pool', got one with the keys {keys}.")
        elif "pool" in spec:
            from ..annotators.config import load_pool
            from ..annotators.pool import make_pool

            load_pool(spec["pool"])
            check_options(make_pool, spec)
        else:
            check_judge(spec["judge"])
            check_options(_judge, spec, "dataset")
    elif not is_object(spec, "judge"):
        raise TypeError(
            "A judge is given by a name, a mapping or an object with name (a text) and compare (a method), "
            f"got {'the class ' if isinstance(spec, type) else ''}{spec!r}."
        )


def _check_keywords(spec: Mapping[str, Any]) -> None:
    """The part of `check_oracle` for mappings."""
    options = dict(spec)
    if "ensemble" in options:
        for member in _members(options):
            check_oracle(member)
        del options["ensemble"]
        check_options(Ensemble, options, "members")
    elif "reward_model" in options:
        path = options.pop("reward_model")
        if not isinstance(path, str | PathLike):
            raise TypeError(f"An oracle's 'reward_model' is the folder of a model, got {path!r}.")
        check_options(RewardModel, options, "path")
    elif len(options.keys() & {"name", "judge", "pool"}) != 1:
        # No TypeError: gym.make would add all keywords to its message, and a key given by mistake with them.
        raise ValueError(
            "A mapping gives an oracle by 'name', 'reward_model', 'judge', 'pool' or 'ensemble', got one with the keys "
            f"{', '.join(map(repr, options))}."
        )
    elif "name" not in options:
        check_judge(options)
    elif is_own(options["name"]):
        check_own("oracle", options)
    elif (name := options.pop("name")) not in (*_NAMED, *WIN_RATES):
        raise did_you_mean("oracle", name, [*_NAMED, *WIN_RATES])
    elif name in WIN_RATES:
        check_options(_judge, options, "dataset", "judge")
    else:
        # The surrogate is a reward model, and takes what one takes.
        check_options(RewardModel if name == "surrogate" else _NAMED[name], options, "dataset", "path")


def _build_oracle(spec: Spec, dataset: Dataset, seed: int) -> RewardOracle:
    mapping = {"name": spec} if isinstance(spec, str) else dict(spec)
    if "ensemble" in mapping:
        members = [make_oracle(member, dataset=dataset, seed=seed) for member in mapping.pop("ensemble")]
        return Ensemble(members, **mapping)
    if "reward_model" in mapping:
        return RewardModel(mapping.pop("reward_model"), **mapping)
    if "name" not in mapping:
        return _win_rate(dataset, {"seed": seed, **mapping})
    if is_own(mapping["name"]):
        return cast(RewardOracle, make_own("oracle", mapping, dataset=dataset, seed=seed))
    name = mapping.pop("name")
    if name in WIN_RATES:
        return _win_rate(dataset, {"seed": seed, **mapping, "judge": WIN_RATES[name]})
    return _NAMED[name](dataset=dataset, **mapping)


def _members(spec: Mapping[str, Any]) -> Sequence[Spec | RewardOracle]:
    members = spec["ensemble"]
    if not isinstance(members, list | tuple):
        raise TypeError(f"An ensemble's members are a list of oracles, each as it is given alone, got {members!r}.")
    return members


def _surrogate(*, dataset: Dataset, **options: Any) -> RewardOracle:
    _require_sandbox(dataset, "surrogate reward model")
    from .. import sandbox

    return RewardModel(sandbox.REWARD_MODEL, **{"name": "surrogate", **options})


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


def _key(spec: Spec | RewardOracle) -> str | None:
    """The specification as JSON, None if it holds objects; files it names count with their state."""
    try:
        key = json.dumps(spec, sort_keys=True, default=_path)
    except TypeError:
        return None
    if isinstance(spec, Mapping) and "ensemble" in spec:
        return json.dumps([key, *map(_key, _members(spec))])
    if isinstance(spec, Mapping) and "pool" in spec:
        from ..annotators.pool import fingerprint

        return json.dumps([key, fingerprint(spec)])
    if not isinstance(spec, Mapping) or "reward_model" not in spec:
        return key
    return json.dumps([key, file_states(spec["reward_model"])])


def _path(value: object) -> str:
    if isinstance(value, PathLike):
        return str(fspath(value))
    raise TypeError
