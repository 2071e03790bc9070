"""The sources of a study, known by their content: other weights or data in the same folder are another study."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import pandas as pd

from ... import sandbox
from ...data import RecordedDataset, RowDataset, load_dataset
from ...data.dataset import data_files
from ...data.files import read_records
from ...data.recorded import INDEX, JUDGEMENT
from ...data.schema import Field, check_rows
from ...errors import DataError
from ...folders import Content, hash_folder, hash_model
from ...sandbox.dataset import ASSETS

Sources = Mapping[str, Callable[[], Content]]
"""The name of a source ("--policy") -> its present content."""


def data_content(name: str, *, allow_overlap: bool = False) -> Content:
    """The content of a dataset: "sandbox", a folder, or a hub name; DataError if there is none."""
    if name == "sandbox":
        return hash_folder(ASSETS / "data")
    folder = Path(name).expanduser()
    if folder.is_dir():
        return hash_folder(folder)
    dataset = load_dataset(name, allow_overlap=allow_overlap)
    return dataset.contents if isinstance(dataset, RowDataset) else {}


def sandbox_sources() -> Sources:
    """Everything the package ships."""
    models = {"policy": sandbox.POLICY, "reward model": sandbox.REWARD_MODEL, "clean": sandbox.REWARD_MODEL_CLEAN}
    return {
        "the sandbox's data": partial(data_content, "sandbox"),
        **{f"the sandbox's {name}": partial(hash_model, folder) for name, folder in models.items()},
    }


def judgements_digest(dataset: RecordedDataset) -> str:
    """Hash of a folder of recorded judgements and of the files in its subfolder `extras`, hexadecimal."""
    digest = hashlib.sha256(dataset.sha256.encode())
    for file in sorted((dataset.path / "extras").glob("*")):
        digest.update(file.name.encode() + hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


def published_table(path: Path, columns: Sequence[str], names: Sequence[str] | None = None) -> pd.DataFrame:
    """A published CSV table of numbers by the names in its first column; an empty cell is NaN.

    Args:
        path: Of the file, which may be packed by gzip.
        columns: What is read of it.
        names: Rows that must be there.

    Raises:
        DataError: It is no such table.
    """
    try:
        table = pd.read_csv(path, index_col=0, dtype=str)[[*columns]].astype(float)
        return table if names is None else table.loc[[*names]]
    except (OSError, EOFError, KeyError, ValueError) as error:
        raise DataError(
            f"{path}: expected a gzip CSV table with the columns {', '.join(columns)}, got {error!r}."
        ) from error


def eval_rows(dataset: RecordedDataset, *more: Field) -> pd.DataFrame:
    """The index of each instruction of eval, and `more` of its fields; DataError if the file is faulty."""
    files = data_files(dataset.path)
    path = files.get("eval_instructions") or files["eval"]
    return pd.DataFrame(check_rows(read_records(path), (INDEX, *more), str(path)))


def extra_files(folder: Path) -> dict[str, Path]:
    """The files in the subfolder `extras` of a folder of recorded judgements, by name; {} without it."""
    return data_files(folder / "extras") if (folder / "extras").is_dir() else {}


def judgements(path: Path, *more: Field) -> pd.DataFrame:
    """A file of judgements: a row each generator and index, of the record that `number` says, and `more` of its fields.

    Raises:
        DataError: It is faulty, or judges something twice.
    """
    frame = pd.DataFrame(
        [{**row, "number": row.number} for row in check_rows(read_records(path), (*JUDGEMENT, *more), str(path))]
    )
    if (repeated := frame.duplicated(["generator", "index"])).any():
        first = frame[repeated].iloc[0]
        pair = (first.generator, int(first["index"]))
        raise DataError(
            f"{path}: record {first.number}: expected one judgement of a generator and index, got {pair!r}."
        )
    return frame
