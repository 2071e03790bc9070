"""A policy, a reward model and instructions of any shape, with random weights and a tokenizer of made-up words."""

import copy
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification, LlamaConfig, PreTrainedTokenizerFast

from ...data import RowDataset
from ...seeding import keyed_rng
from ...templates import PromptTemplate

SPECIAL = {"eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
TEMPLATE = PromptTemplate("{instruction} {input}", "{instruction}")


def make_config(*, width: int, layers: int, vocab: int, positions: int) -> LlamaConfig:
    """LLaMA's proportions: heads of 64 numbers, a feed-forward layer of 8/3 of the width, untied output layer."""
    return LlamaConfig(
        hidden_size=width,
        intermediate_size=-(-width * 8 // 3 // 64) * 64,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        vocab_size=vocab,
        max_position_embeddings=positions,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=1,
    )


def make_tokenizer(vocab: int) -> PreTrainedTokenizerFast:
    """`vocab` tokens, one a word: "w3" is token 3, after the three special ones."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = [*SPECIAL.values(), *(f"w{number}" for number in range(len(SPECIAL), vocab))]
    model = models.WordLevel({word: number for number, word in enumerate(words)}, unk_token=SPECIAL["unk_token"])
    backend = Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, **SPECIAL)  # type: ignore[no-untyped-call]


def make_dataset(config: LlamaConfig, *, num: int, tokens: int, seed: int) -> RowDataset:
    """`num` instructions of `tokens` random words each, as split unlabeled."""
    words = keyed_rng(seed, "random instructions").integers(len(SPECIAL), config.vocab_size, size=(num, tokens))
    rows = [{"instruction": " ".join(f"w{word}" for word in row), "input": "", "output": ""} for row in words.tolist()]
    return RowDataset("random", {"unlabeled": ("random words", rows)}, allow_overlap=True)


def make_policy(config: LlamaConfig, *, num_ends: int, dtype: torch.dtype, device: torch.device, seed: int) -> Any:
    """A causal language model to which all tokens are equally likely, and `num_ends` of which end a response.

    Its output layer is 0. That is a share of the vocabulary, which is exact: with random weights, the chance of one
    token would vary by orders of magnitude from one position to the next.
    """
    from transformers import AutoModelForCausalLM

    model = _random(AutoModelForCausalLM, config, dtype, device, seed)
    torch.nn.init.zeros_(model.get_output_embeddings().weight)
    # The end itself, and words from the last on.
    model.generation_config.eos_token_id = [0, *range(config.vocab_size - num_ends + 1, config.vocab_size)]
    return model


def save_reward_model(
    config: LlamaConfig, folder: Path, *, tokenizer: Any, dtype: torch.dtype, device: torch.device, seed: int
) -> None:
    """Writes a reward model of the shape."""
    settings = copy.deepcopy(config)
    settings.num_labels = 1
    _random(AutoModelForSequenceClassification, settings, dtype, device, seed).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    TEMPLATE.save(folder)


def _random(kind: Any, config: Any, dtype: torch.dtype, device: torch.device, seed: int) -> Any:
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), torch.device(device):
        torch.manual_seed(seed)
        return kind.from_config(config, dtype=dtype).eval()
