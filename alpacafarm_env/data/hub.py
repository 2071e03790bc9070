"""Datasets of the Hugging Face hub, through the optional package `datasets`."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import DataError
from .rows import SPLITS, RowDataset

ALPACA_FARM = "tatsu-lab/alpaca_farm"
ALPACA_FARM_FILES = {
    "sft": "alpaca_instructions/sft",
    "preference": "alpaca_noisy_multi_preference/preference",
    "unlabeled": "alpaca_instructions/unlabeled",
    "val": "alpaca_instructions/val",
    "eval": "alpaca_farm_evaluation/eval",
}
"""Split -> configuration/split of AlpacaFarm's hub dataset; preferences are the simulated ones, its own default."""


class HubDataset(RowDataset):
    """A dataset of the Hugging Face hub, through the package `datasets` (which must be installed).

    `tatsu-lab/alpaca_farm` is read from the hub's own Parquet copy, since `datasets` no longer runs loading scripts.
    Any other dataset has to name its splits sft, preference, unlabeled, val or eval.

    Args:
        name: "owner/name".
        revision: Branch, tag or commit; pin a commit for a result that is to be repeated.
        allow_overlap: See `RowDataset`.

    Raises:
        DataError: `datasets` is missing, the hub does not deliver, or the rows are faulty.
    """

    def __init__(self, name: str, *, revision: str | None = None, allow_overlap: bool = False) -> None:
        super().__init__(name, _hub_records(name, revision), allow_overlap=allow_overlap)


def _hub_records(name: str, revision: str | None) -> dict[str, tuple[str, Sequence[object]]]:
    try:
        import datasets
    except ImportError as error:
        raise DataError(
            f"{name}: no folder of that name, and reading it from the hub needs the package datasets. "
            "Install it (pip install datasets), or give the path of a folder."
        ) from error
    try:
        if name == ALPACA_FARM:
            branch = (revision or "refs/convert/parquet").replace("/", "%2F")
            files = {
                split: f"hf://datasets/{name}@{branch}/{folder}/*.parquet"
                for split, folder in ALPACA_FARM_FILES.items()
            }
            found = {
                split: datasets.load_dataset("parquet", data_files=pattern, split="train")
                for split, pattern in files.items()
            }
        else:
            found = dict(datasets.load_dataset(name, revision=revision))
    except Exception as error:  # the hub's client, the network and the cache each have errors of their own
        raise DataError(f"{name}: expected a dataset from the hub, got {type(error).__name__}: {error}") from error
    usable = {split: rows for split, rows in found.items() if split in SPLITS}
    if not usable:
        raise DataError(f"{name}: expected splits among {', '.join(SPLITS)}, got {sorted(found)}.")
    return {split: (f"{name} ({split})", list(usable[split])) for split in SPLITS if split in usable}
