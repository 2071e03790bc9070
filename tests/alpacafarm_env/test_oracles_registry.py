"""Oracles and judges by name, one's own by `module:Name`: built once, and what is said about a wrong one."""

import importlib
import json
import math
import re
import shutil
import sys

import gymnasium as gym
import numpy as np
import pytest

from alpacafarm_env import sandbox
from alpacafarm_env.data import load_dataset
from alpacafarm_env.envs.instruction import InstructionEnv
from alpacafarm_env.envs.vector import InstructionVectorEnv
from alpacafarm_env.errors import CheckpointError, DataError, UnknownNameError
from alpacafarm_env.instructions import Instruction
from alpacafarm_env.oracles import (
    Constant,
    OracleError,
    Recorded,
    RecordedJudge,
    References,
    RewardModel,
    WinRate,
    make_judge,
    make_oracle,
)
from alpacafarm_env.wrappers import AddScore


class Longer:
    """Prefers the longer text."""

    name = "longer"

    def compare(self, instructions, a, b):
        return np.array([(np.sign(len(y) - len(x)) + 1) / 2 for x, y in zip(a, b, strict=True)])


class RecordedTiny:
    """The tiny data set with one judgement."""

    name, level = "recorded tiny", "recorded"

    def __init__(self, tiny):
        self.tiny, self.splits = tiny, tiny.splits
        self.instructions, self.references = tiny.instructions, tiny.references

    def recorded_verdicts(self, generator=None):
        return {(str(self.tiny.instructions("eval")[0]), "judged"): 1.0 if generator is None else 0.25}


def test_objects_are_returned_as_they_are(tiny_dataset, counting_oracle):
    assert make_oracle(counting_oracle, dataset=tiny_dataset) is counting_oracle
    assert make_judge(referee := Longer(), dataset=tiny_dataset) is referee
    assert make_oracle("constant", dataset=tiny_dataset) == Constant(0.0)
    oracle = make_oracle({"name": "constant", "value": 2.5}, dataset=tiny_dataset)
    assert oracle.score(["i", "j"], ["x", "y"]).tolist() == [2.5, 2.5]


def test_a_dataset_may_be_a_name():
    assert make_judge("eval", dataset="sandbox").name == make_judge("eval", dataset=sandbox.SANDBOX).name
    assert make_oracle("gold", dataset="sandbox") is make_oracle("gold", dataset=sandbox.SANDBOX)


def test_specifications_are_built_once(tiny_dataset, tiny_model):
    spec = {"reward_model": str(tiny_model), "batch_size": 8}
    oracle = make_oracle(spec, dataset=tiny_dataset)
    assert isinstance(oracle, RewardModel)
    assert oracle.name == "reward_model:model"
    assert make_oracle({"batch_size": 8, "reward_model": tiny_model}, dataset=tiny_dataset) is oracle
    assert make_oracle({**spec, "batch_size": 9}, dataset=tiny_dataset) is not oracle
    assert make_oracle(spec, dataset=tiny_dataset, seed=1) is not oracle
    assert make_oracle(spec, dataset=RecordedTiny(tiny_dataset)) is not oracle
    assert make_oracle({**spec, "name": "mine"}, dataset=tiny_dataset).name == "mine"


def test_own_judges_give_a_win_rate(tiny_dataset):
    oracle = make_oracle({"judge": Longer()}, dataset=tiny_dataset)
    assert isinstance(oracle, WinRate)
    assert oracle.name == "win_rate:longer"
    instructions = tiny_dataset.instructions("val")[:3]
    reference = tiny_dataset.references("val")[1]
    assert oracle.score(instructions, ["", reference, "x" * 99]).tolist() == [0.0, 0.5, 1.0]
    noisy = make_oracle({"judge": Longer(), "flip": 0.25, "both_orders": True, "seed": 4}, dataset=tiny_dataset)
    assert noisy.name == "win_rate:longer+both_orders+flip0.25"
    assert noisy.score(instructions, ["", reference, "x" * 99])[1] == 0.5
    assert make_judge({"judge": {"judge": Longer(), "flip": 0.1}}, dataset=tiny_dataset).name == "longer+flip0.1"


def test_a_mappings_seed_counts_more(tiny_dataset):
    instructions, texts = tiny_dataset.instructions("val") * 4, [f"response {i}" for i in range(48)]

    def scores(oracle_seed, **options):
        spec = {"judge": Longer(), "flip": 0.5, **options}
        return make_oracle(spec, dataset=tiny_dataset, seed=oracle_seed).score(instructions, texts)

    assert (scores(0) != scores(1)).any()
    np.testing.assert_array_equal(scores(0, seed=1), scores(1))


def test_recorded(tiny_dataset):
    dataset = RecordedTiny(tiny_dataset)
    first = dataset.instructions("eval")[0]
    oracle = make_oracle("recorded", dataset=dataset)
    assert isinstance(oracle, Recorded)
    np.testing.assert_array_equal(oracle.score([first, first], ["judged", "new"]), [1.0, math.nan])
    of_one = make_oracle({"name": "recorded", "generator": "gpt4"}, dataset=dataset)
    assert of_one.score([first], ["judged"]).tolist() == [0.25]
    assert isinstance(make_judge("recorded", dataset=dataset), RecordedJudge)
    with_references = make_oracle({"judge": "recorded"}, dataset=dataset)
    assert with_references.score([first, first], ["judged", dataset.references("eval")[0]]).tolist() == [1.0, 0.5]
    for make in (make_oracle, make_judge):
        with pytest.raises(DataError, match="'tiny' "):
            make("recorded", dataset=tiny_dataset)


def test_references_follow_an_instructions_split(tiny_dataset):
    references = References(tiny_dataset)
    asked = tiny_dataset.instructions("val")[2]
    assert references[asked] == references[str(asked)] == tiny_dataset.references("val")[2]
    assert references.get("never asked") is references.get(Instruction("never asked", split="val")) is None
    assert len(references) == len(list(references)) == 60


def test_the_first_of_several_references_counts(tmp_path):
    rows = [{"instruction": "Say b.", "input": "", "output": output} for output in ("b", "b", "B!")]
    (tmp_path / "eval.json").write_text(json.dumps(rows), encoding="utf-8")
    data = load_dataset(tmp_path, allow_overlap=True)
    references = References(data)
    with pytest.warns(UserWarning, match="1 of 3"):
        assert references[data.instructions("eval")[0]] == "b"
    assert references["Say b."] == "b"


@pytest.mark.parametrize(
    ("spec", "closest"),
    [
        ("golden", "'golden'.*'gold'.*surrogate, gold, "),
        ({"name": "win_rat"}, "'win_rate'"),
        ({"name": "constant", "valeu": 1}, "'valeu'.*'value'"),
        ({"name": "recorded", "judge_": 1}, "'judge_'"),
        ({"name": "annotators", "flipp": 0.1}, "'flipp'.*'flip'"),
        ({"reward_model": "x", "batchsize": 1}, "'batchsize'.*'batch_size'"),
        ({"judge": "evul"}, "'evul'.*'eval'"),
        ({"ensemble": ["constant"], "combin": "min"}, "'combine'"),
    ],
)
def test_a_wrong_name(tiny_dataset, spec, closest):
    with pytest.raises(UnknownNameError, match=closest):
        make_oracle(spec, dataset=tiny_dataset)


class Numbered:
    """Has the attributes of an oracle and of a judge, of wrong types."""

    name, score, compare = 5, None, None


@pytest.mark.parametrize(
    "spec",
    [
        *(5, None, [], object(), Longer(), Longer, Constant, Numbered()),
        *({}, {"flip": 0.1}, {"name": 5}, {"name": []}, {"name": "gold", "judge": "human"}),
        *({"reward_model": 5}, {"judge": 5}, {"judge": Constant()}, {"judge": Numbered()}, {"judge": {"flip": 0.1}}),
        *({"pool": "ann", "base": "http://127.0.0.1"}, {"ensemble": "gold"}, {"ensemble": [Longer()]}),
    ],
)
def test_environments_refuse_what_is_no_oracle(tiny_dataset, spec):
    for make in (make_oracle, InstructionEnv, lambda **keywords: InstructionVectorEnv(2, **keywords)):
        with pytest.raises((TypeError, ValueError), match=r"(?i)oracle|judge|option"):
            make(**{"spec" if make is make_oracle else "oracle": spec}, dataset=tiny_dataset)


def test_the_names_of_the_sandbox():
    data = load_dataset("sandbox")
    surrogate = make_oracle("surrogate", dataset=data)
    assert isinstance(surrogate, RewardModel)
    assert surrogate.path == sandbox.REWARD_MODEL
    assert make_oracle({"name": "surrogate", "max_length": 64}, dataset=data).max_length == 64
    for spec, name in (
        *((name, name) for name in ("surrogate", "gold", "annotators", "win_rate", "human")),
        ({"judge": "sim_ann"}, "annotators"),
        ({"judge": "sim_gpt4"}, "win_rate:sim_gpt4"),
        ({"name": "win_rate", "flip": 0.1}, "win_rate:sim_eval+flip0.1"),
    ):
        assert make_oracle(spec, dataset=data).name == name
    asked, responses = data.instructions("eval")[:50], ["A lion is brave, golden and proud."] * 50
    references = data.references("eval")[:50]
    for name, judge in (("win_rate", "sim_eval"), ("annotators", "sim_ann"), ("human", "human")):
        scores = make_oracle(name, dataset=data).score(asked, responses)
        np.testing.assert_array_equal(scores, sandbox.judge(judge).compare(asked, references, responses))
    assert [make_judge("human", dataset=data, seed=seed).seed for seed in (0, 5)] == [0, 5]
    assert make_judge({"judge": "human", "seed": 7}, dataset=data, seed=5).seed == 7


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("config.json", b'"alpacafarm_reward_mean": -0', b'"alpacafarm_reward_mean": -9'),
        ("prompt_template.json", b"{instruction}", b"Now: {instruction}"),
        ("tokenizer.json", b'"type": "BPE"', b'"type" : "BPE"'),
        ("model.safetensors", None, (sandbox.REWARD_MODEL_CLEAN / "model.safetensors").read_bytes()),
    ],
)
def test_every_changed_model_file_is_seen(tiny_dataset, tmp_path, file, old, new):
    spec = {"reward_model": shutil.copytree(sandbox.REWARD_MODEL, tmp_path / "model"), "name": "mine"}
    first, unread = (make_oracle({**spec, "name": name}, dataset=tiny_dataset) for name in ("mine", "b"))
    assert make_oracle(spec, dataset=tiny_dataset) is first
    before = first.score(["Hi"], ["Hello"])
    path = tmp_path / "model" / file
    path.write_bytes(new if old is None else path.read_bytes().replace(old, new))
    then = make_oracle(spec, dataset=tiny_dataset)
    assert then is not first
    assert (then.score(["Hi"], ["Hello"]) != before) == (file != "tokenizer.json")
    with pytest.raises(CheckpointError, match="changed"):
        unread.score(["Hi"], ["Hello"])  # its configuration is the old one, its weights would be the new ones


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
def broken(): raise KeyError("boom")
def longest(instructions, responses, *, price=1): return [price * len(text) for text in responses]
def maker(): return longest
BREVITY, SHORTER, NUMBER = Brevity(2.0, seed=0), Shorter(), 5
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
def test_own_classes_functions_and_objects_are_oracles(tiny_dataset):
    assert scores("mine:Brevity", tiny_dataset) == [-2, -4]
    assert scores("mine:BREVITY", tiny_dataset) == [-4, -8]
    assert scores({"name": "mine:Brevity", "price": 3}, tiny_dataset) == [-6, -12]
    assert scores({"name": "mine:needy", "price": 3, "rate": 1}, tiny_dataset) == [-6, -12]
    assert scores("mine:longest", tiny_dataset) == scores("mine:maker", tiny_dataset) == [2, 4]
    assert scores({"name": "mine:longest", "price": 3}, tiny_dataset) == [6, 12]
    assert make_oracle({"name": "mine:longest", "price": 3}, dataset=tiny_dataset).name == "longest"
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


def test_reloaded_modules_give_other_objects(tiny_dataset, file):
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
        ({"name": "mine:Brevity", "prize": 1}, UnknownNameError, "'prize'.*'price'"),
        ({"name": "mine:needy", "price": 1}, DataError, "oracle.rate"),
        ({"name": "mine:BREVITY", "price": 1}, TypeError, "no keywords.*price"),
        ("mine:NUMBER", TypeError, "name .* and score .*got 5"),
        ("mine:Shorter", TypeError, re.escape("{'judge': 'mine:Shorter'}")),
        ({"judge": "mine:Brevity"}, TypeError, "name .* and compare"),
    ],
)
def test_faulty_own_oracles_are_refused(tiny_dataset, spec, kind, says):
    with pytest.raises(kind, match=says) as raised:
        InstructionEnv(tiny_dataset, oracle=spec)
    assert "\n" not in str(raised.value)


def test_a_fault_in_ones_own_constructor_names_it(tmp_path, monkeypatch):
    (tmp_path / "mine_that_fails.py").write_text("def Mine():\n    raise KeyError('x')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(OracleError, match="mine_that_fails:Mine.*KeyError"):
        make_oracle("mine_that_fails:Mine", dataset=sandbox.SANDBOX)
