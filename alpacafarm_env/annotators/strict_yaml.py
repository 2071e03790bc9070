"""YAML files of users, read strictly: every mistake of a file is listed at once, each with the path of its field."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from ..errors import PoolError, did_you_mean

MAX_BYTES = 1 << 16
"""A file of annotators is a few kilobytes. The limit bounds the time to read one, too."""
_SHOWN = 60
"""Characters of a wrong value shown in an error."""

Model = TypeVar("Model", bound=BaseModel)


class Strict(BaseModel):
    """Base of everything read from a file: no unknown fields, no type conversion, no NaN, immutable."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


class _Loader(yaml.SafeLoader):
    """`yaml.SafeLoader` without aliases, which can make much of little, and repeated keys."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise yaml.MarkedYAMLError(None, None, "aliases (*name) are not allowed here", mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                raise yaml.MarkedYAMLError(None, None, f"the key {key.value!r} stands here twice", key.start_mark)
            seen.add(key.value)
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
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f" in line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem: object = error.problem
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # not UTF-8, a date such as 2024-99-99, "[[[[..."
        place, problem = "", error
    raise PoolError(f"{path}: expected YAML{place}: {' '.join(str(problem)[:500].split())}.")


def check(model: type[Model], content: object, where: object) -> Model:
    """Plain data as an instance of `model`; `where` names it in errors, such as the file's path.

    Raises:
        PoolError: With one line for each mistake.
    """
    if not isinstance(content, Mapping):
        fields = ", ".join(model.model_fields)
        raise PoolError(f"{where}: expected a mapping with the fields {fields}; got {_show(content)}.")
    try:
        return model.model_validate(dict(content))
    except ValidationError as error:
        mistakes = [_mistake(model, details) for details in error.errors(include_url=False)]
    raise mistakes_error(where, mistakes)


def mistakes_error(where: object, mistakes: Sequence[str]) -> PoolError:
    """One error for all the mistakes of a file."""
    count = "1 mistake" if len(mistakes) == 1 else f"{len(mistakes)} mistakes"
    return PoolError(f"{where}: {count}:" + "".join(f"\n  {mistake}" for mistake in mistakes))


def _mistake(model: type[BaseModel], details: Any) -> str:
    *_, last = place = tuple(details["loc"]) or ("",)
    field = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place).lstrip(".")[:200]
    message = str(details["msg"]).removeprefix("Value error, ").removeprefix("Input should be ")
    match details["type"]:
        case "extra_forbidden":
            schema = model.model_json_schema()
            parts = [schema, *schema.get("$defs", {}).values()]
            names = dict.fromkeys(name for part in parts for name in part.get("properties", ()))
            return f"{field}: {did_you_mean('field', str(last)[:100], names)}"
        case "missing":
            return f"{field}: missing."
        case "value_error":
            return f"{field}: {message}" if field else message
    return f"{field}: expected {message}; got {_show(details['input'])}."


def _show(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."
