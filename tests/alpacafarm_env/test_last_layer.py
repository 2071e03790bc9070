"""The last layer's MLP at the positions that are read: same outputs and gradients, fewer tokens."""

import peft
import pytest
import torch
import transformers
from torch import nn

from alpacafarm_env.agents.memory import checkpointed_layers, gradient_checkpointing
from alpacafarm_env.last_layer import last_layer, last_mlp_at, last_mlp_for_scores

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "pad_token_id": 0,
}
IDS = torch.randint(1, 64, (3, 9), generator=torch.Generator().manual_seed(0))
READ = torch.zeros(3, 9, dtype=torch.bool)
READ[0, 4:7] = READ[1, 8] = READ[2, 0] = True


def build(kind, head="ForCausalLM", **settings):
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **settings})
    return getattr(transformers, f"{kind}{head}")(config).eval()


def outputs(model, read=READ):
    """The trunk's hidden states where they are read, and every gradient of a sum over them."""
    hidden = model.base_model(input_ids=IDS, use_cache=False).last_hidden_state[read]
    return hidden, gradients(model, hidden)


def gradients(model, result):
    model.zero_grad()
    (result * torch.arange(1, result.numel() + 1).view(result.shape)).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(found, expected):
    torch.testing.assert_close(found[0], expected[0])
    assert found[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-4, atol=1e-4 * float(gradient.abs().max()))


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("kind", ["Llama", "Gemma2", "GPT2", "GPTNeoX"])
def test_same_outputs_and_gradients_from_fewer_tokens(kind, checkpointed):
    model, seen = build(kind, "LMHeadModel" if kind == "GPT2" else "ForCausalLM"), []
    expected = outputs(model)
    last = last_layer(model)
    next(m for m in last.mlp.modules() if not list(m.children())).register_forward_hook(
        lambda _, inputs, __: seen.append(inputs[0].numel() // 32)
    )
    layers = checkpointed_layers([model]) if checkpointed else ()
    with gradient_checkpointing(layers), last_mlp_at(model, READ):
        hidden = model.base_model(input_ids=IDS, use_cache=False).last_hidden_state[READ]
    found = hidden, gradients(model, hidden)  # outside: the backward pass computes again what was computed inside
    assert_same(found, expected)
    assert seen == [5] * (2 if checkpointed else 1)
    assert_same(outputs(model), expected)  # nothing is left behind
    assert seen[-1] == IDS.numel()


def mixed_in(model):
    """A model whose last MLP adds what the row's first position has."""

    class Mixing(nn.Module):
        def __init__(self, mlp):
            super().__init__()
            self.mlp = mlp

        def forward(self, x, first):
            return self.mlp(x) + first

    model.base_model.layers[-1].mlp = Mixing(model.base_model.layers[-1].mlp)
    return model


def shared(model):
    model.base_model.layers[0].mlp = model.base_model.layers[1].mlp
    return model


@pytest.mark.parametrize(
    "model",
    [
        lambda: mixed_in(build("Llama")),
        lambda: shared(build("Llama")),
        lambda: build("Mixtral", num_local_experts=2, num_key_value_heads=2),
        lambda: build("Qwen2Moe", num_experts=2, num_experts_per_tok=1, moe_intermediate_size=16),
    ],
    ids=["other inputs", "shared", "mixtral", "qwen2-moe"],
)
def test_dependent_positions_are_all_computed(model):
    assert last_layer(model()) is None


@pytest.mark.parametrize("lora", [False, True])
def test_scores_are_of_the_last_real_token(lora):
    model = build("Llama", "ForSequenceClassification", num_labels=1)
    if lora:
        model = peft.get_peft_model(model, peft.LoraConfig(target_modules="all-linear", task_type="SEQ_CLS"))
    ids = IDS.clone()
    ids[1, 5:], ids[2, 1:], ids[0, 2] = 0, 0, 0  # pads to the right, and one inside a text
    expected, found, seen = model(input_ids=ids, use_cache=False).logits, None, []
    last_layer(model).mlp.down_proj.register_forward_hook(lambda _, inputs, __: seen.append(inputs[0].numel() // 64))
    with last_mlp_for_scores(model, ids):
        found = model(input_ids=ids, use_cache=False).logits
    assert seen == [3]
    assert_same((found, gradients(model, found)), (expected, gradients(model, expected)))


def test_models_that_read_other_positions_are_left_alone():
    model = build("Llama", "ForTokenClassification", num_labels=1)
    expected = model(input_ids=IDS, use_cache=False).logits
    with last_mlp_for_scores(model, IDS):
        assert torch.equal(model(input_ids=IDS, use_cache=False).logits, expected)
