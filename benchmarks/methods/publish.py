"""A trained model's way to the Hugging Face hub; what would stop it at the end is looked for before training."""

import shlex
from inspect import signature
from pathlib import Path

from huggingface_hub import HfApi

from ...bases import adapter_base, is_adapter
from ...errors import CheckpointError, DataError
from .job import Job


def check_push(name: str, job: Job, *, adapter: bool) -> None:
    """Makes the hub's repository, private if it is new.

    Raises:
        DataError: What will be saved is an adapter whose base nobody else has.
        CheckpointError: This machine may not write there.
    """
    policy = job.policy_folder
    base = adapter_base(policy) if is_adapter(policy) else policy
    if adapter and (job.lora or is_adapter(policy)) and Path(base).is_dir():
        raise DataError(
            f"--push-to-hub {name}: expected a model that works elsewhere, got an adapter of {base}, which is on this "
            "machine only. Give --save merged, or a --policy by its hub name."
        )
    api = HfApi()
    try:
        api.create_repo(name, private=True, exist_ok=True)
        if "write" in signature(api.auth_check).parameters:
            api.auth_check(name, write=True)
    except Exception as error:  # the hub's client and the network each have errors of their own
        raise CheckpointError(
            f"--push-to-hub {name}: expected a repository that this machine may write to, got {_reason(error)} Log in "
            "(hf auth login) with a token that may write there, or leave the option out and push what was saved later: "
            f"hf upload {name} FOLDER"
        ) from error


def push(folder: Path, name: str) -> str:
    """Uploads a saved model; its address. CheckpointError, with how to do it by hand, if the hub does not take it."""
    if not folder.is_dir():
        raise DataError(f"--push-to-hub {name}: expected a method that trains a model, got one that saved none.")
    try:
        return str(HfApi().upload_folder(repo_id=name, folder_path=folder, commit_message="A model by alpacafarm-env"))
    except Exception as error:
        raise CheckpointError(
            f"The model is saved in {folder}, but was not pushed to {name}: {_reason(error)} Push it by hand: "
            f"hf upload {name} {shlex.quote(str(folder))}"
        ) from error


def _reason(error: Exception) -> str:
    return f"{' '.join(str(error).split())[:300] or type(error).__name__}."
