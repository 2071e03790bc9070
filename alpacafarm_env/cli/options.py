"""A command's options: those of the command line, over those of a YAML file, over the defaults.

Commands are dataclasses that tyro reads: a field is an option and its docstring the help.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields, make_dataclass
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, ClassVar, Final, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

import pydantic
import tyro
import yaml
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from ..arguments import match_name
from ..data.files import write_atomic
from ..errors import DataError

RUN_FILE: Final = "run.yaml"
"""What a run leaves in its folder: its options, for --config."""
Seed = Annotated[int, pydantic.Field(ge=0, lt=2**63)]
"""Seeds: those that a database and a server's JSON can hold."""
Count = Annotated[int, pydantic.Field(ge=1)]
Port = Annotated[int, pydantic.Field(ge=0, le=65535)]
Positive = Annotated[float, pydantic.Field(gt=0, allow_inf_nan=False)]
T = TypeVar("T", bound="Options")


@dataclass(frozen=True)
class Report:
    """A command's output, notes for stderr, and exit status."""

    text: str = ""
    blocks: Iterable[str] = ()
    """More output, each printed when it is there."""
    notes: tuple[str, ...] = ()
    status: int = 0


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of every command.

    Raises:
        ValueError: A value that its field's type or bounds do not allow; names the option.
    """

    quick_defaults: ClassVar[Mapping[str, Any]] = {}
    """The defaults that `quick` changes."""

    config: Path | None = None
    """A YAML file of options by name, such as the run.yaml in the folder of a run. Options that are given win."""

    def __post_init__(self) -> None:
        for name, read in _readers(cast(Any, type(self))).items():
            read(getattr(self, name), f"--{name.replace('_', '-')}")

    def other_defaults(self) -> Mapping[str, Any]:
        """The defaults that these options change, by field: those of `quick`."""
        return {"quick": True, **self.quick_defaults} if getattr(self, "quick", False) else {}

    def refuse_both(self, *names: str) -> None:
        """Raises ValueError if more than one of these options is given."""
        if len(given := [f"--{name.replace('_', '-')}" for name in names if getattr(self, name)]) > 1:
            raise ValueError(f"{', '.join(given)}: expected one of them, got both")

    def write(self, folder: Path) -> None:
        """Writes `RUN_FILE`: every option that has a value."""
        values = {key: getattr(self, each.name) for key, each in _keys(type(self)).items()}
        plain = {key: value for key, value in json.loads(json.dumps(values, default=str)).items() if value is not None}
        write_atomic(folder / RUN_FILE, yaml.safe_dump(plain, sort_keys=False, allow_unicode=True))


def parse(options: type[T], args: Sequence[str] | None = None, *, prog: str, description: str | None = None) -> T:
    """The options of a command line, by default this program's.

    Raises:
        DataError: The file of --config cannot be read, or has a value that an option cannot have.
        UnknownNameError: It has a key that is no option.
        SystemExit: Help was asked for (0), or the command line is wrong (2), which has been said.
    """
    words = list(sys.argv[1:] if args is None else args)
    stored = _read_file(options, words)
    read = partial(tyro.cli, options, prog=prog, args=words, description=description, registry=registry())
    result: T = read(default=_filled(options, stored))
    if other := result.other_defaults():
        result = read(default=_filled(options, {**other, **stored}))
    return result


def registry(*, complete: bool = False) -> ConstructorRegistry:
    """Reads fixed names whatever their case; to `complete` them in a shell they must be listed, and are then exact."""
    rules = ConstructorRegistry()

    @rules.primitive_rule
    def any_case(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
        kinds = [each for each in get_args(info.type) if each is not NoneType]
        inner = info.type if get_origin(info.type) is Literal else kinds[0] if len(kinds) == 1 else None
        names = cast(tuple[str, ...], get_args(inner)) if get_origin(inner) is Literal else ()
        if not names or not all(isinstance(name, str) for name in names):
            return None
        return PrimitiveConstructorSpec(
            nargs=1,
            metavar="{" + ",".join(names) + "}",
            instance_from_str=lambda words: match_name("value", words[0], names),
            is_instance=lambda value: value is None or value in names,
            str_from_instance=lambda value: [str(value)],
            choices=names if complete else None,
        )

    return rules


@cache
def _readers(options: Any) -> dict[str, Callable[[Any, str], Any]]:
    """Field -> what reads a value, naming where it came from in a DataError."""

    def reader(hint: Any) -> Callable[[Any, str], Any]:
        adapter = pydantic.TypeAdapter[Any](hint)

        def read(value: Any, where: str) -> Any:
            try:
                return adapter.validate_python(value)
            except pydantic.ValidationError as error:
                wanted = error.errors()[-1]["msg"].removeprefix("Input should be ")
                raise DataError(f"{where}: expected {wanted}, got {value!r}") from error

        return read

    hints = get_type_hints(options, include_extras=True)
    return {each.name: reader(hints[each.name]) for each in fields(options)}


def _keys(options: type[Options]) -> dict[str, Field[Any]]:
    """The names of options in a file -> their fields."""
    hints, keys = get_type_hints(options, include_extras=True), {}
    for each in fields(options):
        names: Iterable[Any] = (getattr(mark, "name", None) for mark in getattr(hints[each.name], "__metadata__", ()))
        keys[next(filter(None, names), each.name).replace("-", "_")] = each
    return {key: each for key, each in keys.items() if key != "config"}


def _read_file(options: type[Options], words: Sequence[str]) -> dict[str, Any]:
    """Field -> its value in the file of --config; {} without one."""
    pairs = pairwise([*words, ""])
    given = [word.partition("=")[2] or after for word, after in pairs if word.partition("=")[0] == "--config"]
    if not given or not given[-1]:
        return {}
    path, readers = Path(given[-1]), _readers(cast(Any, options))
    keys = _keys(options) | {each.name: each for each in _keys(options).values()}
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        raise DataError(f"--config: expected a file of YAML, got {path}: {error}") from error
    if not isinstance(content, Mapping):
        raise DataError(f"{path}: expected options by name, such as 'seed: 1', got {content!r:.60}.")
    values = {}
    for key, value in content.items():
        field = keys[match_name(f"option in {path}:", str(key), keys)]
        # An oracle may be written as it is; the option is JSON.
        plain = json.dumps(value) if isinstance(value, Mapping) else value
        values[field.name] = readers[field.name](plain, f"{path}: {key}")
    return values


def _filled(options: type[T], values: Mapping[str, Any]) -> T:
    """Options with defaults of their own, perhaps not complete: for tyro alone, so nothing is checked yet."""
    made = object.__new__(options)
    for each in fields(options):
        required = tyro.MISSING if each.default_factory is MISSING else each.default_factory()
        default = required if each.default is MISSING else each.default
        object.__setattr__(made, each.name, values.get(each.name, default))
    return made


def print_completion(commands: Mapping[str, Any], words: Sequence[str]) -> None:
    """Prints the script by which a shell completes commands of one or two words, and their options; then exits.

    Raises:
        SystemExit: The script was printed (0), or there is none for that shell (2).
    """
    groups: dict[str, dict[str, Any]] = {}
    for name, options in commands.items():
        first, _, second = name.partition(" ")
        groups.setdefault(first, {})[second] = options
    parts = {
        first: inner[""] if "" in inner else make_dataclass(first.title(), [("command", _one_of(inner))])
        for first, inner in groups.items()
    }
    plain = (tyro.conf.OmitSubcommandPrefixes, tyro.conf.OmitArgPrefixes)
    tyro.cli(_one_of(parts), prog="alpacafarm", args=words, config=plain, registry=registry(complete=True))


def _one_of(commands: Mapping[str, Any]) -> Any:
    return Union[tuple(Annotated[each, tyro.conf.subcommand(name)] for name, each in commands.items())]  # noqa: UP007
