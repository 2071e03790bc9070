"""Pools of annotators, their prompts and their models, as YAML files.

A pool gives each annotator a prompt, a role, a temperature and a batch size; a list of models says who plays each role,
so the same pool runs on OpenAI's models, on a local server and on the sandbox.

A prompt of your own is a file like those in prompts/. Paths in a file are relative to it.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from functools import cache, cached_property
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, RootModel, ValidationError, model_validator

from ..arguments import match_name
from ..errors import PoolError, UnknownNameError, did_you_mean

Format = Literal["lines", "json", "label", "logprobs", "rating"]
Layout = Literal["chat", "completion"]
ROLES: Final = ("gpt4", "chatgpt", "davinci003")
"""The roles of the paper's annotators."""

_FOLDER: Final = Path(__file__).parent
_Name = Annotated[str, Field(min_length=1, max_length=100, pattern=r"^[A-Za-z0-9_.-]+$")]
_Text = Annotated[str, Field(min_length=1)]
_Price = Annotated[float, Field(ge=0)]
_REASONING: Final = {
    "max_tokens_field": "max_completion_tokens",
    "omit": ("temperature", "top_p"),
    "extra_tokens": 4000,
}
"""Settings of OpenAI's reasoning models: another name of the limit, no sampling settings, room to think."""


MAX_BYTES: Final = 1 << 16
"""A file of annotators is a few kilobytes. The limit bounds the time to read one, too."""
Model = TypeVar("Model", bound=BaseModel)


class Strict(BaseModel):
    """Base of everything read from a file: no unknown fields, no type conversion, no NaN, immutable."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


class Pair(Strict):
    """A worked example inside a prompt."""

    instruction: str
    first: str
    second: str


class Part(Strict):
    """One piece of a prompt, which has exactly one of the five fields."""

    system: _Text | None = None
    user: _Text | None = None
    assistant: _Text | None = None
    """An earlier answer, in the requested format."""
    pairs: Annotated[tuple[Pair, ...], Field(strict=False, min_length=1)] | None = None
    """Worked examples, shown in a user message like the pairs to judge."""
    items: Literal[True] | None = None
    """`true` where the pairs to judge go."""

    @model_validator(mode="after")
    def _one_of(self) -> Self:
        given = [name for name in type(self).model_fields if getattr(self, name) is not None]
        if len(given) != 1:
            fields = ", ".join(type(self).model_fields)
            raise ValueError(f"a part has exactly one of {fields}; got {', '.join(given) or 'none of them'}.")
        return self

    @property
    def role(self) -> str:
        """The message it belongs to: "system", "user" or "assistant"."""
        return "system" if self.system is not None else "assistant" if self.assistant is not None else "user"


class Prompt(Strict):
    """How an annotator is asked; neighbouring parts of one role make one message, with a blank line between them."""

    name: _Name
    description: str = ""
    format: Format
    """The reply's, see `prompts`."""
    layout: Layout
    """"chat": messages; "completion": one text that ends with a cue."""
    parts: Annotated[tuple[Part, ...], Field(strict=False, min_length=1)]
    """One of them is `items`, in the last message, which is the user's."""

    def __hash__(self) -> int:
        """By the name: prompts are keys of caches, and to hash all their texts takes longer than to answer."""
        return hash(self.name)

    @model_validator(mode="after")
    def _order(self) -> Self:
        roles = [part.role for part in self.parts]
        places = [index for index, part in enumerate(self.parts) if part.items]
        if len(places) != 1:
            raise ValueError(f"parts: expected `items: true` exactly once, got it {len(places)} times.")
        if any(role != "user" for role in roles[places[0] :]):
            raise ValueError("parts: only `user` may follow `items`: the pairs to judge are in the last message.")
        if "system" in roles[1:]:
            raise ValueError("parts: `system` may stand first only.")
        if self.layout == "completion" and set(roles) != {"user"}:
            raise ValueError("parts: a prompt with `layout: completion` is one text: write `user`, not other roles.")
        examples = [len(part.pairs or ()) for part in self.parts]
        if any(examples) and self.rates:
            raise ValueError("parts: with `format: rating` single responses are shown: leave `pairs` out.")
        if max(examples) > 1 and not self.batched:
            raise ValueError(f"parts: with `format: {self.format}` the examples come one by one, not in batches.")
        return self

    @property
    def batched(self) -> bool:
        """Whether a reply can answer for several pairs."""
        return self.format in ("lines", "json", "rating")

    @property
    def rates(self) -> bool:
        """Whether it shows single responses, to be rated, and not pairs."""
        return self.format == "rating"

    @cached_property
    def digest(self) -> str:
        """SHA-256 of what is sent, without name and description."""
        content = self.model_dump(mode="json", include={"format", "layout", "parts"})
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


class AnnotatorConfig(Strict):
    """One member of a pool."""

    name: _Name
    role: _Name
    """"gpt4", "chatgpt", "davinci003" or one of your own; `load_models` says which model plays it."""
    prompt: _Text
    """A prompt's name (see `names("prompts")`) or the path of its file."""
    batch_size: Annotated[int, Field(ge=1, le=100)] = 1
    """Pairs asked in one request."""
    max_tokens: Annotated[int, Field(ge=1, le=100_000)]
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0


class PoolConfig(Strict):
    """A pool of annotators."""

    name: _Name
    description: str = ""
    flip: Annotated[float, Field(ge=0, le=0.5)] = 0.0
    """Probability that a verdict is flipped; 0.25 in AlpacaFarm's training."""
    annotators: Annotated[tuple[AnnotatorConfig, ...], Field(strict=False)] = ()
    """Its members, each drawn with equal probability. Filled in by `load_pool` for `annotators_of`."""
    annotators_of: _Text | None = None
    """Instead: another pool (a name or a path) whose members it shares."""
    draws: _Name | None = None
    """The name of its random draws: pools with the same name and number of members draw the same member and order for a
    pair. By default that of the pool in `annotators_of`, or else its own name."""

    @model_validator(mode="after")
    def _members(self) -> Self:
        if bool(self.annotators) == bool(self.annotators_of):
            raise ValueError("a pool has one or more `annotators`, or else `annotators_of`: the name of another pool.")
        taken = [annotator.name for annotator in self.annotators]
        twice = sorted({name for name in taken if taken.count(name) > 1})
        if twice:
            raise ValueError(f"annotators: the names must differ; more than once: {', '.join(twice)}.")
        return self

    @property
    def stream(self) -> str:
        """The name of its random draws."""
        return self.draws or self.name

    @property
    def roles(self) -> tuple[str, ...]:
        """The roles its members play, each once."""
        return tuple(dict.fromkeys(annotator.role for annotator in self.annotators))


class ModelConfig(Strict):
    """The model behind a role; OpenAI's reasoning models (o1, o3, o4, gpt-5...) get defaults of their own."""

    model: _Text
    kind: Layout = "chat"
    """The endpoint."""
    max_tokens_field: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"
    """The server's name for the limit of a reply."""
    omit: Annotated[tuple[Literal["temperature", "top_p", "n", "seed", "stop"], ...], Field(strict=False)] = ()
    """Settings that this model refuses."""
    extra_tokens: Annotated[int, Field(ge=0, le=100_000)] = 0
    """Added to every limit, for a reasoning model's thoughts."""
    price_usd_per_million: Annotated[tuple[_Price, _Price], Field(strict=False)] | None = None
    """[input, output]; known models need none."""

    @model_validator(mode="before")
    @classmethod
    def _reasoning(cls, content: Any) -> Any:
        if isinstance(content, str):
            content = {"model": content}
        name = content.get("model") if isinstance(content, dict) else None
        return {**_REASONING, **content} if str(name).startswith(("o1", "o3", "o4", "gpt-5")) else content


_Models = RootModel[dict[str, ModelConfig]]


@cache
def names(folder: Literal["pools", "prompts", "models"]) -> tuple[str, ...]:
    """The names of the package's own files, sorted."""
    return tuple(sorted(path.stem for path in (_FOLDER / folder).glob("*.yaml")))


def load_pool(name_or_path: str | Path) -> PoolConfig:
    """A pool by its name ("alpaca_farm", "eval", "ann", "greedy", "weighted"; "raters", which rates) or from a file.

    The members of `annotators_of` are filled in, and the paths of prompts made absolute.

    Raises:
        PoolError: No such pool, or its file or a prompt's is malformed; lists every mistake of the file.
    """
    return _load_pool(name_or_path, Path(), ())


def _load_pool(name_or_path: str | Path, folder: Path, before: tuple[Path, ...]) -> PoolConfig:
    path = _find("pools", name_or_path, folder)
    if path in before:
        raise PoolError(f"{path}: `annotators_of` leads back to this pool; expected one with `annotators` at its end.")
    pool = check(PoolConfig, read_yaml(path), path)
    if pool.annotators_of:
        shared = _load_pool(pool.annotators_of, path.parent, (*before, path))
        return pool.model_copy(update={"annotators": shared.annotators, "draws": pool.draws or shared.stream})
    members = tuple(_with_prompt(member, path) for member in pool.annotators)
    return pool.model_copy(update={"annotators": members})


def _with_prompt(member: AnnotatorConfig, pool: Path) -> AnnotatorConfig:
    try:
        prompt = load_prompt(member.prompt, folder=pool.parent)
    except PoolError as error:
        raise PoolError(f"{pool}: the prompt of {member.name!r}: {error}") from error
    if member.batch_size > 1 and not prompt.batched:
        raise PoolError(
            f"{pool}: batch_size of {member.name!r}: expected 1 with the prompt {prompt.name!r}, whose format "
            f"{prompt.format!r} answers for one pair; got {member.batch_size}."
        )
    if member.prompt in names("prompts"):
        return member
    return member.model_copy(update={"prompt": str(_find("prompts", member.prompt, pool.parent))})


def check_form(pool: PoolConfig, *, rates: bool) -> None:
    """Refuses a pool whose annotators rate responses where they should compare pairs, or the other way round.

    Raises:
        PoolError: Names such an annotator; or ratings were to be flipped.
    """
    if rates and pool.flip:
        raise PoolError(f"Pool {pool.name!r}: flip: expected 0, as ratings are not flipped; got {pool.flip}.")
    for member in pool.annotators:
        prompt = load_prompt(member.prompt)
        if prompt.rates != rates:
            does, wanted = ("rates single responses", "compare pairs") if prompt.rates else ("compares pairs", "rate")
            raise PoolError(
                f"Pool {pool.name!r}: expected annotators that {wanted}, but the prompt {prompt.name!r} of "
                f"{member.name!r} {does}. A pool that compares is given by {{'pool': name}}, one that rates by "
                "{'rating': {'pool': name}}."
            )


def load_prompt(name_or_path: str | Path, *, folder: Path | None = None) -> Prompt:
    """A prompt by its name (see `names("prompts")`) or from a file; paths are relative to `folder`.

    Raises:
        PoolError: No such prompt, or its file is malformed; lists every mistake.
    """
    path = _find("prompts", name_or_path, folder or Path())
    return _bundled_prompt(path) if path.parent == _FOLDER / "prompts" else check(Prompt, read_yaml(path), path)


@cache
def _bundled_prompt(path: Path) -> Prompt:
    return check(Prompt, read_yaml(path), path)


def load_models(
    spec: str | Path | Mapping[str, Any] | ModelConfig | None = None,
    roles: Iterable[str] = ROLES,
    model: str | None = None,
) -> dict[str, ModelConfig]:
    """The model for each role.

    Args:
        spec: "openai", "sandbox", or the path of a YAML file; "model=NAME", a `ModelConfig` or its fields as a mapping
            ({"model": "llama-3"}) for one model in all roles; a mapping from role to a model's name or its fields. A
            file holds either of the two mappings. None: `model`, or "openai".
        roles: The roles to fill.
        model: One model for all of them, instead of `spec`.

    Raises:
        PoolError: No such list, it is malformed, or it lacks a role; or `spec` and `model` are both given.
    """
    if spec is not None and model is not None:
        raise PoolError(f"Give models or model, not both; got models={spec!r} and model={model!r}.")
    wanted, where = tuple(roles), "models"
    content = {"model": model} if model is not None else "openai" if spec is None else spec
    if isinstance(content, ModelConfig):
        return dict.fromkeys(wanted, content)
    if isinstance(content, str) and content.startswith("model="):
        content = {"model": content.removeprefix("model=")}
    elif isinstance(content, str | Path):
        path = _find("models", content, Path())
        where, content = str(path), read_yaml(path)
    if not isinstance(content, Mapping):
        raise PoolError(f"{where}: expected a mapping from role to model; got {type(content).__name__}.")
    if "model" in content and not isinstance(content["model"], ModelConfig):  # else it is a role of that name
        return dict.fromkeys(wanted, check(ModelConfig, content, where))
    models = check(_Models, content, where).root
    if missing := [role for role in wanted if role not in models]:  # a file may hold roles of other pools too
        given = ", ".join(models) or "none"
        raise PoolError(f"{where}: expected a model for each of {', '.join(wanted)}; got {given}, not {missing[0]}.")
    return {role: models[role] for role in wanted}


def _find(folder: Literal["pools", "prompts", "models"], name_or_path: str | Path, relative_to: Path) -> Path:
    """The file of a name or a path; something with a slash or ".yaml" is a path."""
    text = str(name_or_path)
    if isinstance(name_or_path, Path) or "/" in text or text.endswith((".yaml", ".yml")):
        return (relative_to / Path(text).expanduser()).resolve()
    try:
        return _FOLDER / folder / f"{match_name(folder.removesuffix('s'), text, names(folder))}.yaml"
    except UnknownNameError as error:
        raise PoolError(f"{error} Or give the path of a .yaml file.") from error


class _Loader(yaml.SafeLoader):
    """`yaml.SafeLoader` without aliases, which can make much of little, and repeated keys."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("aliases (*name) are not allowed here")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        keys = Counter(key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode))
        if twice := [key for key, times in keys.items() if times > 1]:
            raise yaml.MarkedYAMLError(None, None, f"the key {twice[0]!r} stands here twice", node.start_mark)
        return super().construct_mapping(node, deep)


def read_yaml(path: Path) -> Any:
    """The content of one YAML file as plain data.

    Raises:
        PoolError: The file cannot be read, is larger than `MAX_BYTES`, is not UTF-8 or not plain YAML.
    """
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise OSError(f"it is larger than {MAX_BYTES} bytes")
        return yaml.load(content.decode("utf-8"), Loader=_Loader)  # noqa: S506 -- a SafeLoader
    except OSError as error:
        raise PoolError(f"{path}: cannot be read ({error.strerror or error}).") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # a date as 2024-99-99, "[[[..."
        problem = " ".join(str(error)[:500].split())
    raise PoolError(f"{path}: expected YAML: {problem}.")


def check(model: type[Model], content: object, where: object) -> Model:
    """Plain data as an instance of `model`; `where` names it in errors, such as the file's path.

    Raises:
        PoolError: With one line for each mistake.
    """
    try:
        return model.model_validate(content)
    except ValidationError as error:
        mistakes = [_mistake(model, details) for details in error.errors(include_url=False)]
    raise PoolError(f"{where}:" + "".join(f"\n  {mistake}" for mistake in mistakes))


def _mistake(model: type[BaseModel], details: Any) -> str:
    place = ".".join(map(str, details["loc"]))[:200]
    if details["type"] == "extra_forbidden":
        schema = model.model_json_schema()
        parts = [schema, *schema.get("$defs", {}).values()]
        names = dict.fromkeys(name for part in parts for name in part.get("properties", ()))
        return f"{place}: {did_you_mean('field', str(details['loc'][-1])[:100], names)}"
    return f"{place}: {details['msg']}; got {details['input']!r:.60}."
