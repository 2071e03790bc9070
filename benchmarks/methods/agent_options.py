"""Command-line options that set fields of an agent's config."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

from ...errors import AlpacaFarmError, DataError

Config = TypeVar("Config")
_SAME_NAME = (
    *("epochs", "learning_rate", "num_instructions", "rollout_batch_size", "minibatch_size"),
    *("batch_size", "sample_batch_size", "micro_batch_tokens", "mixed_precision", "gradient_checkpointing"),
    *("sharding", "value"),
)
OPTIONS = {"steps": "total_steps", "sampling_batch": "sampling_batch_size"} | {name: name for name in _SAME_NAME}
"""Option -> the field of a config that it sets."""


def option_of(field: str) -> str:
    """The option that sets a field."""
    name = next((option for option, set_field in OPTIONS.items() if set_field == field), field)
    return f"--{name.replace('_', '-')}"


def with_options(config: Config, changed: tuple[tuple[str, Any], ...]) -> Config:
    """The config with other values of some fields, or of those of a config within it that has them.

    Raises:
        DataError: There is no such field, or it cannot have that value.
    """
    places = _places(config)
    if foreign := [option_of(name) for name, _ in changed if name not in places]:
        able = ", ".join(option_of(name) for name in OPTIONS.values() if name in places)
        raise DataError(f"{', '.join(foreign)}: no setting of {type(config).__name__}, which has {able}.")
    with naming(", ".join(f"{option_of(name)} {_text(value)}" for name, value in changed)):
        result: Config = _replaced(config, dict(changed))
    return result


def with_defaults(config: Config, defaults: Mapping[str, Any]) -> Config:
    """The config with other values of those fields that it, or a config within it, has."""
    places = _places(config)
    result: Config = _replaced(config, {name: value for name, value in defaults.items() if name in places})
    return result


def _places(config: Any) -> dict[str, str]:
    """Field -> the field of the config within which it is set; "" for one of the config itself."""
    inner = {each.name: getattr(config, each.name) for each in fields(config)}
    own = {name: "" for name, value in inner.items() if not is_dataclass(value)}
    return own | {each.name: name for name, value in inner.items() if is_dataclass(value) for each in fields(value)}


def _replaced(config: Any, changes: Mapping[str, Any]) -> Any:
    places = _places(config)
    changed = {name: value for name, value in changes.items() if not places[name]}
    for outer in {places[name] for name in changes} - {""}:
        inner = {name: value for name, value in changes.items() if places[name] == outer}
        changed[outer] = replace(getattr(config, outer), **inner)
    return replace(config, **changed)


def _text(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


@contextmanager
def naming(options: str) -> Iterator[None]:
    """Turns a refused value into a DataError that names the options it came from."""
    try:
        yield
    except AlpacaFarmError:
        raise
    except ValueError as error:
        raise DataError(f"{options}: {error}") from error
