"""For other libraries: an oracle as a function. Each module imports its own library, and nothing here imports any."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from ..data.dataset import Dataset
from ..data.load import load_dataset
from ..errors import DataError
from ..oracles import make_oracle
from ..oracles.base import rewards_of, shorten
from ..oracles.judges import MicroBatched

_batched: dict[int, MicroBatched] = {}


def scorer(
    *, dataset: str | Dataset = "sandbox", oracle: str | Mapping[str, Any], seed: int = 0
) -> Callable[[Sequence[str], Sequence[str]], list[float]]:
    """A function of instructions and responses that asks an oracle; threads that call it together ask it once.

    It raises UnscoredError where the oracle gives no verdict, as trainers would make a number of it.
    """
    made = make_oracle(oracle, dataset=load_dataset(dataset), seed=seed)  # the same object for the same names
    return partial(rewards_of, _batched.setdefault(id(made), MicroBatched(made)))


def instruction_of(row: Mapping[str, Any] | None) -> str:
    """The instruction in a row's `extra_info`; DataError if there is none."""
    instruction = None if row is None else row.get("instruction")
    if not isinstance(instruction, str):
        source = "as `alpacafarm export --format verl` writes it"
        raise DataError(f"extra_info: expected the text `instruction`, {source}, got {shorten(str(row))}.")
    return instruction
