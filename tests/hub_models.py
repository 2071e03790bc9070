"""Tiny instruct models in folders as the hub has them: bfloat16, sharded, several ends, rows beyond the tokenizer's."""

from pathlib import Path
from typing import Any

from chat_tokenizers import ENDS, build_chat_tokenizer

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
}
SETTINGS: dict[str, dict[str, Any]] = {
    "qwen": {"tie_word_embeddings": True, "use_sliding_window": False, "sliding_window": None},
    "llama-3": {"rope_theta": 500_000.0},
    "gemma": {"head_dim": 8, "final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0, "sliding_window": 4096},
    "mistral": {"sliding_window": None},
}
SAMPLING = {
    "qwen": {"repetition_penalty": 1.05, "temperature": 0.7, "top_p": 0.8, "top_k": 20},
    "llama-3": {"temperature": 0.6, "top_p": 0.9},
}
KINDS = {"qwen": "Qwen2", "llama-3": "Llama", "gemma": "Gemma2", "mistral": "Mistral"}


def build_hub_folder(family: str, folder: Path, *, reward: bool = False, seed: int = 0, **config: Any) -> Path:
    """Writes an instruct model, or with `reward` a reward model trained elsewhere, and returns its folder."""
    import torch
    import transformers

    tokenizer = build_chat_tokenizer(family)
    rows = (len(tokenizer) // 64 + 1) * 64
    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    settings = {"vocab_size": rows, **SIZES, **SETTINGS[family], **ids, **config}
    if reward:
        settings["num_labels"] = 1
    torch.manual_seed(seed)
    kind = f"{KINDS[family]}For{'SequenceClassification' if reward else 'CausalLM'}"
    model = getattr(transformers, kind)(getattr(transformers, f"{KINDS[family]}Config")(**settings)).to(torch.bfloat16)
    if not reward:
        ends = tokenizer.convert_tokens_to_ids(ENDS[family])
        listed = ends[-1:] if family == "gemma" else sorted(ends)
        sampling = {"do_sample": True, **SAMPLING[family]} if family in SAMPLING else {}
        model.generation_config = transformers.GenerationConfig(
            **(ids | {"eos_token_id": listed if len(listed) > 1 else listed[0]}), **sampling
        )
    model.save_pretrained(folder, max_shard_size="40KB")
    tokenizer.save_pretrained(folder)
    return folder
