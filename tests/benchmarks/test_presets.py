"""Presets, options, and methods and judges of one's own: what an agent gets, and whose word counts."""

import json
import sys
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig
from transformers import LlamaConfig

from alpacafarm_env import agents, sandbox
from alpacafarm_env.agents import processes
from alpacafarm_env.benchmarks import train
from alpacafarm_env.benchmarks.experiment.engine import Experiment, run
from alpacafarm_env.benchmarks.experiment.own_judge import judge_content, judge_settings, make_own_judge
from alpacafarm_env.benchmarks.methods.job import Job, lora_settings
from alpacafarm_env.benchmarks.methods.methods import BY_NAME
from alpacafarm_env.benchmarks.methods.presets import PRESETS, with_options
from alpacafarm_env.data import load_dataset
from alpacafarm_env.errors import CheckpointError, DataError
from alpacafarm_env.instructions import Instruction, Preference
from alpacafarm_env.plugins import source_hash, source_mark

CONFIGS = (
    *(agents.PPOConfig, agents.QuarkConfig, agents.DPOConfig, agents.SFTConfig, agents.RewardModelingConfig),
    agents.ExpertIterationConfig,
)


def job(tmp_path, **options):
    return Job(seed=0, folder=tmp_path, **options)


@pytest.mark.parametrize("name", PRESETS)
def test_every_agent_takes_of_a_preset_what_it_has(tmp_path, name):
    for preset in CONFIGS:
        config = job(tmp_path, preset=name).config(preset)
        has = getattr(config, "sft", config)  # expert iteration's settings of training
        for field, value in PRESETS[name].fields.items():
            assert getattr(has, field, value) == value


def test_a_given_option_wins_over_its_preset(tmp_path):
    given = ["--preset", "llama_7b_lora", "--dataset", "d", "--policy", "p"]
    kept = train.parse(["ppo", *given]).job()
    assert (kept.lora, kept.dtype, kept.reward_dtype) == (8, "bfloat16", "bfloat16")
    assert kept.config(agents.PPOConfig).micro_batch_tokens is None
    own = ["--lora", "0", "--dtype", "float32", "--micro-batch-tokens", "512", "--precision", "bfloat16"]
    changed = train.parse(["ppo", *given, *own]).job()
    assert (changed.lora, changed.dtype, changed.reward_dtype) == (0, "float32", "bfloat16")
    config = changed.config(agents.PPOConfig)
    assert (config.micro_batch_tokens, config.precision) == (512, "bfloat16")
    assert config.rollout_batch_size == agents.PPOConfig.paper().rollout_batch_size


TINY = LlamaConfig(vocab_size=300, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2)
SMALL = LlamaConfig(
    vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9
)
SEVEN_B = LlamaConfig()


@pytest.fixture
def own(tmp_path):
    """The command's options for a method and a policy of a shape, of which there is the configuration alone."""

    def options(method, shape, *given, folder=tmp_path / "policy"):
        shape.save_pretrained(tmp_path / "policy")
        return train.parse([method, "--dataset", "d", "--policy", str(folder), *given])

    return options


@pytest.mark.parametrize(
    ("shape", "gigabytes", "expected"),
    [
        (TINY, 0, "sandbox"),
        (SMALL, 0, "small_cpu"),
        (SMALL, 24, "small_chat"),
        (SEVEN_B, 80, "llama_7b_lora"),
        (SEVEN_B, 24, "small_chat"),
    ],
)
def test_the_preset_follows_the_policy_s_size_and_the_device(own, monkeypatch, shape, gigabytes, expected):
    if gigabytes:
        properties = SimpleNamespace(total_memory=gigabytes * 10**9)
        monkeypatch.setattr(processes, "default_device", lambda: torch.device("cuda"))
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert own("ppo", shape).job().preset == expected
    assert own("ppo", shape, "--preset", "paper").job().preset == "paper"


@pytest.mark.parametrize("preset", ["llama_7b_lora", "small_chat"])
def test_a_preset_s_value_beside_an_adapter_is_for_policies_that_have_one(tmp_path, preset):
    def value(**options):
        return job(tmp_path, preset=preset, **options).config(agents.PPOConfig).value

    assert value() == "adapter"
    assert value(lora=0) is None  # PPO's own default: a model of its own
    with pytest.raises(DataError, match="--lora"):
        value(lora=0, changed=(("value", "adapter"),))
    (tmp_path / "adapter_config.json").write_text("{}")
    assert value(sft=str(tmp_path)) == "adapter"


@pytest.fixture(scope="module")
def reward_adapter(tmp_path_factory):
    """A reward model's LoRA adapter over the sandbox's policy."""
    pairs = [Preference(Instruction("What is blue?"), ("The sky.", f"{i}"), 1) for i in range(8)]
    config = agents.RewardModelingConfig(epochs=1, batch_size=8)
    folder = tmp_path_factory.mktemp("models") / "adapter"
    agent = agents.RewardModeling(sandbox.POLICY, pairs, config=config, lora=LoraConfig(**lora_settings(2)))
    agent.learn()
    agent.save(folder)
    return folder


@pytest.mark.parametrize(("options", "shares"), [({}, True), ({"lora": 0}, False), ({"sharding": "full"}, False)])
def test_a_reward_adapter_reads_with_the_policy_s_own_weights(tmp_path, reward_adapter, options, shares):
    settings = {"lora": 2, **options}
    changed = tuple((name, settings.pop(name)) for name in ("sharding",) if name in settings)
    made = job(tmp_path, reward=str(reward_adapter), changed=changed, **settings)
    policy = made.policy()
    oracle = made.env(4, policy).unwrapped.oracle
    oracle.score(["What is blue?"], ["The sky."])
    ours = {p.data_ptr() for p in policy.model.parameters()}
    frozen = [p.data_ptr() in ours for name, p in oracle._model.named_parameters() if ".layers." in name]
    assert any(frozen) == shares
    if shares:
        agent = BY_NAME["best_of_16"].make(made)
        assert agent.oracle._base is not None


def test_options_reach_the_training_within_expert_iteration():
    changed = with_options(agents.ExpertIterationConfig.paper(), (("micro_batch_tokens", 99), ("num_instructions", 5)))
    assert (changed.sft.micro_batch_tokens, changed.num_instructions) == (99, 5)
    assert changed.micro_batch_tokens == agents.ExpertIterationConfig.paper().micro_batch_tokens
    with pytest.raises(DataError, match="--micro-batch-tokens 0"):
        with_options(agents.ExpertIterationConfig.paper(), (("micro_batch_tokens", 0),))


def test_what_may_change_on_a_resume_is_no_part_of_a_run(tmp_path):
    small, other = (
        train.parse(["sft", "--out", str(tmp_path), *more]).plan(None).settings()["changed"]
        for more in (["--micro-batch-tokens", "512"], ["--learning-rate", "0.1"])
    )
    assert (small, other) == ({}, {"learning_rate": 0.1})


SOURCE = """from alpacafarm_env.benchmarks.methods.methods import Method
import numpy as np
A = Method("mine", "A", make=None, needs="nothing")
B = Method("mine", "B", make=None, needs="nothing")
class Fair:
    name = "fair"
    def compare(self, instructions, a, b):
        return np.full(len(a), 0.5)
"""


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "marked_methods", raising=False)  # of another test's folder
    path = tmp_path / "marked_methods.py"
    path.write_text(SOURCE)
    return path


def test_a_hash_is_of_the_source_and_of_the_attribute(file, monkeypatch):
    names = [f"marked_methods:{name}" for name in "AB"]
    before = [source_hash(name) for name in names]
    assert [source_hash(name) for name in names] == before
    file.write_text(SOURCE + "# edited\n")
    assert [source_hash(name) for name in names] == before  # of what this process has loaded
    monkeypatch.delitem(sys.modules, "marked_methods")
    assert len({*before, *map(source_hash, names)}) == 4
    assert source_hash("sys:path") == source_hash("sys:path")  # no file
    assert source_mark("ppo") == ""


def test_a_method_edited_after_its_plan_was_made_is_refused(file, tmp_path, monkeypatch):
    plan = Experiment(cell="mine", agent="marked_methods:A", seed=0, out=tmp_path, quick=True)
    assert "mark" not in plan.settings()
    file.write_text(SOURCE + "# edited\n")
    monkeypatch.delitem(sys.modules, "marked_methods")  # as in a process that is started now
    with pytest.raises(CheckpointError, match="edited"):
        run(plan, print)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("judge", ["%s", '{"judge": "%s"}', '{"judge": {"name": "%s"}, "flip": 0}'])
def test_a_judges_source_is_content_of_the_study(file, monkeypatch, judge):
    judge, data = judge.replace("%s", "marked_methods:Fair"), load_dataset("sandbox")
    assert make_own_judge(judge, data).score(data.instructions("eval")[:2], ["", "Sure!"]).tolist() == [0.5, 0.5]
    before = judge_content(judge), judge_settings(judge)
    assert list(before[0]) == ["marked_methods:Fair"]
    json.dumps(before)
    monkeypatch.delitem(sys.modules, "marked_methods")
    assert (judge_content(judge), judge_settings(judge)) == before
    file.write_text(SOURCE + "# edited\n")
    monkeypatch.delitem(sys.modules, "marked_methods")
    assert judge_content(judge) != before[0]
    assert judge_settings(judge) == before[1]
