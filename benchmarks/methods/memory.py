"""What a training step takes: bytes by role and phase, and arithmetic, from a model's shape and a run's settings.

One formula for decoders of LLaMA's kind (RMSNorm, gated feed-forward layer, grouped heads), no measurement and no
weights: parameters are counted on torch's "meta" device, activations are those that autograd keeps of each layer's
operations. `tests/benchmarks/test_memory_of_a_step.py` compares them with what it does keep, and with peaks of whole
steps. Other decoders differ by what their layers have more or less. Numbers are of one process with one device.
"""

from dataclasses import dataclass
from math import ceil
from typing import Any, Final, Literal

from .presets import Dtype

Phase = Literal["sample", "score", "prepare", "update"]
PHASES: Final[tuple[Phase, ...]] = ("sample", "score", "prepare", "update")
BYTES: Final = {"float32": 4, "bfloat16": 2}
LOGITS_AT_ONCE: Final = 2**26  # agents.memory.LOGITS_AT_ONCE, which would load torch
REWARD_TOKENS: Final = 16_384
"""Tokens that a reward model reads at once, at most: `RewardModel`'s max_batch_tokens on a GPU."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A decoder's sizes."""

    width: int
    """Of hidden states, d."""
    inner: int
    """Of the feed-forward layer, f."""
    layers: int
    heads: int
    queries: int
    """Heads times their size."""
    keys: int
    """The same of keys, and of values."""
    vocab: int
    parameters: int
    trunk: int
    """Parameters without those of an output layer of its own."""
    linear: int
    """Those of the trunk's linear layers, which adapters change and autocast copies."""
    adapter: int
    """Parameters of adapters of rank 1 on all of these."""

    @classmethod
    def of(cls, config: Any) -> "Shape":
        """The sizes that a model of this configuration (of transformers) has."""
        import torch
        from transformers import AutoModelForCausalLM
        from transformers.pytorch_utils import Conv1D

        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
        model.tie_weights()  # older versions of transformers do not tie what has no data
        text, head = config.get_text_config(), model.get_output_embeddings()
        tied = head.weight is model.get_input_embeddings().weight
        linear = [m.weight for m in model.modules() if isinstance(m, torch.nn.Linear | Conv1D) and m is not head]
        parameters = sum(parameter.numel() for parameter in model.parameters())
        heads = text.num_attention_heads
        size = getattr(text, "head_dim", None) or text.hidden_size // heads
        return cls(
            width=text.hidden_size,
            inner=getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
            layers=text.num_hidden_layers,
            heads=heads,
            queries=heads * size,
            keys=(getattr(text, "num_key_value_heads", None) or heads) * size,
            vocab=text.vocab_size,
            parameters=parameters,
            trunk=parameters - (0 if tied else head.weight.numel()),
            linear=sum(weight.numel() for weight in linear),
            adapter=sum(sum(weight.shape) for weight in linear),
        )


@dataclass(frozen=True, kw_only=True)
class Run:
    """The settings of a run that decide what it takes."""

    roles: frozenset[str]
    """Of "reference", "value", "reward": what there is beside the policy; and "sample" if responses are sampled."""
    rows: int
    """Responses of a step, or of an update where none are sampled, all processes together."""
    update_rows: int
    """Of these, learned from in one update."""
    passes: int
    """How often each is learned from in a step."""
    prompt: int
    """Tokens of a prompt, at most, and of a response."""
    response: int
    micro_batch_tokens: int
    sampling_rows: int | None
    """Most responses decoded at once; None: all of a process."""
    lora: int
    dtype: Dtype
    reward_dtype: Dtype
    autocast: bool
    """Whether forward passes compute in bfloat16 though weights are float32."""
    checkpointing: bool
    value: Literal["adapter", "head", "model"]
    sharded: bool
    """Whether weights, gradients and moments are split over the processes."""
    processes: int
    reward_lora: int = 0
    """Rank of a reward adapter on the policy's base; 0: the reward model is one of its own."""
    merged: bool = False
    """Whether a copy of the weights with the adapters added samples, as on a GPU that has room for it."""

    @property
    def size(self) -> int:
        """Bytes of a weight."""
        return BYTES[self.dtype]

    @property
    def computed(self) -> int:
        """Bytes of a number that a matrix product gives."""
        return 2 if self.autocast else self.size

    @property
    def share(self) -> int:
        """Processes that a sharded tensor is split over."""
        return self.processes if self.sharded else 1

    @property
    def tokens(self) -> int:
        """Most tokens of a micro-batch: whole rows within the budget, of those that a process has."""
        row = self.prompt + self.response
        return row * max(1, min(self.micro_batch_tokens // row, ceil(self.update_rows / self.processes)))

    @property
    def micro_batches(self) -> int:
        """Of an update of a process."""
        return ceil(self.update_rows / self.processes * (self.prompt + self.response) / self.tokens)


def layer_bytes(shape: Shape, run: Run) -> int:
    """What autograd keeps of one layer for one token.

    The two norms keep their input in float32, its scale and, to train their weights, the normalised input. Attention
    keeps queries, keys, values, its output and a float32 number a head; the feed-forward layer its gate before and
    after the activation and what that multiplies. And each matrix keeps what it multiplies, unless that is kept
    already: the matrices that read the same share it but where each reads a copy in its adapter's dtype.
    """
    d, f, low = shape.width, shape.inner, run.computed
    norms = 2 * (4 * d + 4 + (0 if run.lora else d * run.size))
    attention = 2 * (shape.queries + shape.keys) * low + 4 * shape.heads
    gates = 3 * f * low
    read = 2 if run.autocast else 4 if run.lora else run.size
    copies = run.autocast or (run.lora > 0 and run.size < 4)
    inputs = (5 * d + f if copies else 2 * d + f) * read
    adapters = (shape.queries * read if copies else 0) + 7 * run.lora * read if run.lora else 0
    return norms + attention + gates + inputs + adapters


def work_bytes(shape: Shape, run: Run) -> int:
    """What one layer's forward or backward pass needs for one token besides what is kept."""
    return (2 * shape.width + 3 * shape.inner) * run.computed


def logits_bytes(shape: Shape, tokens: int, *, gradient: bool) -> int:
    """Log-probabilities of so many tokens: logits, their softmax and, for its gradient, two more of that size."""
    return min(tokens * shape.vocab, LOGITS_AT_ONCE) * (12 if gradient else 10)


def activation_bytes(shape: Shape, run: Run) -> dict[str, int]:
    """Of an update's micro-batch: what is kept for the backward pass, and what comes and goes."""
    tokens = run.tokens
    kept, one = layer_bytes(shape, run) * tokens, work_bytes(shape, run) * tokens
    last = (4 * shape.width + 4 + (2 if not run.lora else 1) * shape.width * run.size) * tokens
    logits = logits_bytes(shape, tokens * run.response // (run.prompt + run.response), gradient=True)
    if run.checkpointing:
        inputs = shape.layers * shape.width * run.size * tokens
        return {"activations": inputs + last, "a layer or logits": max(kept + one, logits)}
    return {"activations": shape.layers * kept + last, "a layer or logits": max(one, logits)}


def states(parameters: int, run: Run, *, frozen: bool = False) -> dict[str, float]:
    """Weights of a model and what the optimizer keeps of them, a process."""
    found = {"weights": parameters * run.size / run.share}
    if not frozen:
        found["moments"] = 8 * parameters / run.share
        found |= {"masters": 4 * parameters / run.share} if run.size < 4 else {}
    return found


def adapters(number: int) -> dict[str, float]:
    """float32 adapters and their moments."""
    return {"weights": 4 * number, "moments": 8 * number}


def trained(shape: Shape, run: Run) -> dict[str, int]:
    """Numbers that the optimizer moves, by role."""
    adapter = run.lora * shape.adapter
    found = {"policy": adapter if run.lora else shape.parameters}
    if "value" in run.roles:
        found["value"] = {"adapter": adapter, "head": 0, "model": shape.trunk}[run.value] + shape.width
    return found


def resident(shape: Shape, run: Run, reward: Shape | None) -> dict[str, float]:
    """What lies in memory all the time, by role."""
    adapter = run.lora * shape.adapter
    policy = states(shape.parameters, run, frozen=run.lora > 0)
    if run.lora:
        policy["weights"] += 4 * adapter
        policy["moments"] = 8 * adapter
    found = {f"policy {name}": size for name, size in policy.items()}
    if {"reference", "sample"} <= run.roles:  # DPO reads its pairs before it begins, and keeps no model
        found["reference"] = 4 * adapter if run.lora else shape.parameters * run.size / run.share
    if "value" in run.roles:
        parts = states(shape.trunk, run) if run.value == "model" else adapters(trained(shape, run)["value"])
        found |= {f"value {name}": size for name, size in parts.items()}
    if run.merged:
        found["merged copy"] = shape.linear * run.size
    if reward is not None:
        own = reward.trunk * BYTES[run.reward_dtype]
        found["reward model"] = 4 * run.reward_lora * reward.adapter if run.reward_lora else own
    return found


def phases(shape: Shape, run: Run, reward: Shape | None) -> dict[Phase, dict[str, float]]:
    """What each phase of a step adds to what is `resident`, by role."""
    found: dict[Phase, dict[str, float]] = {}
    whole = shape.parameters * run.size if run.share > 1 else 0.0
    between = {"whole policy": whole} if whole else {}
    work = work_bytes(shape, run)
    if "sample" in run.roles:
        rows = min(run.sampling_rows or run.rows, ceil(run.rows / run.processes))
        cache = rows * (run.prompt + run.response) * 2 * shape.layers * shape.keys * run.size
        reading = rows * max(run.prompt * work, 16 * shape.vocab)
        found["sample"] = {**between, "keys and values": cache, "reading and drawing": reading}
    if reward is not None:
        tokens = min(REWARD_TOKENS, ceil(run.rows / run.processes) * (run.prompt + run.response))
        size = BYTES[run.reward_dtype] * (2 * reward.width + 3 * reward.inner)
        found["score"] = {**between, "reading": tokens * size}
    if run.roles & {"reference", "value"} and "sample" in run.roles:
        others = [name for name in ("reference", "value") if name in run.roles and whole]
        gathered = {f"whole {name}": whole for name in others}
        logits = logits_bytes(shape, run.tokens * run.response // (run.prompt + run.response), gradient=False)
        found["prepare"] = {**between, **gathered, "reading": max(run.tokens * work, logits)}
    found["update"] = update_bytes(shape, run)
    return found


def update_bytes(shape: Shape, run: Run) -> dict[str, float]:
    """What an update adds, by role. Policy and value have their passes one after the other."""
    numbers, kept = trained(shape, run), activation_bytes(shape, run)
    last = numbers["value"] if "value" in run.roles and run.value != "head" else numbers["policy"]
    gradients = 4.0 * sum(numbers.values()) / run.share
    if run.micro_batches == 1:  # the last pass's gradients come as its activations go
        gradients -= min(4.0 * last / run.share, sum(kept.values()))
    found = {"gradients": gradients}
    if run.size < 4 and not run.lora:
        found["gradients of the weights"] = run.size * sum(numbers.values()) / run.share
    if run.share > 1:
        found["layers gathered"] = 2 * shape.parameters / shape.layers * run.size
    if run.autocast and run.size == 4:
        found["bfloat16 copies"] = 2.0 * shape.linear
    return {**found, **kept}


def forward_flops(shape: Shape, prompt: int, response: int, *, logits: bool) -> float:
    """Floating-point operations of reading a prompt and a response.

    Two a weight and token, attention's own products, and the output layer at the response's tokens.
    """
    tokens = prompt + response
    attention = 2 * shape.layers * shape.queries * tokens * tokens  # each token reads half of them, on average
    return 2.0 * shape.linear * tokens + attention + (2.0 * shape.vocab * shape.width * response if logits else 0)


def step_flops(shape: Shape, run: Run, reward: Shape | None) -> dict[Phase, float]:
    """Floating-point operations of a step, all processes together, all rows at their longest.

    A backward pass takes as many as the forward pass for the gradients of what layers read, and again for those of
    weights, which adapters spare; checkpointing adds a forward pass.
    """
    policy, value = (forward_flops(shape, run.prompt, run.response, logits=logits) for logits in (True, False))
    backward = (1 if run.lora else 2) + (1 if run.checkpointing else 0)
    found: dict[Phase, float] = {}
    if "sample" in run.roles:
        found["sample"] = policy
    if reward is not None:
        found["score"] = forward_flops(reward, run.prompt, run.response, logits=False)
    reference = policy if "reference" in run.roles else 0.0
    values = value if "value" in run.roles else 0.0
    learned = policy + (values if run.value != "head" else 0.0)
    if "sample" in run.roles:
        again = policy if run.size < 4 or run.autocast or run.merged else 0.0  # the sampler's own are exact in float32
        found["prepare"] = again + reference + values
        reference = 0.0
    found["update"] = run.passes * (learned * (1 + backward) + reference)
    return {name: run.rows * flops for name, flops in found.items()}


def decode_bytes(shape: Shape, run: Run) -> float:
    """What sampling a step's responses reads from memory in one process: weights and cache, once a token and wave."""
    rows = ceil(run.rows / run.processes)
    at_once = min(run.sampling_rows or rows, rows)
    cache = rows * (run.prompt + run.response / 2) * 2 * shape.layers * shape.keys * run.size
    return run.response * (ceil(rows / at_once) * shape.parameters * run.size + cache)
