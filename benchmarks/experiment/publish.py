"""A trained model's way to the Hugging Face hub; what would stop it at the end is looked for before training."""

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from inspect import signature
from pathlib import Path

from huggingface_hub import HfApi

from ...bases import base_of
from ...errors import CheckpointError, DataError
from ..methods.job import Job


def check_push(name: str, job: Job, *, adapter: bool) -> None:
    """Makes the hub's repository, private if it is new.

    Raises:
        DataError: What will be saved is an adapter whose base nobody else has.
        CheckpointError: This machine may not write there.
    """
    base = Path(base_of(job.policy_folder))
    if adapter and job.trains_adapter and base.is_dir():
        wanted = "Give --save merged, or a --policy by its hub name"
        raise DataError(f"--push-to-hub: expected a base that others have, got {base} for an adapter. {wanted}.")
    api = HfApi()
    with _reaching(f"--push-to-hub {name}: expected a repository to write to", f"{name} FOLDER, after training"):
        api.create_repo(name, private=True, exist_ok=True)
        if "write" in signature(api.auth_check).parameters:
            api.auth_check(name, write=True)


def push(folder: Path, name: str) -> str:
    """Uploads a saved model; its address. CheckpointError, with how to do it by hand, if the hub does not take it."""
    with _reaching(f"Expected to push {folder} to {name}", f"{name} {shlex.quote(str(folder))}"):
        return str(HfApi().upload_folder(repo_id=name, folder_path=folder, commit_message="A model by alpacafarm-env"))


@contextmanager
def _reaching(expected: str, by_hand: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # the hub's client and the network each have errors of their own
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        todo = f"What was saved is kept. Log in with a token that may write (hf auth login), or: hf upload {by_hand}"
        raise CheckpointError(f"{expected}, got: {reason}. {todo}") from error
