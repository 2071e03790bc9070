"""The ground of every benchmark command: its options, resumable cells, the table, a manifest and the exit status.

A study is a set of cells (one seed of one method, one generator ...), each a function that returns rows of the table.
`runner.run_cells` runs them. A finished cell is stored at once: a command that was interrupted continues there.
"""

from __future__ import annotations

import csv
import hashlib
import importlib.metadata
import json
import platform
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, ClassVar, Self

import tyro

from ... import __version__
from ...arguments import environment_number
from ...cli.options import RUN_FILE, Count, Options, parse
from ...data.files import write_atomic
from ...errors import AlpacaFarmError, CheckpointError, UnknownNameError, WorldError
from ...folders import Content
from . import stored
from .sources import Sources
from .stored import ANOTHER_OUT, MANIFEST, cell_file, differences, read_stored

Row = dict[str, Any]
"""One row of a table: column name -> str, int, float (NaN allowed), bool or None (an empty cell)."""

PACKAGE = "alpacafarm-env"
PACKAGES = ("gymnasium", "numpy", "scipy", "scikit-learn", "matplotlib", "torch", "transformers", "accelerate", "peft")


@dataclass(frozen=True)
class StudyOptions(Options):
    """Options of every benchmark command; a command adds its own by inheriting. Read by tyro: docstrings are --help."""

    name: ClassVar[str] = ""
    """The study's module, under alpacafarm_env.benchmarks."""
    repeats: ClassVar[bool] = True
    """Whether seeds make a difference."""
    no_data: ClassVar[str] = ""
    """Why --data cannot be given."""

    out: Path | None = None
    """Folder for table.csv, manifest.json, figures and report.html. Default: results/<command>, with --quick
    results/<command>-quick."""
    quick: bool = False
    """A smaller study of the same shape, to see that everything works."""
    seeds: Count = 5
    """Number of independent repetitions: seeds 0 .. N-1."""
    data: str | None = None
    """Data folder (or dataset name) to use instead of the command's own."""
    ray: Annotated[tuple[str, ...] | None, tyro.conf.arg(metavar="[ADDRESS]")] = None
    """Run the cells on the Ray cluster of this address (default: the one that RAY_ADDRESS names or that runs here, else
    a new one on this machine). Its nodes have this package, and see --out under the same path."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ray is not None and len(self.ray) > 1:
            raise ValueError(f"--ray: expected one address or none, got {' '.join(self.ray)}")
        if self.no_data and self.data not in (None, "sandbox"):
            raise ValueError(f"--data: expected none, got {self.data!r}: {self.no_data}")
        if not self.repeats and self.seeds != 1:
            raise ValueError(
                f"--seeds: expected 1, got {self.seeds!r}: whatever is drawn here is always the same, so a repetition "
                "would say the same again."
            )

    @classmethod
    def parse(cls, args: Sequence[str] | None = None) -> Self:
        """Options from the command line; --quick changes what is not given. Its module's docstring is the help."""
        prog = f"python -m alpacafarm_env.benchmarks.{cls.name}"
        return parse(cls, args, prog=prog, description=sys.modules[cls.__module__].__doc__)

    def folder(self, name: str) -> Path:
        """The output folder: `out`, or results/<name>; a quick study has a folder of its own, results/<name>-quick."""
        return self.out if self.out is not None else Path("results") / (f"{name}-quick" if self.quick else name)

    def refuse_taken(self, name: str) -> None:
        """Refuses a folder that another call is writing, before anything is loaded."""
        stored.refuse_taken(self.folder(name))

    def study(self, name: str, config: Mapping[str, Any], *, sources: Sources | None = None) -> Study:
        """The study that the options ask for: see `Study`."""
        folder, ray = self.folder(name), None if self.ray is None else "".join(self.ray)
        study = Study(folder, name, config, seeds=range(self.seeds), sources=sources, quick=self.quick, ray=ray)
        self.write(folder)
        return study


class Study:
    """The folder of one benchmark command: cells that are run once, the table, the manifest.

    Args:
        out: Output folder, created if missing.
        name: Name of the command.
        config: JSON-able values that change a cell's rows. A folder made with another config is refused.
        seeds: Recorded in the manifest; they may grow between calls, and finished cells are kept.
        sources: The models and data that cells are made from. A folder made from other content is refused, wherever
            that lies; so is a cell during which the content changes.
        quick: Recorded in the manifest: a smaller study, whose numbers are no results.
        ray: The Ray cluster whose tasks the cells are; None for none, "" for the usual one.

    Attributes:
        failed: Cell of this call -> why it failed.

    Raises:
        CheckpointError: The folder holds a study of another name, config or sources, an unreadable manifest, or
            somebody else's files; another study is writing it; or it cannot be made.
    """

    def __init__(
        self,
        out: Path | str,
        name: str,
        config: Mapping[str, Any],
        *,
        seeds: Sequence[int] = (),
        sources: Sources | None = None,
        quick: bool = False,
        ray: str | None = None,
    ) -> None:
        self.out = Path(out)
        self.quick, self.ray = quick, ray
        self.name = name
        self.config: dict[str, Any] = json.loads(json.dumps(dict(config), default=str))
        self.seeds = list(seeds)
        self.failed: dict[str, str] = {}
        self.finished = False
        self._sources: Sources = sources or {}
        self._contents = self._current_contents()
        self._planned: list[str] = []
        self._facts: dict[str, Any] = {}
        self._claim = stored.take_folder(self.out, name)
        try:
            self._check_manifest()
            stored.make_folder(self.out / "cells")
            self.write_manifest()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Lets others write into the folder; the end of a `with` block does so too."""
        self._claim.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def exit_status(self) -> int:
        """0 only when `finish` was reached and no cell failed."""
        return 0 if self.finished and not self.failed else 1

    @property
    def done(self) -> list[str]:
        """The planned cells that are stored, whichever call ran them."""
        names = {path.name for path in (self.out / "cells").iterdir()}
        return [key for key in self._planned if cell_file(self.out, key).name in names]

    def plan(self, keys: Sequence[str]) -> None:
        """Adds the study's next cells."""
        self._planned += [key for key in keys if key not in self._planned]

    def cell(self, key: str, work: Callable[[], Sequence[Row]]) -> list[Row]:
        """The rows of one cell: the stored ones if it was finished before, else those of `work()`, stored at once.

        Raises:
            CheckpointError: The stored cell is damaged, the study's sources have changed.
        """
        path = cell_file(self.out, key)
        self.plan([key])
        if not path.exists():
            self._refuse_changed()
            # Through JSON first, so that what is hashed is what is read back.
            rows = json.loads(json.dumps([dict(row) for row in work()], default=_plain))
            self._refuse_changed()
            write_atomic(path, json.dumps({"key": key, "sha256": _digest(rows), "rows": rows}, indent=1))
        return self.rows(key)

    def rows(self, key: str) -> list[Row]:
        """The rows of a stored cell; CheckpointError if they are gone or damaged."""
        path = cell_file(self.out, key)
        cell = read_stored(path, "key", "sha256", "rows")
        if cell["key"] != key or _digest(cell["rows"]) != cell["sha256"]:
            text = f"expected the rows that were stored for {key!r}, got others. Remove it and call again."
            raise CheckpointError(f"{path}: {text}")
        return list(cell["rows"])

    def write_table(self, rows: Sequence[Row], columns: Sequence[str] | None = None) -> Path:
        """Writes table.csv: `columns` (default: those of the first row) of every row; floats keep every digit."""
        return write_csv(self.out / "table.csv", rows, columns)

    def note(self, **facts: Any) -> None:
        """Adds facts (judge, reference, level, n ...) to the manifest."""
        self._facts.update(facts)
        self.write_manifest()

    def finish(self) -> int:
        """Marks the study complete, once every output file is written, and returns the exit status."""
        self.finished = True
        self.write_manifest()
        return self.exit_status

    def write_manifest(self) -> None:
        """Writes manifest.json."""
        manifest = {
            "name": self.name,
            "complete": self.exit_status == 0,
            "quick": self.quick,
            "config": self.config,
            "contents": self._contents,
            "seeds": self.seeds,
            "cells": {"done": self.done, "failed": self.failed},
            "facts": self._facts,
            "versions": versions(),
        }
        write_atomic(self.out / MANIFEST, json.dumps(manifest, default=_plain, indent=1) + "\n")

    def _check_manifest(self) -> None:
        """Refuses a folder made with another config, package version or other sources."""
        shape = dict.fromkeys(("config", "contents", "versions"), dict)
        before = read_stored(self.out / MANIFEST, shape=shape, remedy=ANOTHER_OUT)
        made = (path for path in self.out.rglob("[!.]*") if path.is_file() and path.name not in (MANIFEST, RUN_FILE))
        if "config" not in before or not any(made):
            return  # a call that ended before it did anything
        old, new, package = before.get("versions", {}), versions(), PACKAGE
        changes = differences(
            {**before["config"], package: old.get(package), **_flat(before.get("contents", {}))},
            {**self.config, package: new.get(package), **_flat(self._contents)},
        )
        if changes:
            text = f"{self.out} holds a study made with other settings or data: {'; '.join(changes)}."
            raise CheckpointError(f"{text} {ANOTHER_OUT}")
        if others := differences(old, new):
            text = "was begun with other versions, so that digits may differ between its cells"
            warnings.warn(f"{self.out} {text}: {'; '.join(others)}.", stacklevel=3)

    def _current_contents(self) -> dict[str, Content]:
        return {name: content() for name, content in self._sources.items()}

    def _refuse_changed(self) -> None:
        if changes := differences(_flat(self._contents), _flat(self._current_contents())):
            raise CheckpointError(
                f"expected the models and data that the study began with, but {'; '.join(changes)}. Put back what was "
                "there and call again, or choose another --out."
            )


def _flat(contents: Mapping[str, Content]) -> Content:
    """Named as users see it, "model.safetensors of --policy"."""
    return {f"{file} of {name}": mark for name, content in contents.items() for file, mark in content.items()}


def run_command(command: Callable[[], int], *, joins: bool = False) -> int:
    """Runs a command's body and returns the exit status: its own, 2 for an error of ours, 130 when interrupted.

    Args:
        command: The body.
        joins: Whether several processes started by torchrun may run it together; else they are refused.
    """
    try:
        several = environment_number("WORLD_SIZE", 1) > 1  # a bad number is told before anything is written
        if not joins and several:
            raise WorldError(
                "expected one process, got several (WORLD_SIZE): this command starts the processes it needs by itself. "
                "Start it without torchrun or accelerate launch."
            )
        return command()
    except AlpacaFarmError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        if not stored.is_full(error):
            raise
        text = f"error: {error.strerror} (errno {error.errno}). What is stored is kept: make room, and call again."
        print(text, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted: what is stored is kept, the same command continues from there.", file=sys.stderr)
        return 130


def named_once(
    option: str, given: Iterable[str], find: Callable[[str], Any], ours: Mapping[str, Any]
) -> dict[str, str]:
    """Name -> how it was given, of what `find` finds; `ours` are those that names belong to.

    Raises:
        UnknownNameError: Two have one name, or one of a user's own has the name of one of ours.
    """
    specs: dict[str, str] = {}
    for text in given:
        made = find(text)
        spec = text if ":" in text else made.name
        if specs.setdefault(made.name, spec) != spec or ours.get(made.name, made) is not made:
            raise UnknownNameError(f"{option} {text}: expected a name of its own, got {made.name!r}, which is taken.")
    return specs


def versions() -> dict[str, str]:
    """Versions of Python, the platform and the installed packages that matter to a result."""
    # The package by itself: run from a checkout it need not be installed.
    by_name = {"python": platform.python_version(), "platform": platform.platform(), PACKAGE: __version__}
    for package in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            by_name[package] = importlib.metadata.version(package)
    return by_name


def write_csv(path: Path, rows: Sequence[Row], columns: Sequence[str] | None = None) -> Path:
    """Writes rows as CSV (UTF-8, floats by repr, None as an empty cell), atomically.

    A text that a spreadsheet would run as a formula gets an apostrophe in front, which makes it text there too. Without
    `columns`, those of the first row: ValueError for a row with others.
    """
    header = list(columns if columns is not None else rows[0] if rows else ())
    lines: list[str] = []
    # The writer ends its lines with \r\n, since only then it quotes every character that ends a line for some reader.
    writer = csv.writer(SimpleNamespace(write=lines.append))
    writer.writerow(header)
    for number, row in enumerate(rows):
        if columns is None and set(row) != set(header):
            raise ValueError(f"row {number}: expected the columns {header}, got {list(row)}")
        writer.writerow([_csv_value(row[column]) for column in header])
    write_atomic(path, "".join(line.removesuffix("\r\n") + "\n" for line in lines))
    return path


def _digest(rows: Any) -> str:
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()


def _csv_value(value: Any) -> Any:
    if isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r")):
        return f"'{value}"
    return "" if value is None else _plain(value) if hasattr(value, "item") else value


def _plain(value: Any) -> Any:
    """A numpy scalar as the Python value it is; a path as text."""
    if hasattr(value, "item"):
        return value.item()
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"expected a JSON-able value, got {value!r}")
