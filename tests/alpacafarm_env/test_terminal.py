"""What a user sees on a terminal: refused arguments, errors, tables, progress."""

import io
import sys
from argparse import ArgumentTypeError

import pytest

from alpacafarm_env import errors, progress
from alpacafarm_env.arguments import positive_number, real_number, whole_number
from alpacafarm_env.errors import UnknownNameError, did_you_mean
from alpacafarm_env.progress import make_bar
from alpacafarm_env.tables import format_cell, format_table


def test_what_is_taken():
    assert [whole_number()("0"), whole_number(1)(" 7 "), whole_number(0, 65535)("65535")] == [0, 7, 65535]
    assert [real_number()("1e3"), real_number(0, 0.5)("0.5"), positive_number("0.001")] == [1000.0, 0.5, 0.001]


@pytest.mark.parametrize(
    ("read", "texts", "expected"),
    [
        (whole_number(), ("", "-1", "1.0", "two", "0x3", "1_0", "inf", "nan"), "int of 0 or more"),
        (whole_number(0, 65535), ("-1", "65536", "8e3", ""), "int of 0 to 65535"),
        (real_number(0, 0.5), ("", "-0.1", "0.6", "inf", "nan", "1e999", "half"), "0 to 0.5"),
        (positive_number, ("0", "-3", "nan", "inf", "soon"), "above 0"),
    ],
)
def test_what_is_refused_is_shown_beside_what_is_expected(read, texts, expected):
    for text in texts:
        with pytest.raises(ArgumentTypeError, match=f"{expected}.*'{text}'"):
            read(text)


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


def test_names_to_the_left_and_numbers_to_the_right():
    rows = [{"who": "a", "model": "m", "n": 3, "rate": 51.239}, {"who": "longer", "model": "x", "n": 12, "rate": 7.0}]
    table = "who      n   rate\na        3  51.24\nlonger  12   7.00"
    assert format_table(("who", "n", "rate"), rows) == table
    assert format_table(("who", "model", "n"), rows, left=2).split("\n")[2] == "longer  x      12"
    assert format_cell(float("nan")) == "nan"
    assert format_table(("who", "n"), []) == "who  n"


def test_a_log_gets_lines_now_and_then_and_the_end_or_nothing(monkeypatch):
    file = io.StringIO()
    monkeypatch.setattr("sys.stderr", file)
    with make_bar(2, "SFT", show=False) as bar:
        bar.update()
    assert file.getvalue() == ""
    with make_bar(1000, "SFT", unit="step") as bar:
        for _ in range(1000):
            bar.update()
    assert "\r" not in file.getvalue()
    first, last = filter(None, file.getvalue().split("\n"))
    assert first.startswith("SFT")
    assert "1000/1000" in last
    monkeypatch.setattr(progress, "SECONDS_IN_A_LOG", 0)
    with make_bar(3, "SFT") as bar:
        for _ in range(3):
            bar.update()
    assert len([line for line in file.getvalue().split("\n") if "/3 " in line]) >= 4


def test_a_notebook_is_redrawn_in_place(monkeypatch):
    stream = type("OutStream", (io.StringIO,), {"__module__": "ipykernel.iostream"})
    monkeypatch.setattr("sys.stderr", stream())
    with make_bar(6, "SFT") as bar:
        bar.update(6)
    assert "\r" in sys.stderr.getvalue()
    assert "6/6" in sys.stderr.getvalue()
