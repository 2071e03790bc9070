"""Types of arguments: what they take, and what they say to anything else."""

from argparse import ArgumentTypeError

import pytest

from alpacafarm_env.arguments import positive_number, real_number, whole_number


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
