"""YAML files of users, read strictly: every mistake of a file is listed at once, each with the path of its field."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from ..errors import PoolError

MAX_BYTES = 1 << 20
"""A file of annotators is a few kilobytes."""
MAX_NODES = 10_000
"""Keys, values, lists and mappings in a file: bounds the time to read one to about a second."""
_MAX_DEPTH = 30
_SHOWN = 60
"""Characters of a wrong value shown in an error."""

Model = TypeVar("Model", bound=BaseModel)


class Strict(BaseModel):
    """Base of everything read from a file: no unknown fields, no type conversion, no NaN, immutable."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


class _Loader(yaml.SafeLoader):
    """`yaml.SafeLoader` without aliases, repeated keys, and more content than a person writes."""

    nodes = depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        self.nodes += 1
        if self.nodes > MAX_NODES or self.depth >= _MAX_DEPTH:
            limit = f"more than {MAX_NODES} values" if self.nodes > MAX_NODES else "nested too deeply"
            raise yaml.MarkedYAMLError(None, None, limit, self.get_mark())
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()  # type: ignore[no-untyped-call]
            raise yaml.MarkedYAMLError(None, None, "aliases (*name) are not allowed here", event.start_mark)
        self.depth += 1
        try:
            return super().compose_node(parent, index)
        finally:
            self.depth -= 1

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[object] = set()
        for key_node, _ in node.value:
            key = key_node.value
            if isinstance(key, str) and key in seen:
                raise yaml.MarkedYAMLError(None, None, f"the key {key!r} stands here twice", key_node.start_mark)
            seen.add(key if isinstance(key, str) else id(key_node))
        return super().construct_mapping(node, deep)


def read_yaml(path: Path) -> Any:
    """The content of one YAML file as plain data.

    Raises:
        PoolError: The file cannot be read, is larger than `MAX_BYTES`, is not UTF-8 or not plain YAML.
    """
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise PoolError(f"{path}: cannot be read ({error.strerror or error}).") from error
    if len(content) > MAX_BYTES:
        raise PoolError(f"{path}: larger than {MAX_BYTES} bytes; expected a short YAML file.")
    try:
        return yaml.load(content.decode("utf-8"), Loader=_Loader)  # noqa: S506 -- a SafeLoader
    except (yaml.YAMLError, ValueError) as error:  # ValueError: not UTF-8, or a date such as 2024-99-99
        raise PoolError(f"{path}: expected YAML{_where(error)}") from error


def _where(error: Exception) -> str:
    mark = error.problem_mark if isinstance(error, yaml.MarkedYAMLError) else None
    place = f" in line {mark.line + 1}, column {mark.column + 1}" if mark else ""
    problem = error.problem if isinstance(error, yaml.MarkedYAMLError) else error
    return f"{place}: {' '.join(str(problem)[:500].split())}."


def check(model: type[Model], content: object, where: object) -> Model:
    """Plain data as an instance of `model`; `where` names it in errors, such as the file's path.

    Raises:
        PoolError: With one line for each mistake.
    """
    if not isinstance(content, Mapping):
        raise PoolError(
            f"{where}: expected a mapping with the fields {', '.join(model.model_fields)}; got {_show(content)}."
        )
    try:
        return model.model_validate(dict(content))
    except ValidationError as error:
        mistakes = [_mistake(model, found) for found in error.errors(include_url=False)]
    raise mistakes_error(where, mistakes)


def mistakes_error(where: object, mistakes: Sequence[str]) -> PoolError:
    """One error for all the mistakes of a file."""
    count = "1 mistake" if len(mistakes) == 1 else f"{len(mistakes)} mistakes"
    return PoolError(f"{where}: {count}:" + "".join(f"\n  {mistake}" for mistake in mistakes))


def hint(name: object, options: Iterable[str]) -> str:
    """To follow an unknown name: " Did you mean 'x'? There are: ..."."""
    known = list(options)
    close = get_close_matches(str(name)[:100], known, n=1)
    return (f" Did you mean {close[0]!r}?" if close else "") + f" There are: {', '.join(known)}."


def _mistake(model: type[BaseModel], found: Any) -> str:
    place = tuple(found["loc"])
    field = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place).lstrip(".")[:200]
    if found["type"] == "extra_forbidden":
        return f"{field}: unknown field.{hint(place[-1], _fields_at(model, place[:-1]))}"
    if found["type"] == "missing":
        return f"{field}: missing."
    if found["type"] == "invalid_key":
        return f"{field}: a field's name must be text; got {_show(place[-1])}."
    message = str(found["msg"]).removeprefix("Value error, ").removeprefix("Input should be ")
    if found["type"] == "value_error":
        return f"{field}: {message}" if field else message
    return f"{field}: expected {message}; got {_show(found['input'])}."


def _fields_at(model: type[BaseModel], place: Sequence[str | int]) -> list[str]:
    """The field names at a place inside `model`."""
    for part in place:
        if isinstance(part, str) and part in model.model_fields:
            model = _inner(model.model_fields[part].annotation) or model
    return list(model.model_fields)


def _inner(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for argument in get_args(annotation) if (found := _inner(argument))), None)


def _show(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."
