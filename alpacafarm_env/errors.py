"""The package's own exceptions, and the one sentence every unknown name is answered with.

    AlpacaFarmError
    ├── UnknownNameError         (ValueError)    a split, an oracle, an option ... that does not exist
    ├── DataError                (ValueError)    a data file or data set does not hold what was promised
    ├── InvalidResponseError     (ValueError)    a response outside the action space
    ├── InvalidResponseTypeError (TypeError)     a response that is not a string
    ├── UnscoredError            (RuntimeError)  an oracle gave no verdict; the episode stays open
    ├── PolicyError              (RuntimeError)  a policy behind a server gave no response
    └── CheckpointError                          a checkpoint cannot be read or does not fit

Each also derives from the built-in a caller would expect, so that `except ValueError` keeps working.
"""

from collections.abc import Iterable
from difflib import get_close_matches


class AlpacaFarmError(Exception):
    """Base of every error this package raises on purpose."""


class UnknownNameError(AlpacaFarmError, ValueError):
    """A name that is not among the ones that exist."""


class DataError(AlpacaFarmError, ValueError):
    """Data that is missing, malformed or inconsistent; the message names the file, the record and the field."""


class InvalidResponseError(AlpacaFarmError, ValueError):
    """A response outside the action space: too long, or not encodable as UTF-8."""


class InvalidResponseTypeError(AlpacaFarmError, TypeError):
    """A response that is not a string, or a batch that is not a sequence of strings."""


class UnscoredError(AlpacaFarmError, RuntimeError):
    """An oracle gave no verdict. The episode is still open: `step` may be called again."""


class PolicyError(AlpacaFarmError, RuntimeError):
    """A policy behind a server gave no response; the message names the model, the instruction and the reason."""

    responses: tuple[str | None, ...] = ()
    """The call's responses that had arrived, in its order, None for the others; () if nothing was asked."""


class CheckpointError(AlpacaFarmError):
    """A checkpoint that cannot be read, or that belongs to another configuration."""


def did_you_mean(kind: str, name: object, options: Iterable[str]) -> UnknownNameError:
    """The error for an unknown name: what came, the closest existing name, and all of them.

    Args:
        kind: What the name should have been, in the singular ("split").
        name: What came instead.
        options: The names that exist, in the order to show them.

    Returns:
        The exception, for the caller to raise.

    Example:
        >>> print(did_you_mean("split", "evl", ["sft", "eval"]))
        Unknown split 'evl'. Did you mean 'eval'? Splits: sft, eval.
    """
    names = list(options)
    close = get_close_matches(str(name), names, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    listing = f" {kind[:1].upper()}{kind[1:]}s: {', '.join(names)}." if names else f" There are no {kind}s."
    return UnknownNameError(f"Unknown {kind} {name!r}.{hint}{listing}")
