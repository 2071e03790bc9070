"""What commands keep in their output folders: who may write there, and JSON that is read back."""

from __future__ import annotations

import errno
import json
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import quote

from ...arguments import environment_number
from ...data.files import write_atomic
from ...errors import CheckpointError
from ...folders import Claim, claim, refuse_claimed
from .shards import WHOLE, Shard

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
