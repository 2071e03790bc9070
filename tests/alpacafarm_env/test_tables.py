"""Tables for a terminal."""

from alpacafarm_env.tables import format_cell, format_table


def test_names_to_the_left_and_numbers_to_the_right():
    rows = [{"who": "a", "model": "m", "n": 3, "rate": 51.239}, {"who": "longer", "model": "x", "n": 12, "rate": 7.0}]
    table = "who      n   rate\na        3  51.24\nlonger  12   7.00"
    assert format_table(("who", "n", "rate"), rows) == table
    assert format_table(("who", "model", "n"), rows, left=2).split("\n")[2] == "longer  x      12"
    assert format_cell(float("nan")) == "nan"
    assert format_table(("who", "n"), []) == "who  n"
