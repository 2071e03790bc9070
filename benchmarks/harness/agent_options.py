"""Command-line options that set fields of an agent's config."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any, TypeVar

from ...errors import AlpacaFarmError, DataError

Config = TypeVar("Config")
_SAME_NAME = (
    *("epochs", "learning_rate", "num_instructions", "rollout_batch_size", "minibatch_size"),
    *("batch_size", "sample_batch_size", "micro_batch_tokens"),
)
OPTIONS = {"steps": "total_steps"} | {name: name for name in _SAME_NAME}
"""Option -> the field of a config that it sets."""


def option_of(field: str) -> str:
    """The option that sets a field."""
    name = next((option for option, set_field in OPTIONS.items() if set_field == field), field)
    return f"--{name.replace('_', '-')}"


def with_options(config: Config, changed: tuple[tuple[str, float], ...]) -> Config:
    """The config with other values of some fields; DataError if it has no such field, or cannot have that value."""
    given: Any = config
    known = {field.name for field in fields(given)}
    if foreign := [option_of(name) for name, _ in changed if name not in known]:
        able = ", ".join(option_of(name) for name in OPTIONS.values() if name in known)
        raise DataError(f"{', '.join(foreign)}: no setting of {type(given).__name__}, which has {able}.")
    with naming(", ".join(f"{option_of(name)} {value:g}" for name, value in changed)):
        found: Config = replace(given, **dict(changed))
    return found


@contextmanager
def naming(options: str) -> Iterator[None]:
    """Turns a refused value into a DataError that names the options it came from."""
    try:
        yield
    except AlpacaFarmError:
        raise
    except ValueError as error:
        raise DataError(f"{options}: {error}") from error
