import pytest

from alpacafarm_env import errors
from alpacafarm_env.errors import UnknownNameError, did_you_mean


@pytest.mark.parametrize(
    ("name", "options", "parts"),
    [
        ("evl", ("sft", "eval"), ("'evl'", "mean 'eval'", "sft, eval")),
        ("evl", (name for name in ("sft", "eval")), ("mean 'eval'", "sft, eval")),
        (3, ["gold"], ("3.", "gold")),
        (("gold",), ["gold"], ("('gold',)",)),
        ("eval", [], ("no splits",)),
    ],
)
def test_an_unknown_name_is_answered_with_the_closest_and_all(name, options, parts):
    error = did_you_mean("split", name, options)
    assert isinstance(error, UnknownNameError)
    assert isinstance(error, ValueError)
    assert all(part in str(error) for part in parts)
    assert "mean" not in str(did_you_mean("oracle", "zzz", ["gold"]))


def test_every_error_is_one_of_ours_and_the_builtin_a_caller_expects():
    own = [each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, Exception)]
    assert all(issubclass(each, errors.AlpacaFarmError) for each in own)
    values = (errors.DataError, errors.InvalidResponseError, errors.PoolError, errors.UnparsableVerdictError)
    assert all(issubclass(each, ValueError) for each in values)
    assert issubclass(errors.InvalidResponseTypeError, TypeError)
    runtime = (errors.UnscoredError, errors.WorldError, errors.PolicyError, errors.APIError, errors.LedgerError)
    assert all(issubclass(each, RuntimeError) for each in runtime)
    api = (errors.PermanentAPIError, errors.TransientAPIError, errors.OutageError, errors.InvalidReplyError)
    assert all(issubclass(each, errors.APIError) for each in api)
    assert issubclass(errors.ContentRefusedError, errors.PermanentAPIError)
    ledger = (errors.BudgetExceededError, errors.PriceError, errors.ReplayMissError)
    assert all(issubclass(each, errors.LedgerError) for each in ledger)
