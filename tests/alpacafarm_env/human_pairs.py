"""Pairs for the tests of people's annotations, and what they answer."""

from alpacafarm_env.human.pairs import load_pairs, load_qualification
from alpacafarm_env.human.session import Session
from alpacafarm_env.human.store import Store

SCRIPT = "<script>alert(1)</script>"


def make_pairs(num, **more):
    """Pairs with an input now and then and a field of their own; output_1 says "left n", output_2 "right n"."""
    rows = [{"id": n, "instruction": f"Ask {n}", "output_1": f"left {n}", "output_2": f"right {n}"} for n in range(num)]
    return [{**row, **({"input": f"in {n}"} if n % 3 == 0 else {}), **more} for n, row in enumerate(rows)]


def qualification(num=10):
    """Pairs whose key is output_1."""
    return [{**row, "instruction": f"Test {n}", "preference": 1} for n, row in enumerate(make_pairs(num))]


def open_session(tmp_path, write, pairs, key=(), name="labels"):
    """A session over files of these records."""
    loaded = load_pairs(write(tmp_path / "pairs.json", pairs))
    tests = load_qualification(write(tmp_path / "key.json", key)) if key else []
    return Session(Store(tmp_path / f"{name}.sqlite"), loaded, tests)


def judge(session, name, better, slightly=False, seconds=10.0):
    """Answers the pair that is the annotator's now, so that `better` (1 or 2) is the better output."""
    standing = session.standing(name)
    first = better == standing.shown_first
    choice = (2 if slightly else 1) if first else (3 if slightly else 4)
    assert session.answer(name, standing.pair.key, seconds, choice=choice) == ""
    return standing.pair
