"""Types of arguments: what they take, and what they say to anything else."""

from argparse import ArgumentTypeError

import pytest

from alpacafarm_env.arguments import positive_number, real_number, whole_number


def test_what_is_taken():
    assert [whole_number()("0"), whole_number(1)(" 7 "), whole_number(2)("2")] == [0, 7, 2]
    assert [whole_number(0, 65535)("65535"), positive_number("0.001")] == [65535, 0.001]
    assert [real_number()("1e3"), real_number(0, 0.5)("0.5"), real_number()("0")] == [1000.0, 0.5, 0.0]


@pytest.mark.parametrize("text", ["", "-1", "1.0", "two", "0x3", "1_0", "inf", "nan"])
def test_what_is_no_whole_number(text):
    with pytest.raises(ArgumentTypeError, match=f"expected an int of 0 or more, got '{text}'"):
        whole_number()(text)


@pytest.mark.parametrize("text", ["", "-0.1", "0.6", "inf", "nan", "1e999", "half"])
def test_what_is_out_of_range(text):
    with pytest.raises(ArgumentTypeError, match=f"expected a number of 0 to 0.5, got '{text}'"):
        real_number(0, 0.5)(text)


@pytest.mark.parametrize("text", ["-1", "65536", "8e3", ""])
def test_what_is_no_port(text):
    with pytest.raises(ArgumentTypeError, match=f"expected an int of 0 to 65535, got '{text}'"):
        whole_number(0, 65535)(text)


@pytest.mark.parametrize("text", ["0", "-3", "nan", "inf", "soon"])
def test_what_is_not_positive(text):
    with pytest.raises(ArgumentTypeError, match=f"expected a number above 0, got '{text}'"):
        positive_number(text)
