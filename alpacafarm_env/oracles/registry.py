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
| "module:Name" | one of a user's own, see `specs` |

A mapping adds keywords to a `name`: `{"name": "constant", "value": 1.0}`; or it has one of the keys `reward_model`
(with those of `RewardModel`), `judge` (the win rate by any judge: flip, both_orders, seed, and the keywords of
`Dialed`), `pool` (the win rate by LLM annotators: those of `annotators.pool.make_pool`), `human` (the win rate by
people's labels, see `HumanJudge`), `rating` (a rating from 1 to 7: by the sandbox's "human", "eval" or "greedy", with a
critique as a detail and a seed; by LLM annotators, `{"pool": name, ...}` with the keywords of
`annotators.pool.RatingPool`; by people, `{"human": file}`, see `HumanRatings`; by `{"policy": an agent, a language
model or a folder}`, see `PolicyRating`) and `ensemble` (those of `Ensemble`). Members of an ensemble that draw, such as
judges with noise, draw alike unless their mappings have a `seed` each.

Each class's fields are the keys of its mapping. Where it `takes` a function or class, further keys are that one's
keywords.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal, Self, TypeAlias, Union

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Discriminator,
    Field,
    Tag,
    TypeAdapter,
    ValidationError,
    model_validator,
)

from ..arguments import FAMILIES, match_family
from ..data import Dataset
from ..errors import DataError, did_you_mean
from .base import NAMES, WIN_RATES, Constant, Kind
from .dials import DIALS, MOST, Dialed
from .judges import BothOrders, Flip, WinRate
from .policies import PolicyRating, check_policy
from .specs import METHODS, Own, OwnJudge, Spec, Taking, as_object, field_error, is_own
from .stored import HumanJudge, HumanRatings, Recorded, RecordedJudge, References


def _is_there(path: str | Path) -> str | Path:
    if not Path(path).expanduser().is_file():
        raise DataError(f"{path}: expected a file of people's labels, as annotate-human writes it; there is none.")
    return path


def _is_policy(policy: object) -> object:
    check_policy(policy)
    return policy


Labels = Annotated[str | Path, AfterValidator(_is_there)]
Policy = Annotated[Any, AfterValidator(_is_policy)]


class LearnedReward(Taking):
    """A reward model in a folder."""

    reward_model: str | Path
    takes = "alpacafarm_env.oracles.reward_model:RewardModel"
    fixed = ("path", "base")

    def _make(self, dataset: Dataset, seed: int) -> Any:
        return self._call(self.reward_model, but="reward_model")


class Surrogate(Taking):
    """The sandbox's reward model."""

    name: Literal["surrogate"]
    takes, fixed = LearnedReward.takes, LearnedReward.fixed

    def _make(self, dataset: Dataset, seed: int) -> Any:
        return self._call(_sandbox(dataset, "surrogate reward model").REWARD_MODEL)


class Gold(Spec):
    """The sandbox's true reward."""

    name: Literal["gold"]

    def _make(self, dataset: Dataset, seed: int) -> Any:
        return _sandbox(dataset, "true reward").gold_oracle()


class Replay(Spec):
    """Stored judgements, of one generator's responses or of all."""

    name: Literal["recorded"]
    generator: str | None = None

    def _make(self, dataset: Dataset, seed: int) -> Any:
        return Recorded(_recorded(dataset), generator=self.generator)


class Fixed(Spec):
    """The same score for every response."""

    name: Literal["constant"]
    value: float = 0.0

    def _make(self, dataset: Dataset, seed: int) -> Any:
        return Constant(self.value)


class Ensembled(Taking):
    """Several oracles as one."""

    ensemble: Annotated[list[AnyOracle], Field(strict=False)]
    takes, fixed = "alpacafarm_env.oracles.ensemble:Ensemble", ("members",)

    def _make(self, dataset: Dataset, seed: int) -> Any:
        return self._call([member.make(dataset, seed) for member in self.ensemble], but="ensemble")


class JudgeSpec(Spec):
    """A judge where a judge is named; where an oracle is, the win rate by it."""

    _judge: ClassVar[Callable[..., Any]]

    def _make(self, dataset: Dataset, seed: int) -> Any:
        return WinRate(self._judge(dataset, seed), References(dataset))


class NamedJudge(JudgeSpec):
    """A judge by its name."""

    name: str

    def _judge(self, dataset: Dataset, seed: int) -> Any:
        if self.name == "recorded":
            return RecordedJudge(_recorded(dataset))
        return _sandbox(dataset, f"judge {self.name!r}").judge(self.name, seed)


Taste = Annotated[float, Field(ge=-MOST, le=MOST, allow_inf_nan=False)]
Scale = Annotated[float, Field(ge=0, le=MOST, allow_inf_nan=False)]


class NoisyJudge(JudgeSpec):
    """Any judge, with noise, asked in both orders, or with the faults of `Dialed`."""

    judge: AnyJudge
    flip: Annotated[float, Field(ge=0, le=0.5)] = 0.0
    both_orders: bool = False
    length_bias: Taste = 0.0
    list_bias: Taste = 0.0
    position_bias: Taste = 0.0
    annotator_noise: Scale = 0.0
    instruction_noise: Scale = 0.0
    temperature: Scale = 0.0
    num_annotators: Annotated[int, Field(ge=1, le=MOST)] = 13
    seed: int = 0

    def _judge(self, dataset: Dataset, seed: int) -> Any:
        seed = self._given(seed=seed)["seed"]
        judge = self.judge._judge(dataset, seed)
        if self.both_orders:
            judge = BothOrders(judge)
        dials = {name: value for name in DIALS if (value := getattr(self, name))}
        if dials:
            judge = Dialed(judge, **dials, num_annotators=self.num_annotators, seed=seed)
        # Noise comes last: a pair that gets a coin costs no call in either order.
        return Flip(judge, self.flip, seed=seed) if self.flip else judge

    def _make(self, dataset: Dataset, seed: int) -> Any:
        # A judge as it is gives its win rate one name, whether it was asked for by the oracle's name or the judge's.
        plain = isinstance(self.judge, NamedJudge) and self.model_fields_set <= {"judge", "seed"}
        names = [name for name, judge in WIN_RATES.items() if plain and FAMILIES.get(judge, judge) == self.judge.name]
        return WinRate(self._judge(dataset, seed), References(dataset), name=names[0] if names else None)


class RaterPool(Taking):
    """LLM annotators behind a server that rate, without noise. No key is among the keywords: they are stored."""

    pool: Any
    rates: ClassVar[bool] = True
    takes = "alpacafarm_env.annotators.pool:RatingPool"
    fixed = ("pool", "api_key")

    @model_validator(mode="after")
    def _check_pool(self) -> Self:
        from ..annotators.config import check_form, load_pool
        from ..annotators.pool import check_server

        check_form(load_pool(self.pool), rates=self.rates)
        check_server(self._given())
        return self

    def _state(self) -> list[Any]:
        from ..annotators.pool import fingerprint

        return [fingerprint(self._given())]

    def _make(self, dataset: Dataset, seed: int) -> Any:
        return self._call(seed=seed)


class Pool(JudgeSpec, RaterPool):
    """LLM annotators behind a server that compare."""

    flip: Annotated[float, Field(ge=0, le=0.5)] | None = None
    both_orders: bool = False
    rates = False
    takes = "alpacafarm_env.annotators.pool:AnnotatorPool"

    def _judge(self, dataset: Dataset, seed: int) -> Any:
        from ..annotators.pool import make_pool

        return make_pool(**self._given(seed=seed))


class People(JudgeSpec):
    """A file of people's labels. It draws nothing, so a seed means nothing."""

    human: Labels
    seed: int = 0

    def _judge(self, dataset: Dataset, seed: int) -> Any:
        return HumanJudge(self.human)


class PeopleRating(People):
    """A file of people's ratings."""

    def _make(self, dataset: Dataset, seed: int) -> Any:
        return HumanRatings(self.human)


class RatingPolicy(Spec):
    """A policy that rates."""

    policy: Policy

    def _make(self, dataset: Dataset, seed: int) -> Any:
        return PolicyRating(self.policy)


class NamedRaters(Spec):
    """Raters of the sandbox."""

    name: str

    def _make(self, dataset: Dataset, seed: int) -> Any:
        return _sandbox(dataset, f"rater {self.name!r}").raters(self.name, seed)


class Rated(Spec):
    """Ratings from 1 to 7."""

    rating: AnyRaters
    seed: int = 0

    def _make(self, dataset: Dataset, seed: int) -> Any:
        return self.rating._make(dataset, self._given(seed=seed)["seed"])


class Given(Spec):
    """An object."""

    object: Any

    def _make(self, dataset: Dataset, seed: int) -> Any:
        return self.object

    _judge = _make


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
        name = keys["name"] = match_family(kind, name, [*NAMES[kind], *(["module:Name"] if kind in METHODS else [])])
        if kind == "oracle" and name in WIN_RATES:
            keys["judge"] = WIN_RATES[keys.pop("name")]
    return keys


def _object(kind: Kind, spec: Any) -> Any:
    if kind == "rater":
        raise did_you_mean(kind, spec, NAMES[kind])
    if (value := as_object(spec, kind)) is None:
        hint = ". It compares pairs: give {'judge': it}" if kind == "oracle" and hasattr(spec, "compare") else ""
        what = f"a name, a mapping or an object (no class) with name and {METHODS[kind]}"
        raise TypeError(f"{kind}: expected {what}, got {spec!r}{hint}.")
    return value


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
    _judges = {"object": Given, "judge": NoisyJudge, "pool": Pool, "human": People}
    _rewards = {"ensemble": Ensembled, "rating": Rated, "reward_model": LearnedReward}
    AnyRaters = _union("rater", pool=RaterPool, human=PeopleRating, policy=RatingPolicy, name=NamedRaters)
    AnyJudge = _union("judge", **_judges, own=OwnJudge, name=NamedJudge)
    AnyOracle = _union("oracle", **_rewards, **_judges, own=Own, name=_named)
_READERS: Final[Mapping[Kind, TypeAdapter[Any]]] = {"oracle": TypeAdapter(AnyOracle), "judge": TypeAdapter(AnyJudge)}


def read_spec(kind: Kind, spec: Any) -> Any:
    """Reads a specification, which needs no dataset. Errors are those of `make_oracle`."""
    try:
        return _READERS[kind].validate_python(spec)
    except ValidationError as error:
        raise field_error(error, kind, spec) from None


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
