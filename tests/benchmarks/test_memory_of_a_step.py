"""The formula of memory against what autograd keeps, what a process takes, and what LLaMA 7B is known to need."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from alpacafarm_env.benchmarks.methods.dry_run import GB, USABLE, Machine, Plan, memory_table, report
from alpacafarm_env.benchmarks.methods.job import lora_settings
from alpacafarm_env.benchmarks.methods.memory import PHASES, Run, Shape, decode_bytes, layer_bytes, step_flops
from alpacafarm_env.benchmarks.methods.presets import PRESETS

PPO = frozenset({"sample", "reference", "value", "reward"})
SEVEN_B = Shape.of(LlamaConfig(vocab_size=32_001))  # and a padding token
GPU = 80 * 1.0737e9


def settings(name, **changes):
    """PPO of LLaMA 7B as a preset has it: 512 x (192 + 300), two epochs, minibatches of 256."""
    preset = PRESETS[name]
    fields = {"value": "model", "gradient_checkpointing": False, "sharding": "none", "micro_batch_tokens": 16384}
    fields |= preset.fields
    run = Run(
        roles=PPO,
        rows=512,
        update_rows=256,
        passes=2,
        prompt=192,
        response=300,
        micro_batch_tokens=fields["micro_batch_tokens"],
        sampling_rows=fields.get("sampling_batch_size"),
        lora=preset.lora,
        dtype=preset.dtype,
        reward_dtype=preset.reward_dtype or "float32",
        autocast=False,
        checkpointing=fields["gradient_checkpointing"],
        value=fields["value"],
        sharded=fields["sharding"] == "full",
        processes=1,
    )
    return replace(run, **changes)


class Kept:
    """Counts the bytes that autograd saves, each storage once, parameters and buffers not at all."""

    def __init__(self, model):
        self._own = {each.untyped_storage().data_ptr() for each in (*model.parameters(), *model.buffers())}
        self.sizes, self._alive = {}, []

    def pack(self, tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._own:
            self.sizes[storage.data_ptr()] = storage.nbytes()
            self._alive.append(tensor)  # or its place would be taken by the next
        return tensor


def kept_a_token(kind, layers, dtype, lora):
    torch.manual_seed(0)
    config_class, model_class = kind
    sizes = {"hidden_size": 128, "intermediate_size": 352, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = config_class(**sizes, num_hidden_layers=layers, vocab_size=64)
    model = model_class(config).to(dtype)
    if lora:
        model = get_peft_model(model, LoraConfig(**lora_settings(lora)))
    kept, ids = Kept(model), torch.zeros((2, 16), dtype=torch.int64)
    trunk = (model.get_base_model() if lora else model).model
    with torch.autograd.graph.saved_tensors_hooks(kept.pack, lambda tensor: tensor):
        hidden = trunk(input_ids=ids, use_cache=False).last_hidden_state
    assert hidden.requires_grad
    return sum(kept.sizes.values()) / ids.numel(), Shape.of(config)


@pytest.mark.parametrize(("dtype", "lora"), [("float32", 0), ("bfloat16", 0), ("float32", 4), ("bfloat16", 4)])
def test_a_layer_keeps_what_the_formula_says(dtype, lora):
    run = settings("paper", dtype=dtype, lora=lora)
    llama = (LlamaConfig, LlamaForCausalLM)
    (two, shape), (three, _) = (kept_a_token(llama, layers, getattr(torch, dtype), lora) for layers in (2, 3))
    assert layer_bytes(shape, run) == three - two


def test_a_decoder_of_another_kind_is_near_it():
    qwen = (Qwen2Config, Qwen2ForCausalLM)
    (two, shape), (three, _) = (kept_a_token(qwen, layers, torch.float32, 0) for layers in (2, 3))
    assert layer_bytes(shape, settings("paper")) == pytest.approx(three - two, rel=0.05)


def test_llama_7b_is_counted_as_it_is():
    assert (SEVEN_B.parameters, SEVEN_B.trunk) == (6_738_423_808, 6_607_347_712)
    megabytes = {  # a token, as measured with the weights
        ("bfloat16", 8): 8.78,
        ("float32", 0): 10.88,
        ("bfloat16", 0): 5.97,
    }
    for (dtype, lora), measured in megabytes.items():
        run = settings("paper", dtype=dtype, lora=lora)
        assert SEVEN_B.layers * layer_bytes(SEVEN_B, run) / 1e6 == pytest.approx(measured, rel=0.01)


def plan_of(run):
    return Plan(shape=SEVEN_B, run=run, reward=SEVEN_B, steps=80)


def test_llama_7b_by_lora_takes_one_gpu_of_80_gb():
    plan = plan_of(settings("llama_7b_lora", sampling_rows=96))
    assert list(plan.phases) == list(PHASES)
    assert max(plan.peaks.values()) < USABLE * GPU
    always = plan.always
    assert always["policy weights"] == pytest.approx(13.5 * GB, rel=0.01)
    assert always["reward model"] == pytest.approx(13.2 * GB, rel=0.01)
    assert sum(always.values()) - always["policy weights"] - always["reward model"] < GB  # adapters and their moments
    assert plan.phases["sample"]["keys and values"] == pytest.approx(24.8 * GB, rel=0.01)
    # What the preset is for: none of these fits.
    for change in ({"checkpointing": False}, {"sampling_rows": 512}, {"dtype": "float32", "sampling_rows": 96}):
        assert max(plan_of(replace(plan.run, **change)).peaks.values()) > USABLE * GPU


def test_llama_7b_of_all_weights_takes_eight_gpus_of_80_gb():
    run = settings("llama_7b_full", processes=8)
    plan = plan_of(run)
    assert max(plan.peaks.values()) < USABLE * GPU
    for role in ("policy", "value"):
        state = sum(size for name, size in plan.always.items() if name.startswith(role))
        assert state == pytest.approx(14 / 8 * 6.7 * GB, rel=0.03)  # weights 2, masters 4 and moments 8 bytes
    assert max(plan_of(replace(run, processes=4)).peaks.values()) > USABLE * GPU
    assert max(plan_of(replace(run, sharded=False)).peaks.values()) > USABLE * GPU


def test_a_chat_model_of_3_b_takes_a_gpu_of_24_gb():
    config = Qwen2Config(  # Qwen2.5-3B's
        hidden_size=2048, intermediate_size=11008, num_hidden_layers=36, num_attention_heads=16, num_key_value_heads=2,
        vocab_size=151_936, tie_word_embeddings=True,
    )  # fmt: skip
    shape = Shape.of(config)
    assert shape.parameters == pytest.approx(3.09e9, rel=0.01)
    plan = Plan(shape=shape, run=settings("small_chat", sampling_rows=64), reward=shape, steps=80)
    assert max(plan.peaks.values()) < USABLE * 24 * 1.0737e9


def test_sharding_divides_what_it_splits():
    one, eight = (plan_of(settings("llama_7b_full", processes=processes)).always for processes in (1, 8))
    for role, size in one.items():
        assert eight[role] == (size if role == "reward model" else size / 8)


def test_arithmetic_of_a_step():
    run = settings("llama_7b_lora", checkpointing=False)
    flops, tokens = step_flops(SEVEN_B, run, SEVEN_B), 512 * 492
    forward = 2 * 6.6e9 * tokens
    assert flops["sample"] == pytest.approx(forward, rel=0.02)
    assert flops["prepare"] == pytest.approx(3 * forward, rel=0.02)  # policy again, reference, value
    assert flops["update"] == pytest.approx(2 * 2 * 2 * forward, rel=0.02)  # epochs, roles, forward and backward
    assert step_flops(SEVEN_B, replace(run, checkpointing=True), None)["update"] == pytest.approx(1.5 * flops["update"])
    head = step_flops(SEVEN_B, replace(run, value="head"), None)
    assert head["update"] == pytest.approx(flops["update"] / 2, rel=0.02)
    full = step_flops(SEVEN_B, settings("paper"), None)
    assert full["update"] == pytest.approx(1.5 * flops["update"], rel=0.02)
    assert full["prepare"] < flops["prepare"]  # in float32 the sampler's own log-probabilities count
    assert decode_bytes(SEVEN_B, run) == pytest.approx(300 * (13.5e9 + 512 * 342 * 0.524e6), rel=0.01)


def test_the_report_says_whether_it_fits_and_how_long_it_takes():
    plan = plan_of(settings("llama_7b_lora", sampling_rows=96))
    machine = Machine(name="a GPU", gpu=True, memory=GPU, processes=1, gemm=600e12, copy=3e12)
    text, fits = report(plan, machine)
    assert fits
    assert not report(plan, replace(machine, memory=GPU / 4))[1]
    for column in zip(*memory_table(plan).rows, strict=True):
        numbers = [float(cell) for cell in column[1:] if cell and cell[0].isdigit()]
        assert not numbers or numbers[-1] <= numbers[0] + sum(numbers[1:]) + 30
    low, high = (float(word) for word in text.split("Hours: ")[1].split(",")[0].split(" to "))
    full = 80 * sum(plan.seconds(machine).values()) / 3600
    assert low == pytest.approx(full / 0.7, rel=0.1)
    assert high == pytest.approx(full / 0.3, rel=0.1)


def peaks(**options):
    """Phase -> measured and expected bytes, by a process of its own."""
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "PYTHONPATH": os.pathsep.join(sys.path)}
    script = Path(__file__).with_name("peak_of_step.py")
    run = subprocess.run(
        [sys.executable, script, json.dumps(options)], env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's peak of resident memory")
@pytest.mark.parametrize("lora", [8, 0], ids=["lora", "full"])
def test_peaks_of_a_step_of_100_m_parameters_are_within_a_tenth(lora):
    shape = {"hidden_size": 768, "num_layers": 12, "vocab_size": 8000}
    sizes = {"rollouts": 8, "prompt_tokens": 16, "response_tokens": 48, "eos_probability": 0.0}
    found = peaks(**shape, **sizes, lora=lora, value="adapter" if lora else "model")
    assert found["parameters"] == pytest.approx(1e8, rel=0.1)
    # The step is the first: sampled and scored is before there are moments.
    told = {name: (round(a / 1e6), round(b / 1e6), round(a / b, 3)) for name, (a, b) in found["phases"].items()}
    measured, expected = found["phases"]["update"]
    assert measured == pytest.approx(expected, rel=0.1), told
