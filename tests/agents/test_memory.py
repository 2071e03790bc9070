"""Memory: what keeps a step within it, and micro-batches that fit, by passes that never take more than is there."""

import os
import subprocess
import sys
from functools import partial

import pytest
import torch
from agent_worlds import PREFERENCES, RUNS, make_wide
from transformers import GPT2Config, LlamaConfig, Qwen2Config

from alpacafarm_env.agents import (
    RewardModeling,
    RewardModelingConfig,
)
from alpacafarm_env.agents.memory import (
    USABLE,
    DeviceMemory,
    Probe,
    checkpointed_layers,
    kv_bytes_a_token,
    rows_that_fit,
)
from alpacafarm_env.errors import NotEnoughMemoryError


def state(agent):
    trained = agent.model if isinstance(agent, RewardModeling) else agent.policy.model
    return {name: value.detach().clone() for name, value in trained.named_parameters()}


@pytest.mark.parametrize("name", ["sft", "dpo", "ppo", "quark", "reward_modeling"])
def test_agents_learn_the_same_with_checkpointing(name, policy_folder):
    found = []
    for setting in (False, True):
        agent = RUNS[name](policy_folder, gradient_checkpointing=setting)
        layer = checkpointed_layers([agent.model if name == "reward_modeling" else agent.policy.model])[0]
        passes = []  # of a part: the layer's own hooks are called outside of the checkpoint or inside, as versions go
        layer.self_attn.register_forward_hook(lambda module, *_, seen=passes: seen.append(torch.is_grad_enabled()))
        updates = agent.updates()
        metrics = [next(updates), next(updates)]
        assert not any(module.training for module in agent._loop._layers)
        found.append((metrics, state(agent), sum(passes)))
    (expected, weights, num), (metrics, others, num_again) = found
    assert metrics == expected
    assert all(torch.equal(others[name], weights[name]) for name in weights)
    assert num_again == 2 * num  # each pass with gradients is made again


LLAMA_7B = LlamaConfig()  # 32 layers of 32 heads of 128, 11008 wide within; 32000 tokens
QWEN_HALF = Qwen2Config(  # two heads of keys and values
    vocab_size=151_936,
    hidden_size=896,
    intermediate_size=4864,
    num_hidden_layers=24,
    num_attention_heads=14,
    num_key_value_heads=2,
)


def test_rows_that_fit_into_the_memory():
    assert kv_bytes_a_token(LLAMA_7B, torch.bfloat16) == 524_288
    assert kv_bytes_a_token(LLAMA_7B, torch.float32) == 1_048_576
    assert kv_bytes_a_token(QWEN_HALF, torch.bfloat16) == 24 * 2 * 64 * 2 * 2
    assert kv_bytes_a_token(GPT2Config(), torch.float32) == 12 * 12 * 64 * 2 * 4
    rows = partial(rows_that_fit, prompt=192, response=300)
    # 257.9 MB of keys and values, 19.0 to read the prompt, 0.5 to draw
    assert rows(0.2775e9 * 1.25 * 96 + 1e7, LLAMA_7B, torch.bfloat16) == 96
    assert rows(50e9, LLAMA_7B, torch.bfloat16) == 144
    assert rows(50e9, LLAMA_7B, torch.float32) == 72
    # 6.05 MB, 6.98 and 2.43: the prompts take more than what is kept of them
    assert rows(10e9, QWEN_HALF, torch.bfloat16) == int(8e9 / 15.46e6)
    assert rows(0, LLAMA_7B, torch.bfloat16) == 1


BASE, GRADIENTS, MOMENTS, A_TOKEN = 1000, 50, 100, 3


class Machine:
    """Memory of which a pass takes so much a token; a pass that takes more than there is would be the last."""

    def __init__(self, free, *, on_gpu=False, kept=0):
        self.device, self.on_gpu, self.kept = torch.device("cpu"), on_gpu, kept
        self.total, self.passes, self._peak, self._free = BASE + free, [], BASE, free

    def used(self):
        return BASE + self.kept * bool(self.passes)

    def free(self):
        return self._free

    def clear_peak(self):
        self._peak = self.used()

    def peak(self):
        return self._peak

    def run(self, sizes, rows):
        tokens = len(rows) * max(sizes[row] for row in rows.tolist())
        self._peak = BASE + self.kept + GRADIENTS + A_TOKEN * tokens
        if self._peak > self.total:
            assert self.on_gpu, "killed"
            raise torch.OutOfMemoryError("CUDA out of memory.")
        self.passes.append(tokens)


def probe(machine, sizes, *, worst=float):
    return Probe(
        machine,
        sizes,
        lambda rows: machine.run(sizes, rows),
        lambda: None,
        gradients=GRADIENTS,
        moments=MOMENTS,
        worst=worst,
        careful=not machine.on_gpu,
        who="A test",
    )


@pytest.mark.parametrize("on_gpu", [False, True])
def test_micro_batches_are_halved_until_they_fit(on_gpu):
    sizes = [8, *[40] * 31]
    for free, expected in ((10_000, 1024), (3_000, 512), (500, 64)):
        machine = Machine(free, on_gpu=on_gpu)
        found = probe(machine, sizes)
        if expected < 1024:
            with pytest.warns(UserWarning, match=str(expected)):
                assert found.tokens(1024) == expected
        else:
            assert found.tokens(1024) == expected
        assert machine.passes[-1] == 40 * (expected // 40)
        assert found.peak == BASE + GRADIENTS + MOMENTS + A_TOKEN * machine.passes[-1]
        assert found.peak <= found.allowed == BASE + USABLE * free


@pytest.mark.parametrize("on_gpu", [False, True])
def test_a_row_that_cannot_fit_is_refused_before_it_is_tried(on_gpu):
    machine = Machine(400, on_gpu=on_gpu)
    with pytest.raises(NotEnoughMemoryError, match="500 tokens"):
        probe(machine, [8, 500, 30]).tokens(1024)
    assert 500 not in machine.passes
    assert machine.passes == ([] if on_gpu else [8, 8])


def test_what_the_first_pass_keeps_is_no_row_s():
    machine = Machine(10_000, kept=900)
    assert probe(machine, [2, *[40] * 31]).tokens(1024) == 1024


def test_a_longer_row_than_wanted_is_a_micro_batch_of_its_own():
    assert probe(Machine(10**6), [5, 2000, 3]).tokens(1024) == 2000


def test_the_process_with_least_memory_decides_for_all():
    with pytest.warns(UserWarning, match="256"):
        assert probe(Machine(10**6), [10] * 100, worst=lambda ratio: ratio * 400).tokens(1024) == 256


def test_other_errors_are_no_lack_of_memory():
    def broken(rows):
        raise RuntimeError("shapes differ")

    with pytest.raises(RuntimeError, match="shapes differ"):
        Probe(Machine(10**6, on_gpu=True), [3], broken, lambda: None, careful=False, who="A test").tokens(8)


def trained(name, policy_folder):
    agent = make_wide(name, policy_folder)
    losses = [metrics["loss"] for metrics in agent.updates()]
    return agent._loop, losses


@pytest.mark.parametrize("name", ["sft", "dpo", "reward", "ppo"])
def test_a_run_short_of_memory_learns_the_same(name, policy_folder, monkeypatch):
    loop, expected = trained(name, policy_folder)
    assert loop.micro_batch_tokens == 1024
    fits = Probe._fits
    monkeypatch.setattr(Probe, "_fits", lambda self, rows: len(rows) == 1 and fits(self, rows))
    with pytest.warns(UserWarning, match="Results differ by rounding"):
        loop, losses = trained(name, policy_folder)
    assert loop.micro_batch_tokens < 1024
    assert losses == pytest.approx(expected, rel=1e-3)


def test_a_cpu_s_memory_is_that_of_the_process():
    memory, peaks = DeviceMemory(torch.device("cpu")), {}
    with memory.measured(peaks, "held"):
        before, held = memory.used(), torch.ones(50_000_000)
        assert memory.used() - before == pytest.approx(held.nbytes, rel=0.05)
        del held
    assert peaks["held"] - before > 1.9e8
    with memory.measured(peaks, "nothing"):
        pass
    assert peaks["nothing"] < peaks["held"] - 1e8
    assert memory.free() > 1e8


def test_a_container_s_limit_counts_and_what_it_has_cached_is_free(tmp_path, monkeypatch):
    monkeypatch.setattr("alpacafarm_env.pretrained._CGROUP", tmp_path)
    files = {"memory.max": "50000000", "memory.current": "40000000", "memory.stat": "anon 1\ninactive_file 30000000\n"}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert DeviceMemory(torch.device("cpu")).free() == 40_000_000
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert DeviceMemory(torch.device("cpu")).free() == 10_000_000
    (tmp_path / "memory.max").write_text("max")
    assert DeviceMemory(torch.device("cpu")).free() > 10_000_000


def test_a_reward_model_keeps_no_mask_for_its_backward_pass(policy_folder):
    agent = RewardModeling(policy_folder, PREFERENCES, config=RewardModelingConfig(batch_size=8))
    shapes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda each: shapes.append(each.shape) or each, lambda each: each):
        agent._sums(agent._pairs)
    assert len({len(text) for pair in agent._pairs for text in pair}) > 1  # so that there are pads
    assert not [shape for shape in shapes if len(shape) == 4 and shape[-1] == shape[-2] > 4]


@pytest.mark.skipif(sys.platform != "linux", reason="of glibc's malloc")
def test_freed_memory_is_kept():
    program = (
        "import resource, sys, torch\n"
        "from alpacafarm_env.agents.memory import keep_freed_memory\n"
        "torch.set_num_threads(1)\n"
        "if sys.argv[1] == 'keep': keep_freed_memory()\n"
        "def faults(): return resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
        "def step(): return [torch.ones(2_000_000) for _ in range(10)]\n"
        "step(); before = faults()\n"
        "for _ in range(10): step()\n"
        "print(faults() - before)"
    )
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    given = {"capture_output": True, "text": True, "env": environ}
    faults = {
        how: int(subprocess.run([sys.executable, "-c", program, how], check=True, **given).stdout)
        for how in ("", "keep")
    }
    assert faults["keep"] < faults[""] / 10
