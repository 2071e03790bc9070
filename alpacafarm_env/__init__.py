"""AlpacaFarm as Gymnasium environments: instruction following with pluggable reward oracles.

Importing registers the environments' ids and loads neither torch nor transformers.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .envs.registration import register_envs
from .errors import (
    AlpacaFarmError,
    CheckpointError,
    DataError,
    InvalidResponseError,
    InvalidResponseTypeError,
    PolicyError,
    UnknownNameError,
    UnscoredError,
)
from .instructions import Critique, Demonstration, Instruction, Preference, Rating
from .spaces import UnicodeText

if TYPE_CHECKING:
    from .data import Dataset, load_dataset
    from .envs.instruction import InstructionEnv
    from .envs.token import TokenEnv, TokenVectorEnv
    from .envs.vector import InstructionVectorEnv
    from .oracles import make_judge, make_oracle
    from .oracles.base import PreferenceOracle, RewardOracle

__version__ = "0.2.0"

# Loaded at first use.
_LAZY = {
    "Dataset": ".data",
    "InstructionEnv": ".envs.instruction",
    "InstructionVectorEnv": ".envs.vector",
    "PreferenceOracle": ".oracles.base",
    "RewardOracle": ".oracles.base",
    "TokenEnv": ".envs.token",
    "TokenVectorEnv": ".envs.token",
    "load_dataset": ".data",
    "make_judge": ".oracles",
    "make_oracle": ".oracles",
}

__all__ = [
    "AlpacaFarmError",
    "CheckpointError",
    "Critique",
    "DataError",
    "Dataset",
    "Demonstration",
    "Instruction",
    "InstructionEnv",
    "InstructionVectorEnv",
    "InvalidResponseError",
    "InvalidResponseTypeError",
    "PolicyError",
    "Preference",
    "PreferenceOracle",
    "Rating",
    "RewardOracle",
    "TokenEnv",
    "TokenVectorEnv",
    "UnicodeText",
    "UnknownNameError",
    "UnscoredError",
    "__version__",
    "load_dataset",
    "make_judge",
    "make_oracle",
    "register_envs",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LAZY[name], __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


register_envs()
