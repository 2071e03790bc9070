"""The page of docs/: every wrapper over every id works or refuses in words, as the page says."""

from pathlib import Path

import gymnasium as gym
import matrix
import pytest
from packaging.version import Version

from alpacafarm_env import wrappers
from alpacafarm_env.envs.registration import IDS

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "wrappers" / "matrix.md").read_text(encoding="utf-8")
NAMES = [(form, name) for form, cases in matrix.CASES.items() for name in (*cases, *matrix.OURS)]
# Gymnasium's batched form does not look at the space, and numpy fails on texts and dictionaries.
FAILS = {("batched", "NormalizeObservation")}

version = Version(PAGE.partition(" with Gymnasium ")[2].split(";")[0])
pytestmark = pytest.mark.skipif(Version(gym.__version__) < version, reason=f"the page is of Gymnasium {version}")


def written(form):
    """The page's table of one form: verdicts by id, by wrapper."""
    part = PAGE.partition(f"## {form.capitalize()}\n")[2].partition("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in part.splitlines() if line.startswith("| ")]
    return {name: dict(zip(IDS, verdicts, strict=True)) for name, *verdicts in rows[1:]}


def check(form, name, ids):
    """A wrapper whose package is missing here is left out."""
    verdicts = matrix.row(form, name, ids)
    if "needs" not in " ".join(verdicts):
        assert verdicts == [written(form)[name][id] for id in ids]


def test_the_page_has_every_wrapper():
    for form, space in (("single", gym.wrappers), ("batched", gym.wrappers.vector)):
        assert matrix.CASES[form].keys() == set(space.__all__) - {"vector"}
        assert list(written(form)) == [name for of, name in NAMES if of == form]
    assert matrix.OURS.keys() == set(wrappers.__all__) - {"vector"} == set(wrappers.vector.__all__)
    verdicts = {(form, name): " ".join(written(form)[name].values()) for form, name in NAMES}
    assert {at for at, told in verdicts.items() if "fails" in told or "wrong" in told} == FAILS
    assert all(told == " ".join(["works"] * len(IDS)) for (_, name), told in verdicts.items() if name in matrix.OURS)


@pytest.mark.parametrize(("form", "id"), [("single", "Token"), ("single", "Gold"), ("batched", "Gold")])
def test_gymnasium_s_wrappers_over_texts_and_tokens(form, id):
    for name in matrix.CASES[form]:
        check(form, name, [f"AlpacaFarm-{id}-v0"])


@pytest.mark.slow
@pytest.mark.parametrize(("form", "name"), NAMES)
def test_every_wrapper_over_every_id(form, name):
    check(form, name, IDS)
