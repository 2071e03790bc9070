"""LLM annotators behind an API. The names here are loaded when they are first used."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..judge_server.server import JudgeServer as JudgeServer
    from .config import load_pool as load_pool
    from .policy_pool import PolicyPool as PolicyPool
    from .policy_pool import make_policy_pool as make_policy_pool
    from .pool import AnnotatorPool as AnnotatorPool
    from .pool import RatingPool as RatingPool
    from .pool import make_pool as make_pool

_HOMES = {
    "AnnotatorPool": ".pool",
    "JudgeServer": "..judge_server.server",
    "PolicyPool": ".policy_pool",
    "RatingPool": ".pool",
    "load_pool": ".config",
    "make_policy_pool": ".policy_pool",
    "make_pool": ".pool",
}
__all__ = ["AnnotatorPool", "JudgeServer", "PolicyPool", "RatingPool", "load_pool", "make_policy_pool", "make_pool"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name], __name__), name)
