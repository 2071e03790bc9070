"""Folders: who may write into one now, and what the content of one is."""

import errno
import fcntl
import hashlib
import json
import os
import shlex
import socket
import sys
import time
import warnings
import weakref
from contextlib import suppress
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Self

from .bases import ADAPTER_CONFIG, BASE_FILE, adapter_base, is_adapter, may_be_hub_name, read_json
from .data.files import OUTPUTS, stem_of
from .errors import CheckpointError, DataError

LOCK = ".alpacafarm-lock"
"""File of a folder that is being written; left behind by a process that was killed, it locks nothing."""
MODEL_SUFFIXES = (".safetensors", ".json", ".jinja", ".model", ".spm", ".tiktoken", ".txt")
"""Files that may decide what a model does: weights, configuration, tokenizer, prompt and chat template."""
TRAINING_FILES = (
    *("trainer_state.json", "all_results.json"),
    *("train_results.json", "eval_results.json", "predict_results.json"),
)
"""Files that a trainer leaves in a model's folder and nobody loads."""

Content = dict[str, str]
"""File, relative to its folder -> "sha256:" and its hash."""

_HASHES: dict[tuple[int, ...], str] = {}
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)


class Claim:
    """The sole right to write into a folder, until `release` or the end of a `with` block.

    It ends with the process too, however that dies, and when the claim is garbage. Child processes write in its name:
    they make no claim, and do not keep the owner's alive. `owner` is reported to whoever comes second, who gets a
    CheckpointError.
    """

    def __init__(self, folder: Path | str, owner: str) -> None:
        self.folder = Path(folder)
        path = self.folder.resolve() / LOCK
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            handle = _lock(path, owner)
        except BlockingIOError:
            raise _taken(self.folder) from None
        except OSError as error:
            raise CheckpointError(
                f"{self.folder}: expected a folder to write into, got {error.strerror}. Choose another folder."
            ) from error
        self._end = weakref.finalize(self, _unlock, handle, path)
        _HELD.add(self)

    def release(self) -> None:
        """Harmless when called twice."""
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


_HELD: weakref.WeakSet[Claim] = weakref.WeakSet()


def _forget_all() -> None:
    """Closes a forked child's copies, which would outlive the owner; the owner's claims stay."""
    for held in list(_HELD):
        if parts := held._end.detach():
            os.close(parts[2][0])


os.register_at_fork(after_in_child=_forget_all)


def refuse_claimed(folder: Path | str) -> None:
    """Raises what `Claim` would if somebody holds the folder; makes and changes nothing."""
    try:
        handle = os.open(Path(folder) / LOCK, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:  # nobody claims what is not there; what cannot be read is told when it is claimed
        return
    try:
        for seconds in (0.3, 0.0):
            try:
                fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                # Of an owner that was just killed, a child that is being started has the lock still.
                time.sleep(seconds)
    except OSError:  # no locks here: told when it is claimed
        return
    finally:
        os.close(handle)
    raise _taken(Path(folder))


def hash_folder(folder: Path | str) -> Content:
    """The content of a data folder: its data files, and those of the folder of outputs that recorded data have.

    Neither path nor time of a file matter. Other subfolders are not read: results may be written there. Raises
    DataError if there is no such folder, or a file cannot be read.
    """
    root = Path(folder)
    if not root.is_dir():
        raise DataError(f"{folder}: expected a folder of data, found none.")
    paths = [*root.glob("*"), *(root / OUTPUTS).glob("*")]
    files = (path.relative_to(root) for path in paths if path.is_file() and stem_of(path) is not None)
    try:
        return {file.as_posix(): _hash(root / file) for file in sorted(files) if not file.name.startswith(".")}
    except OSError as error:
        raise DataError(f"{error.filename}: expected a file that can be read, got {error.strerror}.") from error


def hash_model(name: Path | str) -> Content:
    """A model by folder or hub name: every file that may decide what it does, an adapter's base model included.

    Neither path nor time of a file matter. A hub model is fetched first unless it is stored already. Raises
    CheckpointError if there is no such model, or a file cannot be read.
    """
    root = Path(name) if isinstance(name, Path) or Path(name).is_dir() else snapshot(name)
    try:
        files = sorted(path for path in root.iterdir() if path.suffix in MODEL_SUFFIXES and path.is_file())
        unread = [path for path in files if path.name.startswith(".") or path.name in (*TRAINING_FILES, BASE_FILE)]
        digests = {file.name: _hash(file) for file in files if file not in unread}
        if is_adapter(root):
            settings = read_json(root / ADAPTER_CONFIG)
            named = settings.pop("base_model_name_or_path", None)  # content is what it is, not where
            digests[ADAPTER_CONFIG] = _digest(hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest())
            base = hash_model(adapter_base(root)) if named else {}
            digests |= {f"base/{file}": digest for file, digest in base.items()}
    except (OSError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{name}: expected a model's files, got {error}.") from error
    if not digests:
        raise CheckpointError(f"{name}: expected a model's files, found none of {', '.join(MODEL_SUFFIXES)}.")
    return digests


def check_model(name: Path | str) -> None:
    """Raises CheckpointError for a folder that is no model's, and for a name that can only be meant as one's."""
    if (folder := Path(name)).is_dir():
        if not any((folder / file).is_file() for file in ("config.json", "adapter_config.json")):
            raise CheckpointError(f"{name}: expected a model's folder, with a config.json, got one without.")
    elif not may_be_hub_name(name):
        raise CheckpointError(f"{name}: expected a model's folder, found none.")


@cache
def snapshot(name: str) -> Path:
    """The folder of a hub model on this machine, the same one for the whole process."""
    check_model(name)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    patterns = [f"*{suffix}" for suffix in MODEL_SUFFIXES]
    try:
        ignored = ["*/*", "consolidated*"]  # the latter are weights in a format of their maker's
        return Path(snapshot_download(name, allow_patterns=patterns, ignore_patterns=ignored))
    except Exception as error:  # the hub's client, the network and the cache each have errors of their own
        reason = " ".join(str(error).split()).rstrip(".")
        if isinstance(error, LocalEntryNotFoundError):
            reason = "neither such a folder nor a stored copy, and the hub cannot be reached"
        raise CheckpointError(f"{name}: expected a model's folder or hub name, got {reason}.") from error


def _lock(path: Path, owner: str) -> int:
    """An open file that holds the lock, with its owner written in; BlockingIOError if another one does."""
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if isinstance(error, BlockingIOError) or error.errno not in _NO_LOCKS:
                    raise
                warnings.warn(
                    f"{path.parent} is on a file system without locks: see to it that nothing else writes into it.",
                    stacklevel=5,
                )
            if _is_still(handle, path):
                os.ftruncate(handle, 0)
                since = datetime.now().astimezone().isoformat(" ", "seconds")
                place = f"process {os.getpid()} on {socket.gethostname()}, since {since}: {shlex.join(sys.argv)}"
                os.write(handle, f"{owner} ({place})".encode())
                return handle
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)  # its last holder has removed it: what is locked is no longer the folder's file


def _is_still(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False


def _unlock(handle: int, path: Path) -> None:
    if _is_still(handle, path):  # else the folder was removed, and the file is of a later claim
        path.unlink(missing_ok=True)  # while it is locked: whoever opened it meanwhile makes a new one
    os.close(handle)


def _taken(folder: Path) -> CheckpointError:
    writer = "another process"
    with suppress(OSError):
        writer = (folder / LOCK).read_text(encoding="utf-8", errors="replace") or writer
    return CheckpointError(
        f"{folder} is being written by {writer}. Wait for its end (of an agent of this process that was left, close() "
        "its updates()), or choose another folder."
    )


def _hash(file: Path) -> str:
    """A file that has not changed is read once per process: gigabytes take seconds."""
    status = file.stat()
    key = (status.st_dev, status.st_ino, status.st_size, status.st_ctime_ns)
    # Two changes within a tick of the file system's clock look like one.
    if time.time_ns() - status.st_ctime_ns < 2_000_000_000 or key not in _HASHES:
        with file.open("rb") as content:
            _HASHES[key] = _digest(hashlib.file_digest(content, "sha256").hexdigest())
    return _HASHES[key]


def _digest(value: str) -> str:
    return f"sha256:{value}"
