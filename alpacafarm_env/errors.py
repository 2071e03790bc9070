"""The package's own exceptions, and the one sentence every unknown name is answered with.

    AlpacaFarmError
    ├── UnknownNameError         (ValueError)    a split, an oracle, an option ... that does not exist
    ├── DataError                (ValueError)    a data file or data set does not hold what was promised
    ├── InvalidResponseError     (ValueError)    a response outside the action space
    ├── InvalidResponseTypeError (TypeError)     a response that is not a string
    ├── UnscoredError            (RuntimeError)  an oracle gave no verdict; the episode stays open
    ├── PolicyError              (RuntimeError)  a policy behind a server gave no response
    ├── PoolError                (ValueError)    a pool of annotators, a prompt or a list of models is not well written
    ├── UnparsableVerdictError   (ValueError)    an annotator's reply holds no verdict; never a tie
    ├── APIError                 (RuntimeError)  a request to a served model
    │   ├── PermanentAPIError                    refused: asking again would not help
    │   │   └── ContentRefusedError              this text was refused (filtered, too long); others may pass
    │   ├── TransientAPIError                    no valid reply within the attempts or the time allowed
    │   ├── OutageError                          the server has stopped answering anything
    │   └── InvalidReplyError                    a reply that is no answer
    ├── LedgerError              (RuntimeError)  the ledger's file cannot be used
    │   ├── BudgetExceededError                  a request that could pass the budget was not sent
    │   ├── PriceError                           a budget, but no price for the model
    │   └── ReplayMissError                      replay only, and no stored answer
    └── CheckpointError                          a checkpoint cannot be read or does not fit, a folder is taken

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


class PoolError(AlpacaFarmError, ValueError):
    """A file of annotators, prompts or models that is not well written; the message names the file and each field."""


class UnparsableVerdictError(AlpacaFarmError, ValueError):
    """An annotator's reply does not hold the verdicts it was asked for. Never read as a tie."""


class APIError(AlpacaFarmError, RuntimeError):
    """A request to a served model has failed. No message holds a key."""

    cost_usd: float = 0.0
    """What its attempts may have cost all the same, in US dollars; NaN where the model has no price."""


class PermanentAPIError(APIError):
    """The server refused: a wrong key, an unknown model, a spent quota, a filtered text. Asking again will not help."""


class ContentRefusedError(PermanentAPIError):
    """The server refused this request's own text: filtered, too long, cut before it said anything. Others may pass."""


class TransientAPIError(APIError):
    """No valid reply within the attempts or the time allowed; asking again later may help."""


class OutageError(APIError):
    """The server has stopped answering anything. Answers so far are kept."""


class InvalidReplyError(APIError):
    """The server replied with something that is no answer: cut JSON, HTML, no choice, no text."""


class LedgerError(AlpacaFarmError, RuntimeError):
    """The ledger's file cannot be used: damaged, of another program, of a newer version, not writable."""


class BudgetExceededError(LedgerError):
    """A request that could have passed the budget was not sent. Answers so far are kept."""


class PriceError(LedgerError):
    """There is a budget, but no price for the model, so no request was sent."""


class ReplayMissError(LedgerError):
    """The ledger is only replayed, and it has no answer to this request."""


class WorldError(AlpacaFarmError, RuntimeError):
    """Processes that were started together and do not fit together; the message names what differs."""


class CheckpointError(AlpacaFarmError):
    """A checkpoint that cannot be read or belongs to another configuration; a folder that somebody else writes."""


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
