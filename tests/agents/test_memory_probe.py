"""Micro-batches that fit into the memory: by passes that never take more than is there."""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from agent_worlds import DEMONSTRATIONS, PREFERENCES
from tiny_worlds import load_policy, make_env, small_ppo

from alpacafarm_env.agents import DPO, PPO, SFT, DPOConfig, RewardModeling, RewardModelingConfig, SFTConfig
from alpacafarm_env.agents.memory_probe import USABLE, DeviceMemory, Probe
from alpacafarm_env.errors import NotEnoughMemoryError

BASE, GRADIENTS, MOMENTS, A_TOKEN = 1000, 50, 100, 3


class Machine:
    """Memory of which a pass takes so much a token; a pass that takes more than there is would be the last."""

    def __init__(self, free, *, on_gpu=False):
        self.device, self.on_gpu = torch.device("cpu"), on_gpu
        self.total, self.passes, self._peak, self._free = BASE + free, [], BASE, free

    def used(self):
        return BASE

    def free(self):
        return self._free

    def clear_peak(self):
        self._peak = BASE

    def peak(self):
        return self._peak

    def run(self, sizes, rows):
        tokens = len(rows) * max(sizes[row] for row in rows.tolist())
        self._peak = BASE + GRADIENTS + A_TOKEN * tokens
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


@pytest.fixture(autouse=True)
def _no_pages_of_their_own(monkeypatch):
    """What holds for the rest of a process is not for one that runs other tests."""
    monkeypatch.setattr("alpacafarm_env.agents.memory_probe.map_large_tensors", lambda: False)


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
    assert machine.passes == ([] if on_gpu else [8])


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
    policy = load_policy(policy_folder, max_response_tokens=40)
    config = {"learning_rate": 1e-2, "batch_size": 8, "epochs": 2}
    make = {
        "sft": lambda: SFT(policy, DEMONSTRATIONS, config=SFTConfig(**config)),
        "dpo": lambda: DPO(policy, PREFERENCES, config=DPOConfig(**config)),
        "reward": lambda: RewardModeling(policy_folder, PREFERENCES, config=RewardModelingConfig(**config)),
        "ppo": lambda: PPO(make_env(8), policy, config=replace(small_ppo(), micro_batch_tokens=None)),
    }
    agent = make[name]()
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
    monkeypatch.setattr("alpacafarm_env.host_memory._CGROUP", tmp_path)
    files = {"memory.max": "50000000", "memory.current": "40000000", "memory.stat": "anon 1\ninactive_file 30000000\n"}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert DeviceMemory(torch.device("cpu")).free() == 40_000_000
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert DeviceMemory(torch.device("cpu")).free() == 10_000_000
    (tmp_path / "memory.max").write_text("max")
    assert DeviceMemory(torch.device("cpu")).free() > 10_000_000


GAPS = """
import psutil, torch
from alpacafarm_env.agents.memory_probe import map_large_tensors
assert map_large_tensors()
before = psutil.Process().memory_info().rss
tensors = [torch.ones(500_000) for _ in range(200)]  # of 2 MB
del tensors[::2]
print((psutil.Process().memory_info().rss - before) / 2e6)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's")
def test_a_large_tensor_s_pages_go_back_with_it():
    done = subprocess.run([sys.executable, "-c", GAPS], capture_output=True, text=True, check=True)
    assert float(done.stdout) == pytest.approx(100, abs=10)


def test_a_reward_model_keeps_no_mask_for_its_backward_pass(policy_folder):
    agent = RewardModeling(policy_folder, PREFERENCES, config=RewardModelingConfig(batch_size=8))
    shapes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda each: shapes.append(each.shape) or each, lambda each: each):
        agent._sums(agent._pairs)
    assert len({len(text) for pair in agent._pairs for text in pair}) > 1  # so that there are pads
    assert not [shape for shape in shapes if len(shape) == 4 and shape[-1] == shape[-2] > 4]
