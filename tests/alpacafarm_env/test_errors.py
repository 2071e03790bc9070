import pytest

from alpacafarm_env import errors
from alpacafarm_env.errors import did_you_mean


def test_an_unknown_name_is_answered_with_the_closest_and_all():
    error = did_you_mean("split", "evl", ["sft", "eval"])
    assert str(error) == "Unknown split 'evl'. Did you mean 'eval'? Splits: sft, eval."
    assert isinstance(error, ValueError)


def test_nothing_is_suggested_when_nothing_is_close():
    assert str(did_you_mean("oracle", "zzz", ["gold"])) == "Unknown oracle 'zzz'. Oracles: gold."


@pytest.mark.parametrize("name", [None, 3, ("gold",)])
def test_a_name_that_is_no_string_is_shown_as_it_is(name):
    assert f"Unknown oracle {name!r}." in str(did_you_mean("oracle", name, ["gold"]))


def test_a_generator_of_options_is_read_once():
    assert "Splits: a, b." in str(did_you_mean("split", "x", (name for name in "ab")))


def test_no_options_at_all():
    assert str(did_you_mean("split", "eval", [])) == "Unknown split 'eval'. There are no splits."


def test_every_error_is_one_of_ours_and_the_builtin_a_caller_expects():
    builtin = {
        errors.UnknownNameError: ValueError,
        errors.DataError: ValueError,
        errors.InvalidResponseError: ValueError,
        errors.InvalidResponseTypeError: TypeError,
        errors.UnscoredError: RuntimeError,
        errors.WorldError: RuntimeError,
        errors.PolicyError: RuntimeError,
        errors.PoolError: ValueError,
        errors.UnparsableVerdictError: ValueError,
        errors.APIError: RuntimeError,
        errors.PermanentAPIError: errors.APIError,
        errors.ContentRefusedError: errors.PermanentAPIError,
        errors.TransientAPIError: errors.APIError,
        errors.OutageError: errors.APIError,
        errors.InvalidReplyError: errors.APIError,
        errors.LedgerError: RuntimeError,
        errors.BudgetExceededError: errors.LedgerError,
        errors.PriceError: errors.LedgerError,
        errors.ReplayMissError: errors.LedgerError,
        errors.CheckpointError: Exception,
    }
    for error, expected in builtin.items():
        assert issubclass(error, errors.AlpacaFarmError)
        assert issubclass(error, expected)
