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
    for base, names in {
        ValueError: "Data InvalidResponse Pool UnparsableVerdict",
        TypeError: "InvalidResponseType",
        RuntimeError: "Unscored World Policy API Ledger",
        errors.APIError: "PermanentAPI TransientAPI Outage InvalidReply",
        errors.PermanentAPIError: "ContentRefused",
        errors.LedgerError: "BudgetExceeded Price ReplayMiss",
    }.items():
        assert all(issubclass(getattr(errors, f"{name}Error"), base) for name in names.split()), base
