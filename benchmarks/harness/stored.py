"""The output folders of commands: who may write there, and JSON that is read back."""

from __future__ import annotations

import base64
import errno
import hashlib
import json
import re
import zlib
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...arguments import environment_number
from ...data.files import write_atomic
from ...errors import CheckpointError
from ...folders import Claim, refuse_claimed

MANIFEST = "manifest.json"
SETTINGS = "settings.json"
"""In a cell's folder: what decides its rows."""
ANOTHER_OUT = "Choose another --out, or remove that folder."

Shape = Any
"""The form of a stored value: a type; a list of one shape; or a mapping of names that an object must have."""


def is_full(error: BaseException | None) -> bool:
    """Whether the cause is a full disk or quota, or the limit on a file's size."""
    full = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)
    return error is not None and ((isinstance(error, OSError) and error.errno in full) or is_full(error.__cause__))


def is_helper() -> bool:
    """Whether torchrun started this process as one of several, and another one writes."""
    return environment_number("WORLD_SIZE", 1) > 1 and environment_number("RANK", 0) > 0


def refuse_taken(out: Path) -> None:
    """Raises CheckpointError if another call is writing `out`; makes nothing."""
    if not is_helper():
        refuse_claimed(out)


def take_folder(out: Path, name: str) -> ExitStack:
    """Claims a command's output folder, made if missing and marked by a manifest with the command's name.

    Of several processes that make one world the first one claims it for all.

    Raises:
        CheckpointError: It holds somebody else's files, somebody else is writing it, or it cannot be made.
    """
    make_folder(out)
    with ExitStack() as claimed:
        if not is_helper():
            claimed.enter_context(Claim(out, name))
            _mark(out, name)
        return claimed.pop_all()


def _mark(out: Path, name: str) -> None:
    manifest = out / MANIFEST
    names = sorted(path.name for path in out.iterdir() if not path.name.startswith("."))
    files = [name for name in names if ".sqlite" not in name]  # a ledger may lie here: it is opened before
    if files and not manifest.is_file():
        shown = ", ".join(files[:3]) + ", ..." * (len(files) > 3)
        raise CheckpointError(
            f"--out: expected a new or empty folder, or one of {name}, got {str(out)!r} with {shown}: nothing was "
            "written. Choose another --out."
        )
    other = read_stored(manifest, remedy=ANOTHER_OUT).get("name") if files else None
    idle = files == [MANIFEST] and str(other).split()[:1] == name.split()[:1]  # left by a call that was refused
    if not files or (idle and other != name):
        write_atomic(manifest, json.dumps({"name": name}) + "\n")
    elif other != name:
        raise CheckpointError(f"--out: expected a folder of {name!r}, got {str(out)!r} of {other!r}. {ANOTHER_OUT}")


def make_folder(folder: Path) -> None:
    """Makes an output folder if missing; CheckpointError if it cannot be made, because it is a file for instance."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(
            f"--out: expected a folder to write into, got {str(folder)!r} ({error.strerror}). Choose another --out."
        ) from error


def cell_file(out: Path, key: str) -> Path:
    """Where a study in `out` stores the rows of a cell."""
    return out / "cells" / f"{file_name(key)}.json"


def file_name(text: str) -> str:
    """A cell's or model's name as that of a file or folder: its words joined by "-", so that no shell minds.

    Names that differ in commas, blanks, brackets and hyphens alone become one: what is stored there says whose it is.
    Names with any other character get a part of their hash.
    """
    name = re.sub(r"[^\w.=+]+", "-", text).strip("-.")
    plain = re.fullmatch(r"\w[\w.=+(), -]*", text)
    return name if plain else f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:8]}".lstrip("-")


def flatten(values: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Nested values by one name each, "outer.inner"."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= flatten(value, f"{before}{key}.") if isinstance(value, Mapping) else {f"{before}{key}": value}
    return flat


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """A sentence for each value that differs, nested ones by their names as of `flatten`."""
    olds, news, sentences = flatten(before), flatten(now), []
    for key in {**olds, **news}:
        old, new = olds.get(key), news.get(key)
        if old != new and str(old or new).startswith("sha256:"):
            sentences.append(f"{key} {'has changed' if old and new else 'is gone' if old else 'is new'}")
        elif old != new:
            sentences.append(f"{key} was {old!r}, is {new!r}")
    return sentences


def read_stored(
    path: Path,
    *fields: str,
    shape: Mapping[str, Shape] | None = None,
    remedy: str = "Remove that file and call again.",
) -> dict[str, Any]:
    """A JSON object that a command has stored, with `fields` and, where present, values of a `shape`.

    Raises:
        CheckpointError: The file is missing or damaged; `remedy` says what to do.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: expected a stored JSON object, got {error}. {remedy}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a stored JSON object, got {type(value).__name__}. {remedy}")
    present = {name: each for name, each in (shape or {}).items() if name in value}
    expected = dict.fromkeys(fields, object) | present
    if faulty := [name for name, each in expected.items() if not _fits(value, {name: each})]:
        raise CheckpointError(f"{path}: expected {', '.join(faulty)} as this command stores it. {remedy}")
    return value


def _fits(value: Any, shape: Shape) -> bool:
    if isinstance(shape, list):
        return isinstance(value, list) and all(_fits(each, shape[0]) for each in value)
    if isinstance(shape, Mapping):
        return isinstance(value, dict) and all(name in value and _fits(value[name], shape[name]) for name in shape)
    return isinstance(value, shape)


def check_settings(folder: Path, settings: dict[str, Any]) -> None:
    """Writes a cell's settings into its folder; CheckpointError if others are there."""
    file = folder / SETTINGS
    now = json.loads(json.dumps(settings))
    if not file.is_file():
        write_atomic(file, json.dumps(now, indent=1) + "\n")
    elif changed := differences(read_stored(file, remedy=ANOTHER_OUT), now):
        raise CheckpointError(f"{folder} was made with other settings: {'; '.join(changed)}. {ANOTHER_OUT}")


class ElapsedTime:
    """Seconds that all calls have spent on a cell, kept in its folder; a killed call loses its last second or step."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "seconds.json"
        self._before = 0.0
        if self._file.is_file():
            self._before = float(read_stored(self._file, "seconds", shape={"seconds": int | float})["seconds"])
        self._began = self._written = perf_counter()

    @property
    def seconds(self) -> float:
        """Wall time of this call and those before it."""
        return self._before + perf_counter() - self._began

    def keep(self, *, now: bool = False) -> None:
        """Stores the seconds, at most once a second unless `now`."""
        if now or perf_counter() - self._written > 1:
            write_atomic(self._file, json.dumps({"seconds": self.seconds}))
            self._written = perf_counter()


def pack(table: NDArray[Any]) -> str:
    """A table as text, in single precision."""
    return base64.b64encode(zlib.compress(table.astype("<f4").tobytes())).decode()


def unpack(text: str, columns: int) -> NDArray[np.float64]:
    """The table of `columns` that `pack` has packed."""
    values = np.frombuffer(zlib.decompress(base64.b64decode(text)), dtype="<f4")
    return values.reshape(-1, columns).astype(np.float64)
