"""Tiny tokenizers with the chat templates of the real families: ChatML, Llama 3 and Llama 2."""

from typing import Any

CHATML = (
    "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}"
    "{% endif %}{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
LLAMA_3 = (
    "{{ bos_token }}{% for message in messages %}{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'"
    " + message['content'] | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
LLAMA_2 = (
    "{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{ bos_token + '[INST] ' + message['content'].strip() + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ ' ' + message['content'].strip() + ' ' + eos_token }}"
    "{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"
)
FAMILIES = ("chatml", "llama-3", "llama-2")
CORPUS = [
    "system user assistant You are a helpful assistant.\n",
    "List two birds.\n\nThe robin and the wren sing in the morning. What is it? [INST] [/INST]",
]


def build_chat_tokenizer(family: str) -> Any:
    """Byte-level BPE with merges of its own, or for Llama 2 a BPE of SentencePiece's kind, that puts BOS in front."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    special = {
        "chatml": ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        "llama-3": ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
        "llama-2": ["<unk>", "<s>", "</s>"],
    }[family]
    backend = Tokenizer(models.BPE(unk_token="<unk>") if family == "llama-2" else models.BPE())
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if family == "llama-2":
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
        backend.decoder = decoders.Metaspace(prepend_scheme="first")
        alphabet = [chr(code) for code in (10, *range(32, 127))]
    else:
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=special, initial_alphabet=alphabet)
    backend.train_from_iterator(CORPUS, trainer)
    names = {
        "chatml": {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
        "llama-3": {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>", "pad_token": "<|eot_id|>"},
        "llama-2": {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
    }
    if bos := names[family].get("bos_token"):
        pair = (bos, backend.token_to_id(bos))
        backend.post_processor = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[pair])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **names[family])
    tokenizer.add_special_tokens({"additional_special_tokens": special}, replace_extra_special_tokens=False)
    tokenizer.chat_template = {"chatml": CHATML, "llama-3": LLAMA_3, "llama-2": LLAMA_2}[family]
    return tokenizer
