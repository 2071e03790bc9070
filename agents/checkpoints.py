"""Checkpoints as sealed folders: weights and optimizer state in safetensors, everything else in JSON, no pickle.

A checkpoint is written as a draft, sealed by a manifest (size and SHA-256 of every file), flushed to disk and renamed;
only then are older ones removed. A process killed at any moment leaves the previous checkpoint, the new one, or both.
"""

import hashlib
import json
import os
import re
import shutil
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import safe_open
from safetensors.torch import load_file, load_model, save_file
from torch import Tensor, nn

from ..bases import read_json as read_json
from ..errors import CheckpointError
from ..folders import Claim
from ..pretrained import reading
from .processes import Processes
from .sharding import is_sharded, local, mesh_of

MANIFEST = "manifest.json"
_NAME = re.compile(r"checkpoint-(\d+)")


def write_json(path: Path, content: Any) -> None:
    """Write `content` as JSON. Floats survive exactly: their text reads back to the same bits."""
    path.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n", encoding="utf-8")


def flush(path: Path) -> None:
    """Force a file, or a folder's list of names, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def flushed_length(path: Path) -> int:
    """Length of a run's metrics.jsonl, forced to disk first: a checkpoint must not outlive its metrics."""
    if path.exists():
        flush(path)
    return _size(path)


@contextmanager
def writing(place: Path) -> Iterator[None]:
    """Turn a refusal of the operating system, such as a full disk, into a CheckpointError that says what to do."""
    try:
        yield
    except Exception as error:  # safetensors and tokenizers give the system's number in their text only
        match = re.search(r"os error (\d+)", str(error))
        number = error.errno if isinstance(error, OSError) else int(match[1]) if match else None
        if number is None:
            raise
        raise CheckpointError(
            f"{place} could not be written: {os.strerror(number)} (errno {number}). What was saved before is kept. "
            "Make room, or see to it that the folder may be written, and run the same again: it goes on from there."
        ) from error


def compare(path: Path, identity: Mapping[str, Any], *, free: Collection[str]) -> None:
    """Compare the settings that decide a run with those in `path`, the config.json that it began with.

    CheckpointError, with what differs and how, if that is more than the names in `free`.
    """
    saved, missing = read_json(path), "(not set)"
    names = sorted((saved.keys() | identity.keys()) - set(free))
    before = {name: saved.get(name, missing) for name in names}
    pairs = {name: (before[name], identity.get(name, missing)) for name in names}
    if changed := [f"{name}: {old!r} -> {new!r}" for name, (old, new) in pairs.items() if old != new]:
        raise CheckpointError(
            f"{path.parent} was trained with other settings. Changed: {'; '.join(changed)}. "
            "Set them back to resume it, or use another folder for a new run."
        )


def publish(folder: Path, write: Callable[[Path], None], processes: Processes) -> None:
    """Let `write` fill a draft folder, seal it and move it to `folder` in one rename; no draft is left of a failure.

    All `processes` call it: each writes files of its own into one draft, which the main one seals.
    """
    draft, is_main = folder.with_name(f".{folder.name}.tmp"), processes.is_main

    def guarded(work: Callable[[], None] | None) -> None:
        with writing(folder):
            if work is not None:
                work()

    def begin() -> None:
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)

    def seal() -> None:
        write_json(draft / MANIFEST, {"files": dict(sorted(_fingerprints(draft).items()))})
        for path in (*draft.rglob("*"), draft):
            flush(path)
        if folder.exists():  # only ever one that was found damaged
            shutil.rmtree(folder)
        draft.rename(folder)
        flush(folder.parent)

    try:
        for work in (begin if is_main else None, partial(write, draft), seal if is_main else None):
            processes.together(partial(guarded, work))  # all end one part before another begins
    finally:
        if is_main:
            shutil.rmtree(draft, ignore_errors=True)


def check(folder: Path) -> None:
    """Compare a checkpoint with its seal; CheckpointError if the manifest or a file is missing or differs."""
    expected, present = read_json(folder / MANIFEST).get("files"), _fingerprints(folder)
    if not isinstance(expected, dict):
        raise CheckpointError(f"{folder} is damaged: its {MANIFEST} lists no files.")
    broken = sorted(name for name in expected.keys() | present.keys() if expected.get(name) != present.get(name))
    if broken or not expected:
        raise CheckpointError(f"{folder} is damaged: {', '.join(broken) or 'no files'} differ from its {MANIFEST}.")


def newest(out: Path) -> Path | None:
    """The newest complete `checkpoint-<step>` of `out`, or None; warns of each damaged one that it skips."""
    for step in sorted(steps(out), reverse=True):
        folder = out / f"checkpoint-{step}"
        try:
            check(folder)
        except CheckpointError as error:
            warnings.warn(f"Skipping a checkpoint: {error}", stacklevel=2)
        else:
            return folder
    return None


def steps(out: Path) -> list[int]:
    """The steps that have a checkpoint folder in `out`, in no order."""
    matches = (_NAME.fullmatch(path.name) for path in (out.iterdir() if out.is_dir() else ()))
    return [int(match[1]) for match in matches if match]


def prune(out: Path, *, keep: int) -> None:
    """Remove all checkpoints of `out` but the `keep` newest."""
    for step in sorted(steps(out), reverse=True)[keep:]:
        shutil.rmtree(out / f"checkpoint-{step}")


def remove_leftovers(out: Path, *, step: int) -> None:
    """Remove what a killed or damaged run left behind: drafts, and (damaged) checkpoints beyond `step`."""
    for later in steps(out):
        if later > step:
            shutil.rmtree(out / f"checkpoint-{later}")
    for draft in out.glob(".checkpoint-*.tmp"):
        shutil.rmtree(draft, ignore_errors=True)


def cut_metrics(path: Path, length: int) -> None:
    """Cut metrics.jsonl back to its length at the checkpoint; CheckpointError if it is shorter."""
    size = _size(path)
    if size < length:
        raise CheckpointError(f"{path} has {size} bytes, but had {length} at the checkpoint: was it edited or removed?")
    with path.open("ab") as file:
        file.truncate(length)


def claim_metrics(out: Path | None, length: int) -> AbstractContextManager[object]:
    """Claim a run's folder, if there is one; CheckpointError if another run is writing, or has written, there."""
    if out is None:
        return nullcontext()
    claim = Claim(out, "a training run")
    path = out / "metrics.jsonl"
    if (size := _size(path)) != length:
        claim.release()
        raise CheckpointError(
            f"{path} has {size} bytes, but this run left it with {length}: another one has written there since. Make "
            "the agent anew to continue from what is there, or choose another folder."
        )
    return claim


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def save_rows(folder: Path, name: str, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors to `name.safetensors`; of sharded ones the rows that are here, to a file of this process.

    What is not sharded among sharded ones is in every process's file.
    """
    mesh = next((mesh for mesh in map(mesh_of, tensors.values()) if mesh is not None), None)
    part = "" if mesh is None else f"-{mesh.get_local_rank() + 1:05}-of-{mesh.size():05}"
    here = {key: local(tensor).detach().cpu().contiguous() for key, tensor in tensors.items()}
    save_file(here, folder / f"{name}{part}.safetensors")


def load_rows(folder: Path, name: str) -> Iterator[tuple[str, Callable[[slice], Tensor]]]:
    """The keys of what `save_rows` has written, by however many processes, each with what reads some of its rows."""
    with ExitStack() as stack:
        paths = sorted(folder.glob(f"{name}*.safetensors"))
        files = [stack.enter_context(safe_open(path, framework="pt")) for path in paths]
        for key in files[0].keys() if files else ():
            parts = [file.get_slice(key) for file in files]
            yield key, partial(_read_rows, parts)


def _read_rows(parts: Sequence[Any], wanted: slice) -> Tensor:
    """Some rows of a tensor whose rows are dealt out, in order, to several files."""
    if not parts[0].get_shape():
        return cast(Tensor, parts[0][...])
    sizes = [part.get_shape()[0] for part in parts]
    start, stop, _ = wanted.indices(sum(sizes))
    pieces, begin = [], 0
    for part, size in zip(parts, sizes, strict=True):
        low, high = max(start - begin, 0), min(stop - begin, size)
        if low < high:
            pieces.append(part[low:high])
        begin += size
    return torch.cat(pieces) if pieces else cast(Tensor, parts[0][:0])


def load_weights(folder: Path, model: nn.Module) -> None:
    """Read what `save_pretrained` wrote into `model`, in place: an adapter for a PEFT model, else all weights."""
    adapter, whole = folder / "adapter_model.safetensors", folder / "model.safetensors"
    if hasattr(model, "peft_config"):
        if not adapter.is_file():
            raise CheckpointError(f"Expected the adapter weights {adapter}, found none: was {folder} saved with LoRA?")
        from peft import set_peft_model_state_dict  # only those who train adapters need peft

        with reading(folder, "this model's adapter"):
            keys: Any = set_peft_model_state_dict(cast(Any, model), load_file(adapter))
            if others := [*keys.unexpected_keys, *(name for name in keys.missing_keys if "lora_" in name)]:
                raise ValueError(f"its matrices are others than the model's, such as {others[0]}")
        return
    if not whole.is_file():
        raise CheckpointError(f"Expected the weights {whole}, found none.")
    with reading(whole, "this model's weights"):
        load_model(model, whole)


def fingerprint(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """SHA-256 (hexadecimal) of named tensors: names, types, shapes and bits, on any device."""
    digest = hashlib.sha256()
    for name, tensor in tensors:
        digest.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)};".encode())
        digest.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def starting_point(model: nn.Module) -> str:
    """Fingerprint of a model's parameters, without LoRA matrices that do nothing yet: those are drawn unseeded."""
    # A copy of sharded ones, one at a time: what numpy has seen could not be given free again.
    own = is_sharded(model)
    parameters = list(model.named_parameters())
    second = ("lora_B", "lora_embedding_B")
    is_identity = not any(value.any() for name, value in parameters if any(part in name for part in second))
    counted = ((name, value) for name, value in parameters if not (is_identity and "lora_" in name))
    return fingerprint((name, value.clone() if own else value) for name, value in counted)


def _fingerprints(folder: Path) -> dict[str, dict[str, Any]]:
    """Size and SHA-256 of each file below `folder` but the manifest, by its relative path."""
    files = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path != folder / MANIFEST:
            with path.open("rb") as file:
                sha256 = hashlib.file_digest(file, "sha256").hexdigest()
            files[path.relative_to(folder).as_posix()] = {"bytes": path.stat().st_size, "sha256": sha256}
    return files
