"""Reads records from JSON, JSON Lines and Parquet files, plain or gzip, and writes whole files or none."""

from __future__ import annotations

import gzip
import io
import json
import os
import tempfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import DataError
from .schema import BLANK, Fault, shown

SUFFIXES = tuple(suffix + end for suffix in (".json", ".jsonl", ".parquet") for end in ("", ".gz"))

OUTPUTS = "outputs"
"""Subfolder of recorded data that holds the models' responses."""

MAX_BYTES = 2 * 1024**3
"""Largest file read, after decompression: a guard against decompression bombs."""


def stem_of(path: Path) -> str | None:
    """The name of a data file without its format's suffixes ("eval" for eval.jsonl.gz); None for another format."""
    fitting = [suffix for suffix in SUFFIXES if path.name.endswith(suffix)]
    return path.name.removesuffix(max(fitting, key=len)) if fitting else None


def read_records(path: Path) -> list[object]:
    """The records of a file, in order: a `Fault` for one that cannot be read, a `BLANK` for a blank line of JSON Lines.

    Raises DataError if the file is missing, of another format, too large, damaged, or no list of records as a whole.
    """
    stem = stem_of(path)
    if stem is None:
        raise DataError(f"{path}: expected a file that ends in one of {', '.join(SUFFIXES)}, got {path.name!r}.")
    suffix = path.name[len(stem) :].removesuffix(".gz")
    content = _read_bytes(path, compressed=path.name.endswith(".gz"))
    if suffix == ".parquet":
        return _parquet(content, path)
    try:
        text = content.decode("utf-8-sig")  # tolerates the byte order mark some editors add
    except UnicodeDecodeError as error:
        byte = f"byte 0x{content[error.start]:02x} at offset {error.start}"
        raise DataError(f"{path}: expected UTF-8, got {byte}. Save the file as UTF-8.") from error
    return _json_lines(text) if suffix == ".jsonl" else _json(text, path)


def write_atomic(path: Path, content: str | bytes) -> None:
    """Writes a file next to `path` and renames it: a reader never sees half of it, and a crash leaves the old one."""
    data = content.encode() if isinstance(content, str) else content
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:60]}.")
    temporary = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        temporary.chmod(0o644)  # mkstemp makes it private; results are ordinary files
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def check_folder(path: Path) -> None:
    """Refuses a path that can be no folder to write into; it need not be there.

    Raises:
        DataError: It lies in or is a file, or may not be written.
    """
    there = next(each for each in (path.absolute(), *path.absolute().parents) if os.path.lexists(each))
    if not there.is_dir() or not os.access(there, os.W_OK):
        what = "one that may not be written" if there.is_dir() else f"the file {there}"
        raise DataError(f"{path}: expected a folder to write into, got {what}. Choose another folder.")


def write_records(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Writes rows as JSON Lines, in ASCII, or as Parquet, by the file's name; DataError for another name."""
    if path.suffix == ".jsonl":
        # ASCII: a reader that splits at U+2028 as Python's splitlines() does finds one row a line all the same.
        write_atomic(path, "".join(f"{json.dumps(row)}\n" for row in rows))
        return
    if path.suffix != ".parquet":
        raise DataError(f"{path}: expected a file that ends in .jsonl or .parquet, got {path.name!r}.")
    pa = _pyarrow(path)
    content = io.BytesIO()
    fields = dict.fromkeys(name for row in rows for name in row)  # Arrow takes those of the first row
    pa.parquet.write_table(pa.Table.from_pylist([{**dict.fromkeys(fields), **row} for row in rows]), content)
    write_atomic(path, content.getvalue())


def _read_bytes(path: Path, *, compressed: bool) -> bytes:
    try:
        with gzip.open(path) if compressed else path.open("rb") as file:
            content: bytes = file.read(MAX_BYTES + 1)
    except (OSError, EOFError, zlib.error) as error:
        expected = "a gzip file" if compressed and path.is_file() else "a file that can be read"
        raise DataError(f"{path}: expected {expected}, got {type(error).__name__}: {error}") from error
    if len(content) > MAX_BYTES:
        raise DataError(f"{path}: expected at most {MAX_BYTES} bytes, got more. Split the file.")
    return content


def _json(text: str, path: Path) -> list[object]:
    try:
        value = _parse(text)
    except ValueError as error:
        hint = "One object a line belongs in a .jsonl file"
        raise DataError(f"{path}: expected JSON (a list of objects), got a syntax error: {error}. {hint}.") from error
    if not isinstance(value, list):
        example = 'a list of objects, such as [{"instruction": ..., "input": ..., "output": ...}, ...]'
        raise DataError(f"{path}: expected {example}, got {type(value).__name__}: {shown(value)}.")
    return value


def _json_lines(text: str) -> list[object]:
    # Not splitlines(): a JSON string may hold U+2028 and other separators that JSON does not count as line ends.
    records: list[object] = []
    for line in text.removesuffix("\n").split("\n"):
        try:
            records.append(_parse(line) if line.strip() else BLANK)
        except ValueError as error:
            records.append(Fault(0, "", f"{shown(line)} ({error})", "one JSON object on the line"))
    return records


def _parse(text: str) -> object:
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _pyarrow(path: Path) -> Any:
    try:
        import pyarrow.parquet
    except ImportError as error:
        text = "Parquet needs pyarrow. Install the extra 'alpacafarm-env[data]', or take jsonl"
        raise DataError(f"{path}: {text}.") from error
    return pyarrow


def _parquet(content: bytes, path: Path) -> list[object]:
    pa = _pyarrow(path)
    try:
        return list(pa.parquet.read_table(io.BytesIO(content)).to_pylist())
    except (pa.ArrowException, OSError, ValueError) as error:
        raise DataError(f"{path}: expected a Parquet file, got {type(error).__name__}: {error}") from error
