"""The environments' ids: one class, different defaults; any keyword can be overridden in `gym.make`."""

from collections.abc import Mapping
from typing import Any, Final

import gymnasium as gym

_TEXT: Final = {
    "entry_point": "alpacafarm_env.envs.instruction:InstructionEnv",
    "vector_entry_point": "alpacafarm_env.envs.vector:InstructionVectorEnv",
}
_TOKEN: Final = {
    "entry_point": "alpacafarm_env.envs.token:TokenEnv",
    "vector_entry_point": "alpacafarm_env.envs.token:TokenVectorEnv",
}

# Strings keep specs JSON-able and imports cheap. No wrappers, which make_vec refuses; no step limit, as TimeLimit would
# mark every one-step episode as truncated too.
_ENVIRONMENTS: Final[dict[str, tuple[Mapping[str, str], dict[str, Any]]]] = {
    "AlpacaFarm-PPO-v0": (_TEXT, {"split": "unlabeled", "oracle": "surrogate"}),
    "AlpacaFarm-Annotators-v0": (_TEXT, {"split": "preference", "oracle": "annotators"}),
    "AlpacaFarm-WinRate-v0": (_TEXT, {"split": "eval", "oracle": "win_rate"}),
    "AlpacaFarm-Gold-v0": (_TEXT, {"split": "val", "oracle": "gold"}),
    "AlpacaFarm-Token-v0": (_TOKEN, {"split": "unlabeled", "oracle": "surrogate"}),
}

IDS: Final = tuple(_ENVIRONMENTS)
TEXT_IDS: Final = tuple(id for id, (entry, _) in _ENVIRONMENTS.items() if entry is _TEXT)


def register_envs() -> None:
    """Registers every id with Gymnasium; ids that are registered already are left alone."""
    for id, (entry, kwargs) in _ENVIRONMENTS.items():
        if id not in gym.registry:
            gym.register(id, entry["entry_point"], vector_entry_point=entry["vector_entry_point"], kwargs=dict(kwargs))


def keywords_of(id: str) -> dict[str, Any]:
    """The keywords that an id stands for."""
    return dict(_ENVIRONMENTS[id][1])
