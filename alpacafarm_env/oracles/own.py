"""Oracles and judges of a user's own, named `module:Name` as Gymnasium names environments of other modules.

A class or a function is called with the specification's keywords, and with `dataset` and `seed` if it has parameters
of these names; what it returns, or an object, is the oracle. A function of `instructions` and `responses` is one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal

from ..plugins import find_attribute
from .base import FunctionOracle, PreferenceOracle, RewardOracle

Kind = Literal["oracle", "judge", "rater"]
WIN_RATES: Final = {"annotators": "sim_ann", "win_rate": "sim_eval", "human": "human"}
"""Oracles that are a judge's win rate against the references."""
NAMES: Final[Mapping[Kind, tuple[str, ...]]] = {
    "oracle": ("surrogate", "gold", "recorded", "constant", *WIN_RATES),
    "judge": ("sim_eval", "sim_ann", "sim_gpt4", "human", "gold", "recorded"),
    "rater": ("sim_eval", "sim_gpt4", "human"),
}
"""Our own names."""
METHODS: Final[Mapping[Kind, str]] = {"oracle": "score", "judge": "compare"}
_PROTOCOLS: Final[Mapping[Kind, type]] = {"oracle": RewardOracle, "judge": PreferenceOracle}


def is_own(name: object) -> bool:
    """Whether a specification's name is `module:Name`, and no JSON given as text."""
    return isinstance(name, str) and ":" in name and not name.lstrip().startswith("{")


def is_object(value: object, kind: Kind) -> bool:
    """Whether an object, and no class, has what the protocol asks for: `isinstance` looks at the names alone."""
    if isinstance(value, type) or not isinstance(value, _PROTOCOLS[kind]):
        return False
    return isinstance(getattr(value, "name", None), str) and callable(getattr(value, METHODS[kind]))


def as_object(value: Any, kind: Kind) -> Any:
    """An object of that kind as it is, a function as an oracle that asks it; None for anything else."""
    if is_object(value, kind):
        return value
    function = callable(value) and not (isinstance(value, type) or hasattr(value, "score") or hasattr(value, "compare"))
    return FunctionOracle(value) if function and kind == "oracle" else None


def only_compares(name: str) -> bool:
    """Whether `module:Name` is a judge or its class, and no oracle; of a function nobody knows before it is called."""
    value = find_attribute("Oracle", name)
    return hasattr(value, "compare") and not hasattr(value, "score")


def parts_of(spec: Mapping[str, Any]) -> list[Any]:
    """The parts of a mapping that specify other oracles or judges."""
    if spec.keys() & {"reward_model", "pool", "human"}:
        return []
    if "ensemble" in spec:
        return list(spec["ensemble"])
    return [spec[key] for key in ("name", "judge", "rating") if key in spec]
