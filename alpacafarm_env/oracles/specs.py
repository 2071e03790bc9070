"""Oracles and judges by name, so that an environment's reward can be written as JSON: each class here is one of them.

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
seed; by LLM annotators, `{"pool": name, ...}` with the keywords of `annotators.rating.make_raters`; by people,
`{"human": file}`, see `HumanRatings`; by `{"policy": an agent, a language model or a folder}`, see `PolicyRating`) and
`ensemble` (those of `Ensemble`). Members of an ensemble that draw, such as judges with noise, draw alike unless their
mappings have a `seed` each.

Each class's fields are the keys of its mapping. Where it `takes` a function or class, further keys are that one's
keywords.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from os import PathLike
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal, Self, TypeAlias, Union, get_args, get_origin

import numpy as np
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    TypeAdapter,
    ValidationError,
    create_model,
    model_validator,
)

from ..data import Dataset
from ..errors import AlpacaFarmError, DataError, FieldError, did_you_mean
from ..plugins import find_attribute
from .base import Constant, FunctionOracle, OracleError, PreferenceOracle, RewardOracle
from .human import HumanJudge, HumanRatings
from .judges import BothOrders, Flip, References, WinRate
from .own import METHODS, NAMES, WIN_RATES, Kind, as_object, is_object, is_own
from .policies import check_policy
from .policy_rating import PolicyRating
from .recorded import Recorded, RecordedJudge

_SIMPLE: Final = (bool, int, float, str, NoneType, Path, PathLike[str])
"""Types of values that may come from JSON; what is annotated otherwise is not checked here."""


def _is_there(path: str | PathLike[str]) -> str | PathLike[str]:
    if not Path(path).expanduser().is_file():
        raise DataError(f"{path}: expected a file of people's labels, as annotate-human writes it; there is none.")
    return path


def _is_policy(policy: object) -> object:
    check_policy(policy)
    return policy


Labels = Annotated[str | PathLike[str], AfterValidator(_is_there)]
Policy = Annotated[Any, AfterValidator(_is_policy)]


class Spec(BaseModel):
    """A specification. `_make` builds the oracle or the raters, `_judge` the judge, of a dataset and a seed."""

    model_config = ConfigDict(strict=True, extra="forbid", protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _check_keys(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        for key in given.keys() - cls.model_fields if cls.model_config["extra"] == "forbid" else ():
            raise did_you_mean("option", key, cls.model_fields)
        return {key: _plain(value) for key, value in given.items()}

    def _given(self, **defaults: Any) -> dict[str, Any]:
        """The keys that were given, over `defaults`."""
        values = {**self.__dict__, **(self.model_extra or {})}
        return defaults | {key: value for key, value in values.items() if key in self.model_fields_set}


class Taking(Spec):
    """A specification with the keywords of the function or class that it `takes`, but for those that are `fixed`."""

    model_config = ConfigDict(extra="allow")
    takes: ClassVar[str]
    fixed: ClassVar[tuple[str, ...]] = ()

    @model_validator(mode="after")
    def _check_keywords(self) -> Self:
        keywords_of(find_attribute("Option", self.takes), *self.fixed).model_validate(self.model_extra)
        return self

    def _call(self, *arguments: Any, but: str = "", **defaults: Any) -> Any:
        given = self._given(**defaults)
        given.pop(but, None)
        return find_attribute("Option", self.takes)(*arguments, **given)


class LearnedReward(Taking):
    """A reward model in a folder."""

    reward_model: str | PathLike[str]
    takes = "alpacafarm_env.oracles.reward_model:RewardModel"
    fixed = ("path", "base")

    def _make(self, dataset: Dataset, seed: int) -> RewardOracle:
        return self._call(self.reward_model, but="reward_model")


class Surrogate(Taking):
    """The sandbox's reward model."""

    name: Literal["surrogate"]
    takes, fixed = LearnedReward.takes, LearnedReward.fixed

    def _make(self, dataset: Dataset, seed: int) -> RewardOracle:
        return self._call(_sandbox(dataset, "surrogate reward model").REWARD_MODEL)


class Gold(Spec):
    """The sandbox's true reward."""

    name: Literal["gold"]

    def _make(self, dataset: Dataset, seed: int) -> RewardOracle:
        return _sandbox(dataset, "true reward").gold_oracle()


class Replay(Spec):
    """Stored judgements, of one generator's responses or of all."""

    name: Literal["recorded"]
    generator: str | None = None

    def _make(self, dataset: Dataset, seed: int) -> RewardOracle:
        return Recorded(_recorded(dataset), generator=self.generator)


class Fixed(Spec):
    """The same score for every response."""

    name: Literal["constant"]
    value: float = 0.0

    def _make(self, dataset: Dataset, seed: int) -> RewardOracle:
        return Constant(self.value)


class Ensembled(Taking):
    """Several oracles as one."""

    ensemble: list[AnyOracle]
    takes, fixed = "alpacafarm_env.oracles.ensemble:Ensemble", ("members",)

    def _make(self, dataset: Dataset, seed: int) -> RewardOracle:
        return self._call([member._make(dataset, seed) for member in self.ensemble], but="ensemble")


class JudgeSpec(Spec):
    """A judge where a judge is named; where an oracle is, the win rate by it."""

    _judge: ClassVar[Callable[..., Any]]

    def _make(self, dataset: Dataset, seed: int) -> RewardOracle:
        return WinRate(self._judge(dataset, seed), References(dataset))


class NamedJudge(JudgeSpec):
    """A judge by its name."""

    name: str

    def _judge(self, dataset: Dataset, seed: int) -> PreferenceOracle:
        if self.name == "recorded":
            return RecordedJudge(_recorded(dataset))
        return _sandbox(dataset, f"judge {self.name!r}").judge(self.name, seed)


class NoisyJudge(JudgeSpec):
    """Any judge, with noise or asked in both orders."""

    judge: AnyJudge
    flip: Annotated[float, Field(ge=0, le=0.5)] = 0.0
    both_orders: bool = False
    seed: int = 0

    def _judge(self, dataset: Dataset, seed: int) -> PreferenceOracle:
        seed = self._given(seed=seed)["seed"]
        judge = self.judge._judge(dataset, seed)
        if self.both_orders:
            judge = BothOrders(judge)
        # Noise comes last: a pair that gets a coin costs no call in either order.
        return Flip(judge, self.flip, seed=seed) if self.flip else judge

    def _make(self, dataset: Dataset, seed: int) -> RewardOracle:
        # A judge as it is gives its win rate one name, whether it was asked for by the oracle's name or the judge's.
        plain = isinstance(self.judge, NamedJudge) and self.model_fields_set <= {"judge", "seed"}
        names = [name for name, judge in WIN_RATES.items() if plain and judge == self.judge.name]
        return WinRate(self._judge(dataset, seed), References(dataset), name=names[0] if names else None)


class PolicyPool(JudgeSpec, Taking):
    """A policy that answers for LLM annotators."""

    policy: Policy
    takes = "alpacafarm_env.annotators.policy_pool:make_policy_pool"
    fixed = ("policy",)

    def _judge(self, dataset: Dataset, seed: int) -> PreferenceOracle:
        return self._call(seed=seed)


class Pool(JudgeSpec, Taking):
    """LLM annotators behind a server."""

    pool: Any
    rates: ClassVar[bool] = False
    takes = "alpacafarm_env.annotators.pool:make_pool"
    fixed = ("pool",)

    @model_validator(mode="after")
    def _check_pool(self) -> Self:
        from ..annotators.config import check_form, load_pool
        from ..annotators.served import check_server

        check_form(load_pool(self.pool), rates=self.rates)
        check_server(self._given())
        return self

    def _judge(self, dataset: Dataset, seed: int) -> PreferenceOracle:
        return self._call(seed=seed)


class RaterPool(Pool):
    """LLM annotators that rate, without noise."""

    rates = True
    fixed = ("pool", "flip", "both_orders", "compat")

    def _make(self, dataset: Dataset, seed: int) -> RewardOracle:
        return find_attribute("Option", "alpacafarm_env.annotators.rating:make_raters")(**self._given(seed=seed))


class People(JudgeSpec):
    """A file of people's labels. It draws nothing, so a seed means nothing."""

    human: Labels
    seed: int = 0

    def _judge(self, dataset: Dataset, seed: int) -> PreferenceOracle:
        return HumanJudge(self.human)


class PeopleRating(People):
    """A file of people's ratings."""

    def _make(self, dataset: Dataset, seed: int) -> RewardOracle:
        return HumanRatings(self.human)


class RatingPolicy(Spec):
    """A policy that rates."""

    policy: Policy

    def _make(self, dataset: Dataset, seed: int) -> RewardOracle:
        return PolicyRating(self.policy)


class NamedRaters(Spec):
    """Raters of the sandbox."""

    name: str

    def _make(self, dataset: Dataset, seed: int) -> RewardOracle:
        return _sandbox(dataset, f"rater {self.name!r}").raters(self.name, seed)


class Rated(Spec):
    """Ratings from 1 to 7."""

    rating: AnyRaters
    seed: int = 0

    def _make(self, dataset: Dataset, seed: int) -> RewardOracle:
        return self.rating._make(dataset, self._given(seed=seed)["seed"])


class Given(Spec):
    """An object."""

    object: Any

    def _make(self, dataset: Dataset, seed: int) -> Any:
        return self.object

    _judge = _make


class Own(Spec):
    """A user's own `module:Name`, and its keywords."""

    model_config = ConfigDict(extra="allow")
    name: str
    kind: ClassVar[Kind] = "oracle"

    @model_validator(mode="after")
    def _check_it(self) -> Self:
        value, options = self._look_up()
        if is_object(value, self.kind):
            if options:
                raise TypeError(f"{self.name!r} is an object and takes no keywords, got {', '.join(options)}.")
        elif not callable(value) or (
            isinstance(value, type) and not callable(getattr(value, METHODS[self.kind], None))
        ):
            raise self._no_such(value)
        else:
            place = dict.fromkeys(inspect.signature(value).parameters.keys() & {"dataset", "seed"}, 0)
            keywords_of(value, *self._batch(value)).model_validate(place | options)
        return self

    def _look_up(self) -> tuple[Any, dict[str, Any]]:
        return find_attribute(self.kind.capitalize(), self.name), self.model_extra or {}

    def _batch(self, value: Any) -> list[str]:
        """The parameters of a function that scores, [] for what makes an oracle."""
        names = [*inspect.signature(value).parameters][:2]
        return names if self.kind == "oracle" and names == ["instructions", "responses"] else []

    def _make(self, dataset: Dataset, seed: int) -> Any:
        value, options = self._look_up()
        if is_object(value, self.kind):
            return value
        if self._batch(value):
            return FunctionOracle(partial(value, **options), name=self.name.partition(":")[2])
        place = {"dataset": dataset, "seed": seed}
        try:
            made = value(**{key: place[key] for key in place.keys() & inspect.signature(value).parameters} | options)
        except AlpacaFarmError:
            raise
        except Exception as error:
            text = f"{self.kind.capitalize()} {self.name!r} raised {type(error).__name__}: {error}"
            raise OracleError(text) from error
        if (oracle := as_object(made, self.kind)) is None:
            raise self._no_such(made)
        return oracle

    def _no_such(self, value: object) -> TypeError:
        compares = self.kind == "oracle" and hasattr(value, "compare")
        hint = f" It compares pairs: give {{'judge': {self.name!r}}}." if compares else ""
        return TypeError(
            f"{self.kind.capitalize()} {self.name!r}: expected an object with name (a text) and {METHODS[self.kind]} "
            f"(a method), or a class or function that makes one, got {value!r}.{hint}"
        )


class OwnJudge(Own):
    """A user's own judge."""

    kind = "judge"
    _judge = Own._make


def keywords_of(build: Callable[..., Any], *fixed: str) -> type[Spec]:
    """A specification whose fields are a function's or a class's keywords, as annotated, but for those `fixed`."""
    try:
        parameters = inspect.signature(build, eval_str=True).parameters.values()
    except Exception:  # noqa: BLE001 -- code of a user's: a name may be there for type checkers alone
        parameters = inspect.signature(build).parameters.values()
    fields: dict[str, Any] = {}
    for each in parameters:
        if each.name not in fixed and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD):
            hint = each.annotation
            kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else [hint]
            simple = all(kind in _SIMPLE or get_origin(kind) is Literal for kind in kinds)
            fields[each.name] = (hint if simple else Any, ... if each.default is each.empty else each.default)
    extra = "allow" if any(each.kind is each.VAR_KEYWORD for each in parameters) else "forbid"
    return create_model("Keywords", __base__=Spec, __cls_kwargs__={"extra": extra}, **fields)


def _plain(value: Any) -> Any:
    """A number of numpy's and a tuple as JSON has them, anything else as it is."""
    return value.item() if isinstance(value, np.generic) else [*value] if isinstance(value, tuple) else value


def _union(kind: Kind, **members: Any) -> Any:
    """A union whose members are told apart by their keys, the first of these that a mapping has."""
    tagged = tuple(Annotated[member, Tag(f"<{key}>")] for key, member in members.items())

    def tag(spec: Mapping[str, Any]) -> str:
        key = next(key for key in members if key in spec)
        return "<own>" if key == "name" and is_own(spec["name"]) else f"<{key}>"

    return Annotated[Union[tagged], Discriminator(tag), BeforeValidator(partial(_as_mapping, kind))]  # noqa: UP007


def _as_mapping(kind: Kind, spec: Any) -> dict[str, Any]:
    """A name or an object as a mapping too; of a mapping, whether it says one thing, and by a name that is known."""
    if not isinstance(spec, str | Mapping):
        return {"object": _object(kind, spec)}
    keys = {"name": spec} if isinstance(spec, str) else dict(spec)
    main = [key for key in _MAIN[kind] if key in keys]
    if main and main[0] in ("ensemble", "reward_model"):
        main = [key for key in main if key != "name"]  # that is theirs to choose
    if len(main) != 1:
        # No TypeError: gym.make would add all keywords to its message, and a key given by mistake with them.
        listed = ", ".join(map(repr, keys)) or "(none)"
        raise ValueError(f"{kind}: expected a mapping with one of {', '.join(_MAIN[kind])}, got the keys {listed}.")
    if main == ["name"] and not is_own(name := keys["name"]):
        if name not in NAMES[kind]:
            raise did_you_mean(kind, name, [*NAMES[kind], *(["module:Name"] if kind in METHODS else [])])
        if kind == "oracle" and name in WIN_RATES:
            keys["judge"] = WIN_RATES[keys.pop("name")]
    return keys


def _object(kind: Kind, spec: Any) -> Any:
    if kind == "rater":
        raise did_you_mean(kind, spec, NAMES[kind])
    if (value := as_object(spec, kind)) is not None:
        return value
    if kind == "oracle" and is_object(spec, "judge"):
        raise TypeError(f"{spec!r} compares pairs and scores nothing: give {{'judge': it}}, the win rate by it.")
    what = f"{'the class ' if isinstance(spec, type) else ''}{spec!r}"
    raise TypeError(f"{kind}: expected a name, a mapping or an object with name and {METHODS[kind]}, got {what}.")


_MAIN: Final[Mapping[Kind, tuple[str, ...]]] = {
    "oracle": ("ensemble", "rating", "reward_model", "judge", "pool", "human", "name"),
    "judge": ("judge", "pool", "human", "name"),
    "rater": ("pool", "human", "policy", "name"),
}
"""Keys of a mapping that say what it is; it has one of them."""
if TYPE_CHECKING:
    AnyOracle: TypeAlias = Any
    AnyJudge: TypeAlias = Any
    AnyRaters: TypeAlias = Any
else:
    _named = Annotated[Surrogate | Gold | Replay | Fixed, Field(discriminator="name")]
    _judges = {"object": Given, "judge": NoisyJudge, "policy": PolicyPool, "pool": Pool, "human": People}
    _rewards = {"ensemble": Ensembled, "rating": Rated, "reward_model": LearnedReward}
    AnyRaters = _union("rater", pool=RaterPool, human=PeopleRating, policy=RatingPolicy, name=NamedRaters)
    AnyJudge = _union("judge", **_judges, own=OwnJudge, name=NamedJudge)
    AnyOracle = _union("oracle", **_rewards, **_judges, own=Own, name=_named)
_READERS: Final[Mapping[Kind, TypeAdapter[Any]]] = {"oracle": TypeAdapter(AnyOracle), "judge": TypeAdapter(AnyJudge)}


def plan(kind: Kind, spec: Any) -> Callable[[Dataset, int], Any]:
    """Checks a specification, which needs no dataset, and returns what builds it, of a dataset and a seed.

    Raises:
        UnknownNameError: No oracle or judge of that name, or a keyword that it does not take.
        DataError: A value is not as expected; names its field.
        TypeError, ValueError: The specification is of another type, or names no oracle or more than one.
    """
    try:
        read = _READERS[kind].validate_python(spec)
    except ValidationError as error:
        raise _first(error, kind, spec) from None
    build: Callable[[Dataset, int], Any] = read._make if kind == "oracle" else read._judge
    return build


def _first(error: ValidationError, path: str, spec: Any) -> Exception:
    """The error about the first faulty field: one of ours as it was raised, or a FieldError."""
    faults, value = error.errors(), spec
    fault = faults[0]
    for key in fault["loc"]:  # keys and places, but tags of unions too
        if (isinstance(value, Mapping) and key in value) or (isinstance(value, list) and isinstance(key, int)):
            path, value = f"{path}.{key}", value[key]
    if inner := fault.get("ctx", {}).get("error"):
        return _first(inner, path, value) if isinstance(inner, ValidationError) else inner
    if fault["type"] == "missing":
        return FieldError(f"{path}.{fault['loc'][-1]}", "expected a value, got none")
    expected = [each["msg"].removeprefix("Input should be ") for each in faults if each["input"] is fault["input"]]
    return FieldError(path, f"expected {' or '.join(dict.fromkeys(expected))}, got {fault['input']!r:.60}")


def _recorded(dataset: Dataset) -> Any:
    if not hasattr(dataset, "recorded_verdicts"):
        raise DataError(
            f"Dataset {dataset.name!r} ({dataset.level}) has no recorded judgements. Give a folder with "
            "eval_instructions, davinci003, outputs/ and preferences_*, or another oracle."
        )
    return dataset


def _sandbox(dataset: Dataset, what: str) -> Any:
    """The sandbox's module; DataError for another dataset."""
    if dataset.level == "sandbox":
        return import_module("alpacafarm_env.sandbox")
    instead = "'recorded'" if dataset.level == "recorded" else "{'reward_model': folder}"
    raise DataError(
        f"Only the sandbox has a {what}; dataset {dataset.name!r} is of level {dataset.level!r}. Give oracle={instead} "
        "or {'pool': 'alpaca_farm', 'base_url': url}, or an oracle object of your own."
    )
