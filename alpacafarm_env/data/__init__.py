"""Datasets: AlpacaFarm's row kinds, files, splits, the Hugging Face hub, and recorded judgements."""

from .dataset import Dataset, FolderDataset, RowDataset
from .load import HubDataset, load_dataset, read_critiques, read_labels, read_ratings
from .recorded import RecordedDataset
from .schema import Fault

__all__ = [
    "Dataset",
    "Fault",
    "FolderDataset",
    "HubDataset",
    "RecordedDataset",
    "RowDataset",
    "load_dataset",
    "read_critiques",
    "read_labels",
    "read_ratings",
]
