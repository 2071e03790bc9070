"""LLM annotators behind an API: pools as data, prompts, verdicts, draws, the pool as an oracle, and a judge server.

`AnnotatorPool` asks, `make_pool` builds one with noise from plain keywords, `load_pool` reads a pool's file, and
`JudgeServer` serves the sandbox's annotators over HTTP. They are loaded when they are first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..judge_server.server import JudgeServer as JudgeServer
    from .config import load_pool as load_pool
    from .factory import make_pool as make_pool
    from .pool import AnnotatorPool as AnnotatorPool

_HOMES = {
    "AnnotatorPool": ".pool",
    "JudgeServer": "..judge_server.server",
    "load_pool": ".config",
    "make_pool": ".factory",
}
__all__ = ["AnnotatorPool", "JudgeServer", "load_pool", "make_pool"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name], __name__), name)
