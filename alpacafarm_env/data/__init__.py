"""Datasets: AlpacaFarm's row kinds, files, splits, the Hugging Face hub, and recorded judgements."""

from .dataset import Dataset, FolderDataset
from .hub import HubDataset
from .load import load_dataset
from .recorded import RecordedDataset
from .rows import RowDataset
from .schema import Fault

__all__ = ["Dataset", "Fault", "FolderDataset", "HubDataset", "RecordedDataset", "RowDataset", "load_dataset"]
