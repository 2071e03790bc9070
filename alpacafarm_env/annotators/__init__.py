"""LLM annotators behind an API. The names here are loaded when they are first used."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..judge_server.server import JudgeServer as JudgeServer
    from .config import load_pool as load_pool
    from .pool import AnnotatorPool as AnnotatorPool
    from .pool import RatingPool as RatingPool
    from .pool import make_pool as make_pool

__all__ = ["AnnotatorPool", "JudgeServer", "RatingPool", "load_pool", "make_pool"]
_HOMES = {"JudgeServer": "..judge_server.server", "load_pool": ".config"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES.get(name, ".pool"), __name__), name)
