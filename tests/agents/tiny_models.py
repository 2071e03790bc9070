"""Tiny real models and a byte-level tokenizer, built in memory."""

from collections.abc import Callable
from typing import Any

import torch
import transformers
from peft import LoraConfig
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from alpacafarm_env.agents.language_model import LanguageModel
from alpacafarm_env.templates import PromptTemplate

SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
SPECIAL_IDS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
TEMPLATE = PromptTemplate(with_input="Q: {instruction}\nIn: {input}\nA:", without_input="Q: {instruction}\nA:")
INSTRUCTIONS = ("List two birds.", "Hi", "Describe the sea in one short sentence.", "What is 2+2?", "Name a tree")
LORA = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, after the three special ones; BOS in front of a text, as LLaMA's tokenizer does."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*SPECIAL_TOKENS.values(), *alphabet])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, **SPECIAL_TOKENS)


def build_llama(vocab_size: int, *, seed: int = 0, max_positions: int = 256, **settings: Any) -> LlamaForCausalLM:
    """Two layers, width 32, grouped heads; weights large enough that the next token is far from uniform."""
    torch.manual_seed(seed)
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "max_position_embeddings": max_positions,
    }
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=vocab_size, initializer_range=0.2, **sizes, **heads, **SPECIAL_IDS, **settings)
    return LlamaForCausalLM(config).eval()


def build_gpt2(vocab_size: int, *, seed: int = 0) -> GPT2LMHeadModel:
    """Learned absolute positions and biases: what LLaMA has not. Its dropout is on, for the agents to turn off."""
    torch.manual_seed(seed)
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256}
    return GPT2LMHeadModel(GPT2Config(vocab_size=vocab_size, initializer_range=0.2, **sizes, **SPECIAL_IDS))


HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
ENDS: dict[str, dict[str, Any]] = {
    "Llama": HEADS,
    "Qwen2": HEADS,
    "Gemma2": {**HEADS, "final_logit_softcapping": 3.0},
    "Cohere": {**HEADS, "logit_scale": 0.25},
    "Granite": {**HEADS, "logits_scaling": 4.0},
    "GPTNeoX": {"num_attention_heads": 4},
    "GPT2": {"n_head": 4, "n_embd": 32, "n_layer": 2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
}
"""Architectures that differ in what they do to logits."""


def build_ending(architecture: str, tokenizer: PreTrainedTokenizerFast) -> LanguageModel:
    """A language model of one of `ENDS`."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "max_position_embeddings": 128}
    sizes |= {"vocab_size": len(tokenizer), "initializer_range": 0.2} | SPECIAL_IDS | ENDS[architecture]
    config = getattr(transformers, f"{architecture}Config")(**sizes)
    torch.manual_seed(0)
    name = f"{architecture}{'LMHeadModel' if architecture == 'GPT2' else 'ForCausalLM'}"
    return LanguageModel(getattr(transformers, name)(config), tokenizer, TEMPLATE, max_response_tokens=8)


BUILDERS: dict[str, Callable[[int], PreTrainedModel]] = {"llama": build_llama, "gpt2": build_gpt2}


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def say_more(model: PreTrainedModel, token: int, bonus: float) -> None:
    """Add to the logit of one token, from now on."""
    extra = bonus * torch.nn.functional.one_hot(torch.tensor(token), model.config.vocab_size)
    model.get_output_embeddings().register_forward_hook(lambda module, args, logits: logits + extra)
