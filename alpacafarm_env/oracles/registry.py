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

A mapping adds keywords to a `name`: `{"name": "constant", "value": 1.0}`; or it has one of the keys `reward_model`
(with those of `RewardModel`), `judge` (the win rate by any judge: flip, both_orders, seed), `pool` (the win rate by LLM
annotators: those of `annotators.pool.make_pool`; with a `policy`, which answers for them, those of
`annotators.policy_pool.make_policy_pool`), `human` (the win rate by a file of people's labels, see `HumanJudge`),
`rating` (a rating from 1 to 7: by the sandbox's "human", "sim_eval" or "sim_gpt4", with a critique as a detail and a
seed; by LLM annotators, `{"pool": name, ...}` with the keywords of `annotators.pool.make_raters`; by people,
`{"human": file}`, see `HumanRatings`; by `{"policy": an agent, a language model or a folder}`, see `PolicyRating`) and
`ensemble` (those of `Ensemble`). Members of an ensemble that draw, such as judges with noise, draw alike unless their
mappings have a `seed` each.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from importlib import import_module
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

from ..errors import DataError, did_you_mean
from ..plugins import find_attribute
from ..pretrained import file_states
from .base import Constant, PreferenceOracle, RewardOracle
from .ensemble import Ensemble
from .human import HumanJudge, HumanRatings
from .judges import BothOrders, Flip, WinRate
from .own import Kind, as_object, check_options, is_object, is_own, own_names, plan_own
from .policies import check_policy
from .policy_rating import PolicyRating
from .recorded import Recorded, RecordedJudge
from .reward_model import RewardModel

if TYPE_CHECKING:
    from ..data import Dataset, RecordedDataset

JUDGES: Final = ("sim_eval", "sim_ann", "sim_gpt4", "human", "gold", "recorded")
RATERS: Final = ("sim_eval", "sim_gpt4", "human")
WIN_RATES: Final = {"annotators": "sim_ann", "win_rate": "sim_eval", "human": "human"}
"""Oracles that are a judge's win rate against the references."""

_OF_JUDGES: Final = {"judge", "pool", "human"}
"""Keys of a mapping that stands for a judge."""

Spec = str | Mapping[str, Any]

# The dataset and what a user's names stand for are kept too, so that their ids belong to no others.
_made: dict[tuple[Any, ...], tuple[list[Any], RewardOracle]] = {}


def make_oracle(spec: Spec | RewardOracle, *, dataset: Dataset, seed: int = 0) -> RewardOracle:
    """Returns the oracle that a name or a mapping (see above) stands for; an oracle is returned as it is.

    A function of instructions and responses becomes a `FunctionOracle`.

    The same specification, dataset and seed give the same object, so a model is loaded once however many environments
    and wrappers name it. A user's own module that is reloaded gives another one. A mapping's own `seed` counts more.

    Raises:
        UnknownNameError: No oracle or judge of that name, or a keyword that it does not take.
        TypeError, ValueError: The specification is of another type, or names no oracle or more than one.
        DataError: The dataset lacks what the oracle needs.
    """
    build = _plan_oracle(spec, dataset, seed)
    key = _key(spec) if isinstance(spec, str | Mapping) else None
    if key is None:
        return build()
    kept = [dataset, *(find_attribute("Oracle", name) for name in own_names(spec))]
    place = (*map(id, kept), seed, key)
    if place not in _made:
        _made[place] = kept, build()
    return _made[place][1]


def make_judge(spec: Spec | PreferenceOracle, *, dataset: Dataset, seed: int = 0) -> PreferenceOracle:
    """Returns the judge that a name or a mapping stands for; a judge is returned as it is. Errors as of `make_oracle`.

    `spec` is "sim_eval", "sim_ann", "sim_gpt4", "human" or "gold" of the sandbox, "recorded" of a recorded dataset,
    "module:Name" or {"name": "module:Name", ...} of one's own, or a mapping {"judge": any of these, "flip": 0.0,
    "both_orders": False, "seed": 0}, {"pool": name, ...}, {"pool": name, "policy": agent} or {"human": file}.
    """
    return _plan_judge(spec, dataset, seed)()


class References(Mapping[str, str]):
    """The references of a dataset by instruction, read a split at a time when they are first asked for.

    An `Instruction` is looked up in its own split (DataError if that has none); any other text in all splits that have
    references. Of several references to one instruction the first counts, with a warning.
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
            if passed := sum(known.setdefault(instruction, reference) != reference for instruction, reference in rows):
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
    """Refuses what can be no oracle before anything is built, so that `gym.make` reports it and not the first step.

    Errors are those of `make_oracle`, or PoolError for an unknown or badly written pool of annotators.
    """
    _plan_oracle(spec)


def _plan_oracle(spec: Any, dataset: Any = None, seed: int = 0) -> Callable[[], RewardOracle]:
    """Checks a specification, which needs no dataset, and returns what builds the oracle."""
    if not isinstance(spec, str | Mapping):
        if not is_object(spec, "oracle") and is_object(spec, "judge"):
            raise TypeError(f"{spec!r} compares pairs and scores nothing: give {{'judge': it}}, the win rate by it.")
        return _given(spec, "oracle", "An oracle", "score")
    options: dict[str, Any] = {"name": spec} if isinstance(spec, str) else dict(spec)
    if "ensemble" in options:
        return _plan_ensemble(options, dataset, seed)
    if "rating" in options:
        return _plan_rating(options, dataset, seed)
    if "reward_model" in options:
        path = options.pop("reward_model")
        if not isinstance(path, str | PathLike):
            raise TypeError(f"An oracle's 'reward_model' is the folder of a model, got {path!r}.")
        check_options(RewardModel, options, "path", "base")
        return lambda: RewardModel(path, **options)
    if len(options.keys() & {"name", *_OF_JUDGES}) != 1:
        # No TypeError: gym.make would add all keywords to its message, and a key given by mistake with them.
        raise ValueError(
            "A mapping gives an oracle by 'name', 'reward_model', 'judge', 'pool', 'human', 'rating' or 'ensemble', "
            f"got the keys {_listed(options)}."
        )
    if "name" not in options:
        _plan_judge(options)
        return lambda: _win_rate(dataset, {"seed": seed, **options})
    if is_own(options["name"]):
        return plan_own("oracle", options, dataset=dataset, seed=seed)
    name = options.pop("name")
    if name not in (*_NAMED, *WIN_RATES):
        raise did_you_mean("oracle", name, [*_NAMED, *WIN_RATES, "module:Name"])
    if name in WIN_RATES:
        check_options(_judge, options, "dataset", "judge")
        return lambda: _win_rate(dataset, {"seed": seed, **options, "judge": WIN_RATES[name]})
    # The surrogate is a reward model, and takes what one takes.
    check_options(RewardModel if name == "surrogate" else _NAMED[name], options, "dataset", "path", "base")
    return lambda: _NAMED[name](dataset=dataset, **options)


def _plan_ensemble(options: dict[str, Any], dataset: Any, seed: int) -> Callable[[], RewardOracle]:
    members = options.pop("ensemble")
    if not isinstance(members, list | tuple):
        raise TypeError(f"An ensemble's members are a list of oracles, each as it is given alone, got {members!r}.")
    for member in members:
        check_oracle(member)
    check_options(Ensemble, options, "members")
    return lambda: Ensemble([make_oracle(member, dataset=dataset, seed=seed) for member in members], **options)


def _plan_rating(options: dict[str, Any], dataset: Any, seed: int) -> Callable[[], RewardOracle]:
    rater = options["rating"]
    check_options(_rating, options, "dataset")
    if isinstance(rater, Mapping) and rater.keys() == {"policy"}:
        check_policy(rater["policy"])
        return lambda: PolicyRating(rater["policy"])
    if isinstance(rater, Mapping):
        own = {name: value for name, value in options.items() if name != "rating"}
        return _plan_raters({"seed": seed, **own, **rater})
    if rater not in RATERS:
        raise did_you_mean("rater", rater, RATERS)
    return lambda: _rating(**{"seed": seed, **options}, dataset=dataset)


def _rating(*, dataset: Dataset, rating: Any, seed: int) -> RewardOracle:
    return cast(RewardOracle, _sandbox(dataset, f"rater {rating!r}").raters(rating, seed))


def _plan_raters(options: dict[str, Any]) -> Callable[[], RewardOracle]:
    """LLM annotators that rate, or a file of people's ratings."""
    if len(options.keys() & {"pool", "human"}) != 1:
        text = "A mapping names raters by 'pool', 'human', or 'policy' alone"
        raise ValueError(f"{text}, got the keys {_listed(options)}.")
    if "human" in options:
        return _plan_human(options, _human_ratings)
    from ..annotators.pool import check_server, make_pool, make_raters

    _check_pool(options["pool"], rates=True)
    check_options(make_pool, options, "flip", "both_orders", "compat")
    check_server(options)
    return lambda: make_raters(**options)


def _check_pool(name: Any, *, rates: bool) -> None:
    from ..annotators.config import check_form, load_pool

    check_form(load_pool(name), rates=rates)


def _plan_judge(spec: Any, dataset: Any = None, seed: int = 0) -> Callable[[], PreferenceOracle]:
    """Checks a specification and returns what builds the judge."""
    if not isinstance(spec, str | Mapping):
        return _given(spec, "judge", "A judge", "compare")
    if is_own(spec) or (isinstance(spec, Mapping) and is_own(spec.get("name")) and not spec.keys() & {"judge", "pool"}):
        return plan_own("judge", spec, dataset=dataset, seed=seed)
    if isinstance(spec, str):
        if spec not in JUDGES:
            raise did_you_mean("judge", spec, JUDGES)
        if spec == "recorded":
            return lambda: RecordedJudge(_recorded(dataset))
        return lambda: cast(PreferenceOracle, _sandbox(dataset, f"judge {spec!r}").judge(spec, seed))
    if len(spec.keys() & _OF_JUDGES) != 1:
        text = "A mapping names a judge by its key 'judge', 'pool' or 'human'"
        raise ValueError(f"{text}, got the keys {_listed(spec)}.")
    if "human" in spec:
        return _plan_human(spec, _human)
    if "pool" in spec:
        from ..annotators import make_policy_pool, make_pool
        from ..annotators.pool import check_server

        _check_pool(spec["pool"], rates=False)
        if "policy" in spec:
            check_policy(spec["policy"])
        make = make_policy_pool if "policy" in spec else make_pool
        check_options(make, spec)
        if "policy" not in spec:
            check_server(spec)
        return lambda: make(**{"seed": seed, **spec})
    _plan_judge(spec["judge"])
    check_options(_judge, spec, "dataset")
    return lambda: _judge(**{"seed": seed, **spec}, dataset=dataset)


def _plan_human(spec: Mapping[str, Any], make: Callable[..., Any]) -> Callable[[], Any]:
    """What replays people's labels or ratings; it draws nothing, so a seed is taken and means nothing."""
    labels = spec["human"]
    if not isinstance(labels, str | PathLike):
        raise TypeError(f"'human' in a mapping is a file of labels or ratings, got {labels!r}.")
    if not Path(labels).expanduser().is_file():
        raise DataError(f"{labels}: expected a file of people's labels, as annotate-human writes it; there is none.")
    check_options(make, spec)
    return lambda: make(**spec)


def _human(*, human: str | PathLike[str], seed: int = 0) -> PreferenceOracle:
    return HumanJudge(human)


def _human_ratings(*, human: str | PathLike[str], seed: int = 0) -> RewardOracle:
    return HumanRatings(human)


def _listed(keys: Iterable[str]) -> str:
    return ", ".join(map(repr, keys)) or "(none)"


def _given(spec: Any, kind: Kind, what: str, method: str) -> Callable[[], Any]:
    if (found := as_object(spec, kind)) is None:
        raise TypeError(
            f"{what} is given by a name, a mapping or an object with name (a text) and {method} (a method), "
            f"got {'the class ' if isinstance(spec, type) else ''}{spec!r}."
        )
    return lambda: found


def _surrogate(*, dataset: Dataset, **options: Any) -> RewardOracle:
    folder = _sandbox(dataset, "surrogate reward model").REWARD_MODEL
    return RewardModel(folder, **{"name": "surrogate", **options})


def _gold(*, dataset: Dataset) -> RewardOracle:
    return cast(RewardOracle, _sandbox(dataset, "true reward").gold_oracle())


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
    return cast("RecordedDataset", dataset)


def _sandbox(dataset: Dataset, what: str) -> Any:
    """The sandbox's module; DataError for another dataset."""
    if dataset.level == "sandbox":
        return import_module("alpacafarm_env.sandbox")
    instead = "'recorded'" if dataset.level == "recorded" else "{'reward_model': folder}"
    raise DataError(
        f"Only the sandbox has a {what}; dataset {dataset.name!r} is of level {dataset.level!r}. Give oracle={instead} "
        "or {'pool': 'alpaca_farm', 'base_url': url}, or an oracle object of your own."
    )


def _key(spec: Any) -> str | None:
    """The specification as JSON, None if it holds objects; files it names count with their state."""
    try:
        key = json.dumps(spec, sort_keys=True, default=_path)
    except TypeError:
        return None
    if not isinstance(spec, Mapping):
        return key
    if "ensemble" in spec:
        return json.dumps([key, *map(_key, spec["ensemble"])])
    if "pool" in spec:
        from ..annotators.pool import fingerprint

        key = json.dumps([key, fingerprint(spec)])
    for part in ("judge", "rating"):
        if part in spec:
            return json.dumps([key, _key(spec[part])])
    files = [spec[name] for name in ("reward_model", "human", "policy") if name in spec]
    return json.dumps([key, *map(file_states, files)]) if files else key


def _path(value: object) -> str:
    if isinstance(value, PathLike):
        return str(fspath(value))
    raise TypeError
