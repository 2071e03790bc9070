"""Log-probabilities through an output layer that sees some positions only, on architectures that end differently."""

import pytest
import torch
import transformers
from tiny_models import INSTRUCTIONS, SPECIAL_IDS, TEMPLATE, generator

from alpacafarm_env.agents.language_model import LanguageModel
from alpacafarm_env.agents.rollouts import scoring_batch

HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
ENDS = {
    "Llama": HEADS,
    "Qwen2": HEADS,
    "Gemma2": {**HEADS, "final_logit_softcapping": 3.0},
    "Cohere": {**HEADS, "logit_scale": 0.25},
    "Granite": {**HEADS, "logits_scaling": 4.0},
    "GPTNeoX": {"num_attention_heads": 4},
    "GPT2": {"n_head": 4, "n_embd": 32, "n_layer": 2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
}


def build(architecture, tokenizer):
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "max_position_embeddings": 128}
    sizes |= {"vocab_size": len(tokenizer), "initializer_range": 0.2} | SPECIAL_IDS | ENDS[architecture]
    config = getattr(transformers, f"{architecture}Config")(**sizes)
    torch.manual_seed(0)
    name = f"{architecture}{'LMHeadModel' if architecture == 'GPT2' else 'ForCausalLM'}"
    return LanguageModel(getattr(transformers, name)(config), tokenizer, TEMPLATE, max_response_tokens=8)


@pytest.mark.parametrize("architecture", ENDS)
def test_scores_are_those_of_the_whole_forward_pass(architecture, tokenizer):
    lm = build(architecture, tokenizer)
    rollouts = lm.generate(INSTRUCTIONS, generator=generator(), num_samples=2)
    ids, predicts = scoring_batch(rollouts, fill_token_id=1)
    expected = lm.model(input_ids=ids).logits[predicts].log_softmax(-1).gather(1, rollouts.tokens[:, None])[:, 0]
    seen = []
    watch = lm.model.get_output_embeddings().register_forward_hook(lambda _, inputs, __: seen.append(inputs[0].shape))
    found = lm.logprobs(rollouts)
    watch.remove()
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(found.detach(), rollouts.logprobs, atol=1e-5, rtol=0)
    assert seen == [(len(rollouts.tokens), 32)]  # and not the whole [B, L]
