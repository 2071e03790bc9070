"""Oracles and judges of one's own by name, `module:Name`."""

import importlib
import json
import re
import sys

import gymnasium as gym
import pytest

from alpacafarm_env.envs.instruction import InstructionEnv
from alpacafarm_env.errors import UnknownNameError
from alpacafarm_env.oracles import make_judge, make_oracle
from alpacafarm_env.oracles.base import OracleError
from alpacafarm_env.wrappers import AddScore

SOURCE = """
import numpy as np
class Brevity:
    def __init__(self, price=1.0, *, seed):
        self.name, self.price, self.seed = "brevity", price, seed
    def score(self, instructions, responses):
        return -self.price * np.array([len(text) for text in responses], float)
class Shorter:
    name = "shorter"
    def compare(self, instructions, a, b):
        return np.array([(np.sign(len(x) - len(y)) + 1) / 2 for x, y in zip(a, b, strict=True)])
def of_dataset(dataset, **options):
    made = Brevity(seed=0)
    made.name = f"{dataset.name}, {options}"
    return made
def needy(price, rate): return Brevity(price, seed=rate)
def five(): return 5
def broken(): raise KeyError("boom")
BREVITY, SHORTER, NUMBER = Brevity(2.0, seed=0), Shorter(), 5
class Nameless:
    def score(self, instructions, responses): return np.zeros(len(responses))
"""


@pytest.fixture
def file(tmp_path, monkeypatch):
    """`mine.py`, which can be imported."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    path = tmp_path / "mine.py"
    path.write_text(SOURCE)
    yield path
    sys.modules.pop("mine", None)


def scores(spec, dataset, **given):
    oracle = make_oracle(json.loads(json.dumps(spec)), dataset=dataset, **given)
    return oracle.score(dataset.instructions("eval")[:2], ["12", "1234"]).tolist()


@pytest.mark.usefixtures("file")
def test_a_class_a_function_and_an_object_are_oracles(tiny_dataset):
    assert scores("mine:Brevity", tiny_dataset) == [-2, -4]
    assert scores("mine:BREVITY", tiny_dataset) == [-4, -8]
    assert scores({"name": "mine:Brevity", "price": 3}, tiny_dataset) == [-6, -12]
    assert scores({"name": "mine:needy", "price": 3, "rate": 1}, tiny_dataset) == [-6, -12]
    assert scores({"ensemble": ["mine:BREVITY", {"name": "mine:Brevity", "price": 4}]}, tiny_dataset) == [-6, -12]


@pytest.mark.usefixtures("file")
def test_dataset_and_seed_go_to_what_names_them(tiny_dataset):
    assert make_oracle("mine:Brevity", dataset=tiny_dataset, seed=4).seed == 4
    assert make_oracle({"name": "mine:Brevity", "seed": 5}, dataset=tiny_dataset, seed=4).seed == 5
    assert make_oracle({"name": "mine:of_dataset", "x": 1}, dataset=tiny_dataset).name == "tiny, {'x': 1}"


@pytest.mark.usefixtures("file")
@pytest.mark.parametrize("judge", ["mine:Shorter", "mine:SHORTER", {"name": "mine:Shorter"}])
def test_a_judge_gives_a_win_rate(tiny_dataset, judge):
    asked, references = tiny_dataset.instructions("eval")[:3], tiny_dataset.references("eval")[:3]
    oracle = make_oracle({"judge": judge}, dataset=tiny_dataset)
    assert oracle.name == "win_rate:shorter"
    assert oracle.score(asked, ["", references[1], references[2] + "!"]).tolist() == [1, 0.5, 0]
    assert make_judge({"judge": judge, "flip": 0.1}, dataset=tiny_dataset).name == "shorter+flip0.1"


@pytest.mark.usefixtures("file")
def test_environments_and_wrappers_take_the_name(tiny_dataset):
    env = AddScore(InstructionEnv(tiny_dataset, oracle="mine:Brevity"), key="half", oracle="mine:BREVITY")
    env.reset(seed=0)
    _, reward, *_, info = env.step("123")
    assert (reward, info["half"]) == (-3, -6)
    registered = gym.make("AlpacaFarm-PPO-v0", oracle={"name": "mine:Brevity", "price": 2})
    again = gym.make(gym.envs.registration.EnvSpec.from_json(registered.spec.to_json()))
    again.reset(seed=0)
    assert again.step("123")[1] == -6


def test_one_name_is_one_object_until_its_module_is_reloaded(tiny_dataset, file):
    first = make_oracle("mine:Brevity", dataset=tiny_dataset)
    assert make_oracle("mine:Brevity", dataset=tiny_dataset) is first
    assert make_oracle("mine:BREVITY", dataset=tiny_dataset) is sys.modules["mine"].BREVITY
    file.write_text(SOURCE.replace("-self.price", "100 * self.price"))
    importlib.reload(sys.modules["mine"])
    assert scores("mine:Brevity", tiny_dataset) == [200, 400]
    assert scores({"ensemble": ["mine:Brevity"]}, tiny_dataset) == [200, 400]


@pytest.mark.usefixtures("file")
@pytest.mark.parametrize(
    ("spec", "kind", "says"),
    [
        ("no_such_module:X", UnknownNameError, "No module named 'no_such_module'"),
        ("mine:Nothing", UnknownNameError, "no attribute 'Nothing'"),
        (":X", UnknownNameError, "module:attribute"),
        ("mine.Brevity", UnknownNameError, "module:Name"),
        ('{"name": "mine:Brevity"}', UnknownNameError, "Unknown oracle"),
        ({"name": "mine:Brevity", "prize": 1}, UnknownNameError, "'prize'.*'price'"),
        ({"judge": {"name": "mine:Shorter", "prize": 1}}, UnknownNameError, "'prize'"),
        ({"name": "mine:needy", "price": 1}, TypeError, "missing.*'rate'"),
        ({"name": "mine:BREVITY", "price": 1}, TypeError, "no keywords.*price"),
        ("mine:NUMBER", TypeError, "name .* and score .*got 5"),
        ("mine:Shorter", TypeError, re.escape("{'judge': 'mine:Shorter'}")),
        ({"judge": "mine:Brevity"}, TypeError, "name .* and compare"),
        ({"ensemble": ["mine:NUMBER"]}, TypeError, "got 5"),
    ],
)
def test_what_is_none_is_refused_when_the_environment_is_made(tiny_dataset, spec, kind, says):
    with pytest.raises(kind, match=says) as raised:
        InstructionEnv(tiny_dataset, oracle=spec)
    assert "\n" not in str(raised.value)


@pytest.mark.usefixtures("file")
@pytest.mark.parametrize("spec", ["mine:five", "mine:Nameless"])
def test_what_was_made_must_be_an_oracle(tiny_dataset, spec):
    with pytest.raises(TypeError, match="name .* and score"):
        make_oracle(spec, dataset=tiny_dataset)


def test_a_module_that_fails_says_how(tiny_dataset, file):
    file.write_text("1 / 0")
    with pytest.raises(UnknownNameError, match="ZeroDivisionError"):
        make_oracle("mine:X", dataset=tiny_dataset)


@pytest.mark.usefixtures("file")
def test_an_error_of_its_own_names_the_oracle(tiny_dataset):
    with pytest.raises(OracleError, match="mine:broken.*KeyError.*boom") as found:
        make_oracle("mine:broken", dataset=tiny_dataset)
    assert isinstance(found.value.__cause__, KeyError)
