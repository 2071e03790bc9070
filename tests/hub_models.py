"""Tiny tokenizers and instruct models built as those of real families: Qwen 2.5, Llama 3, Gemma 2 and Mistral.

Models lie in folders as the hub has them: bfloat16, sharded, several ends, rows beyond the tokenizer's.
"""

import json
from pathlib import Path
from typing import Any

QWEN = """
{%- if messages[0]['role'] != 'system' %}
    {{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
LLAMA_3 = """{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = "26 Jul 2024" %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{{- "Today Date: " + date_string + "\\n\\n" }}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {{- message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}"
    "{% endif %}"
    "{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if (message['role'] == 'assistant') %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}"
    "{% endif %}"
    "{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}"
)
MISTRAL = """{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('After the optional system message, conversation roles must alternate user/assistant.') }}
    {%- endif %}
    {%- if message['role'] == 'user' %}
        {%- if loop.first and system_message is defined %}
            {{- ' [INST] ' + system_message + '\\n\\n' + message['content'] + ' [/INST]' }}
        {%- else %}
            {{- ' [INST] ' + message['content'] + ' [/INST]' }}
        {%- endif %}
    {%- else %}
        {{- ' ' + message['content'] | trim + eos_token }}
    {%- endif %}
{%- endfor %}
"""
TEMPLATES = {"qwen": QWEN, "llama-3": LLAMA_3, "gemma": GEMMA, "mistral": MISTRAL}
FAMILIES = tuple(TEMPLATES)
_LLAMA_3 = [
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eom_id|>",
    "<|eot_id|>",
]
SPECIAL = {
    "qwen": ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_pad|>", "<|image_pad|>"],
    "llama-3": [*_LLAMA_3, "<|reserved_special_token_0|>", "<|finetune_right_pad_id|>"],
    "gemma": ["<pad>", "<eos>", "<bos>", "<unk>", "<unused0>", "<start_of_turn>", "<end_of_turn>"],
    "mistral": ["<unk>", "<s>", "</s>"],
}
NAMED = {
    "qwen": {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
    "llama-3": {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"},
    "gemma": {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>"},
    "mistral": {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
}
"""As the hub has them: Llama 3 and Mistral without a padding token."""
ENDS = {
    "qwen": ["<|im_end|>", "<|endoftext|>"],
    "llama-3": ["<|eot_id|>", "<|end_of_text|>", "<|eom_id|>"],
    "gemma": ["<end_of_turn>", "<eos>"],
    "mistral": ["</s>"],
}
"""What ends a response; first what ends a turn. Gemma's generation config lists the last one only."""
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How Llama 3 and Qwen cut texts: line breaks stay together."""
CORPUS = [
    "system user assistant model You are a helpful assistant.\nToday Date: 26 Jul 2024\n\n",
    "List two birds.\n\nThe robin and the wren sing in the morning. What is it? [INST] [/INST]",
]


def build_chat_tokenizer(family: str) -> Any:
    """Byte-level BPE with merges of its own; for Gemma and Mistral BPE of SentencePiece's kind. All but Qwen's put BOS
    in front of a text, beside that which their chat templates write."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    spaced = family in ("gemma", "mistral")
    backend = Tokenizer(models.BPE(unk_token="<unk>") if spaced else models.BPE())
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if spaced:
        scheme: Any = {"gemma": "never", "mistral": "first"}[family]
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Metaspace(prepend_scheme=scheme), pre_tokenizers.Split("\n", "isolated")]
        )
        backend.decoder = decoders.Metaspace(prepend_scheme=scheme)
        alphabet = [chr(code) for code in (10, *range(32, 127))]
    else:
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Split(Regex(WORDS), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
        )
        backend.decoder = decoders.ByteLevel()
    special = SPECIAL[family]
    backend.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=400, special_tokens=special, initial_alphabet=alphabet)
    )
    if bos := NAMED[family].get("bos_token"):
        pair = (bos, backend.token_to_id(bos))
        backend.post_processor = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[pair])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **NAMED[family])
    tokenizer.add_special_tokens({"additional_special_tokens": special}, replace_extra_special_tokens=False)
    tokenizer.chat_template = TEMPLATES[family]
    return tokenizer


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


def build_byte_tokenizer(*special: str, bos: bool = True, **named: Any) -> Any:
    """One token a byte, after the special ones; with `bos`, the one that is named so in front of a text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    backend = Tokenizer(models.BPE(vocab={token: place for place, token in enumerate(vocabulary)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    if bos:
        pair = (named["bos_token"], vocabulary.index(named["bos_token"]))
        backend.post_processor = processors.TemplateProcessing(single=f"{pair[0]} $A", special_tokens=[pair])
    return PreTrainedTokenizerFast(tokenizer_object=backend, **named)


def make_tiny_reward_model(folder: Path, *, num_labels: int = 1) -> Path:
    """Writes the folder of a reward model: two-layer LLaMA, random weights, byte-level tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForSequenceClassification

    named = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    tokenizer = build_byte_tokenizer(*named.values(), **named, clean_up_tokenization_spaces=False)
    settings = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_labels=num_labels,
        max_position_embeddings=128,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForSequenceClassification(settings)
        for parameter in model.parameters():
            if parameter.ndim == 2:
                torch.nn.init.normal_(parameter, std=0.3)  # far from linear, so that what is read matters
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    template = {"prompt_inputs": "{instruction}|{input}:", "prompt_noinputs": "{instruction}:"}
    (folder / "prompt_template.json").write_text(json.dumps(template))
    return folder
