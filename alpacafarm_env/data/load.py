"""Any dataset by its name: the sandbox, a folder, recorded or not, a file, the hub; and files of ratings.

A record of such a file is a rated response:

| field | value |
|---|---|
| instruction, input, output | as in AlpacaFarm's files; `input` is optional |
| rating | 1 to 7, 7 the best; null: nobody has rated it |
| critique | what was said of it, in words; optional |

Further fields, such as `annotator`, are let be.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Final, cast

from ..errors import DataError, UnknownNameError, did_you_mean
from ..instructions import RATINGS, Critique, Labelled, Rating
from .dataset import FILE_SPLITS, SPLITS, TRAIN, Dataset, FolderDataset, RowDataset, by_split, instruction_in
from .files import read_records, stem_of
from .forms import labelled_row
from .recorded import RecordedDataset, is_recorded
from .schema import ANSWERED, TEXT, Field, Row, check_rows, is_number, is_text

DATA_VARIABLE = "ALPACAFARM_DATA"
ALPACA_FARM = "tatsu-lab/alpaca_farm"
ALPACA_FARM_FILES = {
    "sft": "alpaca_instructions/sft",
    "preference": "alpaca_noisy_multi_preference/preference",
    "unlabeled": "alpaca_instructions/unlabeled",
    "val": "alpaca_instructions/val",
    "eval": "alpaca_farm_evaluation/eval",
}
"""Split -> configuration/split of AlpacaFarm's hub dataset; preferences are the simulated ones, its own default."""
_LOCAL = re.compile(r"^[./~\\]|\\|\.(jsonl?|parquet|csv|tsv|txt)(\.gz)?$", re.IGNORECASE)
"""Names that are looked for on this machine only."""


class HubDataset(RowDataset):
    """A dataset of the Hugging Face hub ("owner/name"), through the optional package `datasets`.

    `tatsu-lab/alpaca_farm` is read from the hub's own Parquet copy, since `datasets` no longer runs loading scripts.
    Any other dataset has to name its splits as `FolderDataset` has its files. `revision` is a branch, tag or commit:
    pin a commit for a result that is to be repeated.
    """

    def __init__(self, name: str, *, revision: str | None = None, allow_overlap: bool = False) -> None:
        super().__init__(name, _hub_records(name, revision), allow_overlap=allow_overlap)


def _hub_records(name: str, revision: str | None) -> dict[str, tuple[str, Sequence[object]]]:
    try:
        import datasets
    except ImportError as error:
        text = "no folder of that name, and reading it from the hub needs the package datasets"
        raise DataError(f"{name}: {text}. Install it (pip install datasets), or give a folder's path.") from error
    try:
        if name == ALPACA_FARM:
            branch = (revision or "refs/convert/parquet").replace("/", "%2F")
            source = f"hf://datasets/{name}@{branch}"
            splits = {
                split: datasets.load_dataset("parquet", data_files=f"{source}/{folder}/*.parquet", split="train")
                for split, folder in ALPACA_FARM_FILES.items()
            }
        else:
            # A configuration for each split is what `export` writes, as their fields differ.
            configs = [each for each in datasets.get_dataset_config_names(name, revision=revision) if each in SPLITS]
            splits = {}
            for config in configs or [None]:
                splits |= datasets.load_dataset(name, config, revision=revision)
    except Exception as error:  # the hub's client, the network and the cache each have errors of their own
        raise DataError(f"{name}: expected a dataset from the hub, got {type(error).__name__}: {error}") from error
    usable = [split for split in (*FILE_SPLITS, TRAIN) if split in splits]
    if not usable:
        raise DataError(f"{name}: expected splits among {', '.join((*FILE_SPLITS, TRAIN))}, got {sorted(splits)}.")
    return by_split(name, [(split, f"{name} ({split})", list(splits[split])) for split in usable])


def load_dataset(name: str | os.PathLike[str] | Dataset, *, allow_overlap: bool = False) -> Dataset:
    """The dataset of a name: "sandbox", a folder (recorded if it holds judgements), a file, or a hub name "owner/name".

    A single file is the split of its name, as in a folder, or else that of its rows: demonstrations are sft, pairs
    preference, instructions unlabeled. Each is read once a process; a dataset is returned as it is. Build `HubDataset`
    yourself to give a revision. `allow_overlap` is that of `RowDataset`. Raises DataError or UnknownNameError if the
    name is none of the four.
    """
    if not isinstance(name, str | os.PathLike):
        if isinstance(name, Dataset):
            return name
        raise DataError(f"expected a dataset's name, folder or object, got {name!r}.")
    text = os.fspath(name)
    if text == "sandbox":
        from ..sandbox import SANDBOX

        return SANDBOX
    if Path(text).expanduser().exists():
        return _load_local(Path(text).expanduser().resolve(), allow_overlap)
    inside = "/" in text and Path(text).parent.is_dir()
    local = inside or not isinstance(name, str) or _LOCAL.search(text)
    if not local and re.fullmatch(r"\w[\w.-]*/[\w.-]+", text):
        return _load_hub(text, allow_overlap)
    if local or "/" in text:
        layout = f"{', '.join(SPLITS)} (.json, .jsonl or .parquet)"
        raise DataError(f"{text}: expected a data file, or a folder with files named {layout}, got neither.")
    raise UnknownNameError(
        f"{did_you_mean('dataset', text, ['sandbox'])} There is no folder or file of that name either."
    )


def training_dataset(name: str | os.PathLike[str] | Dataset, *, allow_overlap: bool = False) -> Dataset:
    """As `load_dataset`, but a recorded folder that has eval alone is divided into all splits: `RecordedParts`."""
    data = load_dataset(name, allow_overlap=allow_overlap)
    return data.parts if isinstance(data, RecordedDataset) and data.splits == ("eval",) else data


@cache
def _load_local(path: Path, allow_overlap: bool) -> Dataset:
    if path.is_file():
        parts = [(str(stem_of(path)), str(path), read_records(path))]
        return RowDataset(str(path), by_split(str(path), parts), allow_overlap=allow_overlap)
    return RecordedDataset(path) if is_recorded(path) else FolderDataset(path, allow_overlap=allow_overlap)


@cache
def _load_hub(name: str, allow_overlap: bool) -> Dataset:
    return HubDataset(name, allow_overlap=allow_overlap)


def recorded_dataset(name: str | None) -> RecordedDataset:
    """The data folder of `--data` or of the environment variable; DataError if it holds no recorded judgements."""
    folder = name or os.environ.get(DATA_VARIABLE)
    made = "`alpacafarm data alpaca-eval CLONE --out FOLDER` makes one of a clone of AlpacaEval."
    if not folder:
        raise DataError(f"expected a folder of recorded judgements: give --data, or set {DATA_VARIABLE}. {made}")
    wanted = "a folder of recorded judgements (eval, outputs/ and preferences_<judge>)"
    if not Path(folder).expanduser().is_dir():
        raise DataError(f"{folder}: expected {wanted}, got no folder. {made}")
    if not is_recorded(place := Path(folder).expanduser().resolve()):
        raise DataError(f"{folder}: expected {wanted}, got one without preferences_<judge>. {made}")
    return cast(RecordedDataset, load_dataset(place))


def _is_rating(value: object) -> bool:
    return value is None or (is_number(value, RATINGS[0], RATINGS[-1]) and value in RATINGS)


RATED: Final = (
    *ANSWERED,
    Field("rating", f"a whole number from {RATINGS[0]} to {RATINGS[-1]}, or null", _is_rating, None),
    Field("critique", TEXT, is_text, ""),
)


LABELLED: Final = (*ANSWERED, Field("label", "true (good) or false (bad)", lambda value: isinstance(value, bool)))


def read_labels(path: str | os.PathLike[str]) -> list[Labelled]:
    """The labelled responses of a file, in its order: rows for KTO, in our fields or TRL's (`prompt`, `completion`).

    Raises:
        DataError: The file cannot be read, or records are faulty; names them.
    """
    place = Path(path).expanduser()
    rows = check_rows([labelled_row(record) for record in read_records(place)], LABELLED, str(place))
    return [Labelled(instruction_in(row), row["output"], row["label"]) for row in rows]


def read_ratings(path: str | os.PathLike[str]) -> list[Rating]:
    """The ratings of a file, in its order; records without one are passed over.

    Raises:
        DataError: The file cannot be read, or records are faulty; names them.
    """
    rows = [row for row in _rows(path) if row["rating"] is not None]
    return [Rating(instruction_in(row), row["output"], int(row["rating"])) for row in rows]


def read_critiques(path: str | os.PathLike[str]) -> list[Critique]:
    """The critiques of a file, in its order; records without one are passed over. Errors as of `read_ratings`."""
    return [Critique(instruction_in(row), row["output"], row["critique"]) for row in _rows(path) if row["critique"]]


def _rows(path: str | os.PathLike[str]) -> list[Row]:
    place = Path(path).expanduser()
    return check_rows(read_records(place), RATED, str(place))
