"""The package's own exceptions; each also derives from the built-in that a caller would expect."""

import inspect
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches


class AlpacaFarmError(Exception):
    """Base of every error this package raises on purpose."""


class UnknownNameError(AlpacaFarmError, ValueError):
    """A split, an oracle, an option ... that does not exist."""


class DataError(AlpacaFarmError, ValueError):
    """Data that is missing, malformed or inconsistent; the message names the file, the record and the field."""


class FieldError(DataError):
    """A field of a request that is not as expected; `field` is its name."""

    def __init__(self, field: str, text: str) -> None:
        super().__init__(f"{field}: {text}.")
        self.field = field


class InvalidResponseError(AlpacaFarmError, ValueError):
    """A response outside the action space: too long, or not encodable as UTF-8."""


class InvalidResponseTypeError(AlpacaFarmError, TypeError):
    """A response that is not a string, or a batch that is not a sequence of strings."""


class UnscoredError(AlpacaFarmError, RuntimeError):
    """An oracle gave no verdict. The episode is still open: `step` may be called again."""


class NotEnoughMemoryError(AlpacaFarmError, MemoryError):
    """A run that would take more memory than there is. Nothing has been trained."""


class PolicyError(AlpacaFarmError, RuntimeError):
    """A policy behind a server gave no response."""

    responses: tuple[str | None, ...] = ()
    """The call's responses that had arrived, in its order, None for the others; () if nothing was asked."""


class PoolError(AlpacaFarmError, ValueError):
    """A file of annotators, prompts or models that is not well written."""


class UnparsableVerdictError(AlpacaFarmError, ValueError):
    """An annotator's reply does not hold the verdicts it was asked for. Never read as a tie."""


class APIError(AlpacaFarmError, RuntimeError):
    """A request to a served model has failed. No message holds a key."""

    cost_usd: float = 0.0
    """US dollars that its attempts may have cost nevertheless; NaN where the model has no price."""


class PermanentAPIError(APIError):
    """The server refused: a wrong key, an unknown model, a spent quota. Asking again will not help."""


class ContentRefusedError(PermanentAPIError):
    """The server refused this text: filtered, too long, cut before it said anything. Others may pass."""


class TransientAPIError(APIError):
    """No valid reply within the attempts or the time allowed; asking again later may help."""


class OutageError(APIError):
    """The server has stopped answering anything. Answers so far are kept."""


class InvalidReplyError(APIError):
    """The server's reply is no answer: cut JSON, HTML, no choice, no text."""


class LedgerError(AlpacaFarmError, RuntimeError):
    """The ledger's file is damaged, of another program, of a newer version, or not writable."""


class BudgetExceededError(LedgerError):
    """A request that could have passed the budget was not sent. Answers so far are kept."""


class PriceError(LedgerError):
    """There is a budget but no price for the model, so no request was sent."""


class ReplayMissError(LedgerError):
    """The ledger is only replayed, and it has no answer to this request."""


class WorldError(AlpacaFarmError, RuntimeError):
    """Processes that were started together do not fit together."""


class CheckpointError(AlpacaFarmError):
    """A checkpoint cannot be read or does not fit, or a folder is being written by somebody else."""


class TrackerError(AlpacaFarmError, RuntimeError):
    """An experiment tracker cannot be used here: its package, or a folder for it, is missing."""


@contextmanager
def blaming(option: str) -> Iterator[None]:
    """While this context is open, a built-in error about a value becomes a DataError that begins with the option."""
    try:
        yield
    except AlpacaFarmError:
        raise
    except (TypeError, ValueError) as error:
        raise DataError(f"{option}: {error}") from error


def did_you_mean(kind: str, name: object, options: Iterable[str]) -> UnknownNameError:
    """The error for an unknown name, for the caller to raise.

    Example:
        >>> print(did_you_mean("split", "evl", ["sft", "eval"]))
        Unknown split 'evl'. Did you mean 'eval'? There are: sft, eval.
    """
    names = list(options)
    close = get_close_matches(str(name).casefold(), [each.casefold() for each in names], n=1)
    likely = [each for each in names if each.casefold() in close]
    hint = f" Did you mean {likely[0]!r}?" if likely else ""
    listing = f" There are: {', '.join(names)}." if names else " There is none."
    return UnknownNameError(f"Unknown {kind} {name!r}.{hint}{listing}")


def warn_caller(text: str, kind: type[Warning] = UserWarning) -> None:
    """Warns at the line outside this package that led here, however many calls there are between."""
    level, frame = 1, inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__", "").split(".")[0] == __name__.split(".")[0]:
        level, frame = level + 1, frame.f_back
    warnings.warn(text, kind, stacklevel=level)
