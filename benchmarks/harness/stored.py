"""What commands keep in their output folders: who may write there, and JSON that is read back."""

from __future__ import annotations

import errno
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any, Self
from urllib.parse import quote

from ...arguments import environment_number
from ...data.files import write_atomic
from ...errors import CheckpointError
from ...folders import LOCK, Claim, claim, is_claimed, refuse_claimed


@dataclass(frozen=True)
class Shard:
    """The cells of one call: every `count`-th, from `index` (of 0 to count - 1) on; 0 of 1 is the whole study."""

    index: int = 0
    count: int = 1

    @classmethod
    def parse(cls, text: str) -> Self:
        """The shard "i/n".

        Raises:
            ValueError: It is none.
        """
        if found := re.fullmatch(r"(0|[1-9][0-9]{0,8})/([1-9][0-9]{0,8})", text):
            shard = cls(int(found[1]), int(found[2]))
            if shard.index < shard.count:
                return shard
        raise ValueError(f"--shard: expected i/n with i of 0 to n - 1, such as 0/2 and 1/2, got {text!r}")

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"

    @property
    def lock(self) -> str:
        """The file that whoever writes this shard has locked."""
        return LOCK if self == WHOLE else f"{LOCK}-{self.index}-of-{self.count}"

    def rivals(self, out: Path) -> list[str]:
        """The locks in `out` that exclude this shard: all but its own and those of the other shards of as many."""
        found = (path.name for path in sorted(out.glob(f"{LOCK}*")) if path.name != self.lock)
        return [name for name in found if self == WHOLE or not name.endswith(f"-of-{self.count}")]

    def at_work(self, out: Path, indices: Iterable[int]) -> set[int]:
        """Which of these shards of as many some call is writing now."""
        return {index for index in indices if is_claimed(out, replace(self, index=index).lock)}

    def told(self, missing: Counter[int]) -> str:
        """How many cells of which shard are missing: "2 of shard 0/3, 1 of shard 2/3"."""
        return ", ".join(f"{num} of shard {replace(self, index=index)}" for index, num in sorted(missing.items()))


WHOLE = Shard()
"""What a call is that is no shard."""


class MissingCellsError(Exception):
    """Other shards' cells are not stored yet: this call ends here, with an exit status that says how."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


MANIFEST = "manifest.json"
ANOTHER_OUT = "Choose another --out, or remove that folder."

Shape = Any
"""What a stored value must look like: a type; a list of one shape; or a mapping of names that an object must have."""


def is_full(error: BaseException | None) -> bool:
    """Whether an error is that of a full disk, or of a file as long as it may be: nothing more could be kept."""
    full = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)
    return error is not None and ((isinstance(error, OSError) and error.errno in full) or is_full(error.__cause__))


def is_helper() -> bool:
    """Whether this is one of several processes of one world, and not the one that writes."""
    return environment_number("WORLD_SIZE", 1) > 1 and environment_number("RANK", 0) > 0


def refuse_taken(out: Path, shard: Shard = WHOLE) -> None:
    """Refuses an output folder that another call is writing now, before anything is loaded; makes nothing.

    Other shards of the same study may write beside this one.

    Raises:
        CheckpointError: It is being written.
    """
    if not is_helper():
        for lock in (shard.lock, *shard.rivals(out)):
            refuse_claimed(out, lock)


def take_folder(out: Path, name: str, shard: Shard = WHOLE) -> ExitStack:
    """Claims a command's output folder, made if missing and marked by a manifest with the command's name.

    Of several processes that make one world the first one claims it, for all.

    Raises:
        CheckpointError: Somebody else's files are there or somebody else is writing it, or it cannot be made.
    """
    make_folder(out)
    held = ExitStack()
    if is_helper():
        return held
    held.enter_context(claim(out, name, lock=shard.lock))
    try:
        # Own claim first: of two rivals that start at the same moment one, or both, are refused.
        for lock in shard.rivals(out):
            refuse_claimed(out, lock)
        with turn(out, name):
            _mark(out, name)
    except BaseException:
        held.close()
        raise
    return held


def turn(out: Path, name: str, what: str = "manifest") -> Claim:
    """Waits for this call's turn, among all shards, to read and write the manifest, or something else."""
    return claim(out, name, lock=f".alpacafarm-{what}-lock", wait=True)


def _mark(out: Path, name: str) -> None:
    manifest = out / MANIFEST
    found = sorted(path.name for path in out.iterdir() if not path.name.startswith("."))
    files = [name for name in found if ".sqlite" not in name]  # a ledger may lie here: it is opened before
    if files and not manifest.is_file():
        shown = ", ".join(files[:3]) + ", ..." * (len(files) > 3)
        raise CheckpointError(
            f"--out: expected a new or empty folder, or one of {name}, got {str(out)!r} with {shown}: nothing was "
            "written. Choose another --out."
        )
    if not files:
        write_atomic(manifest, json.dumps({"name": name}) + "\n")
    elif (other := read_stored(manifest, remedy=ANOTHER_OUT).get("name")) != name:
        raise CheckpointError(f"--out: expected a folder of {name}, got {str(out)!r} of {other!r}. {ANOTHER_OUT}")


def cell_file(out: Path, key: str) -> Path:
    """Where a study in `out` stores the rows of a cell."""
    return out / "cells" / f"{quote(key, safe=' =,+')}.json"


def make_folder(out: Path, inner: str = "") -> None:
    """Makes a command's output folder, and the folder `inner` in it, if missing.

    Raises:
        CheckpointError: It cannot be made, because `out` is a file, for instance.
    """
    try:
        (out / inner).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(
            f"--out: expected a folder to write into, got {str(out)!r} ({error.strerror}). Choose another --out."
        ) from error


def differences(before: Mapping[str, Any], now: Mapping[str, Any], within: str = "") -> list[str]:
    """One sentence for each value that differs; of nested settings those that differ only, as "outer.inner"."""
    found = []
    for key in {**before, **now}:
        old, new = before.get(key), now.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            found += differences(old, new, f"{within}{key}.")
        elif old != new and str(old).startswith("sha256:") and str(new).startswith("sha256:"):
            found.append(f"{within}{key} has changed")
        elif old != new:
            found.append(f"{within}{key} was {old!r}, is {new!r}")
    return found


def read_stored(
    path: Path,
    *fields: str,
    shape: Mapping[str, Shape] | None = None,
    remedy: str = "Remove that file and call again.",
) -> dict[str, Any]:
    """A JSON object that a command has stored.

    Args:
        path: Its file.
        fields: Names that it has.
        shape: What the fields of these names look like, where they are there.
        remedy: What helps where it is damaged, for the error.

    Raises:
        CheckpointError: The file is gone or damaged; it names the file and what to do.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: expected a stored JSON object, got {error}. {remedy}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a stored JSON object, got {type(value).__name__}. {remedy}")
    if missing := [name for name in fields if name not in value]:
        raise CheckpointError(f"{path}: expected the stored {', '.join(missing)}, found none. {remedy}")
    for name, expected in (shape or {}).items():
        if name in value and not _fits(value[name], expected):
            found = json.dumps(value[name])
            shown = found if len(found) <= 80 else f"{found[:80]} ..."
            raise CheckpointError(f"{path}: expected {name!r} as this command stores it, got {shown}. {remedy}")
    return value


def _fits(value: Any, shape: Shape) -> bool:
    if isinstance(shape, list):
        return isinstance(value, list) and all(_fits(each, shape[0]) for each in value)
    if isinstance(shape, Mapping):
        return isinstance(value, dict) and all(name in value and _fits(value[name], shape[name]) for name in shape)
    return isinstance(value, shape)


SETTINGS = "settings.json"
"""File of a cell's folder that says what decides its rows."""


def check_settings(folder: Path, settings: dict[str, Any]) -> None:
    """Writes a cell's settings into its folder, or compares them with those that are there.

    Raises:
        CheckpointError: They differ.
    """
    file = folder / SETTINGS
    now = json.loads(json.dumps(settings))
    if not file.is_file():
        write_atomic(file, json.dumps(now, indent=1) + "\n")
        return
    if changed := differences(read_stored(file, remedy=ANOTHER_OUT), now):
        raise CheckpointError(f"{folder} was made with other settings: {'; '.join(changed)}. {ANOTHER_OUT}")


def file_name(cell: str) -> str:
    """A cell's name as that of a file or folder."""
    return quote(cell, safe=" =,+()")


class ElapsedTime:
    """Seconds spent on a cell by all calls, kept in its folder; a killed call loses the last second or step."""

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
        """Writes the seconds down, at most once a second unless `now`."""
        if now or perf_counter() - self._written > 1:
            write_atomic(self._file, json.dumps({"seconds": self.seconds}))
            self._written = perf_counter()
