"""Tokens that end and pad texts: models of a hub come without a padding token, or with several ends.

Our own forward passes attend to no pad. A padding token is needed by other libraries, which read a reward model's score
at the last token that is no pad, and by a tokenizer's `pad`; so what is chosen here travels with the model.
"""

import re
import warnings
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..chat_templates import special_ids
from ..templates import PromptTemplate

_PAD = re.compile(r"(?<![a-z])pad(ding)?(?![a-z])", re.IGNORECASE)
_MEDIA = re.compile("image|vision|video|audio", re.IGNORECASE)
_UNUSED = re.compile("reserved|unused|placeholder|extra", re.IGNORECASE)
_NEW = ("<pad>", "[PAD]", "<|pad|>", "<|padding|>")


def check_eos(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises ValueError unless the tokenizer has an end-of-sequence token."""
    if tokenizer.eos_token_id is None:
        raise ValueError("The tokenizer has no end-of-sequence token; without one no response ever ends")


def end_ids(model: Any, tokenizer: PreTrainedTokenizerBase, template: PromptTemplate) -> tuple[int, ...]:
    """The tokens that end a response: that which the template writes, the tokenizer's EOS, the generation config's.

    A number that the generation config has only copied from the model's configuration does not count: that is often a
    default of the architecture.
    """
    config: Any = getattr(model, "generation_config", None)
    listed = getattr(config, "eos_token_id", None)
    if not isinstance(listed, list):
        listed = [] if listed is None or config._from_model_config else [listed]
    return tuple(dict.fromkeys([*_ends(tokenizer, template), *listed]))


def settle(model: Any, tokenizer: PreTrainedTokenizerBase, template: PromptTemplate) -> None:
    """Makes tokenizer and configurations of a model agree on a padding token and on how responses are sampled and end.

    A padding token that is missing, or that ends responses itself, is replaced with a warning that names the choice:
    a padding token the tokenizer has under another name, one reserved for later use, the unknown token, a new token
    where the model embeds more than the tokenizer has, any other special token that the prompt does not use.

    Raises:
        ValueError: There is no such token, or no EOS.
    """
    check_eos(tokenizer)
    table, config = model.get_input_embeddings(), model.config.get_text_config()
    if tokenizer.pad_token_id in (None, *_ends(tokenizer, template)):
        _choose_pad(tokenizer, template, rows=table.weight.shape[0])
    pad = tokenizer.pad_token_id
    if getattr(config, "pad_token_id", None) != pad:
        config.pad_token_id = pad
        table.padding_idx = pad  # as if it had been loaded so: that row alone gets no gradient
    generation = getattr(model, "generation_config", None)
    if generation is None:
        return
    generation.pad_token_id = pad
    if generation.repetition_penalty not in (None, 1.0):
        generation.repetition_penalty = 1.0  # responses are sampled, trained and judged without
    ends, listed = list(end_ids(model, tokenizer, template)), generation.eos_token_id
    if set(ends) != set(listed if isinstance(listed, list) else [listed]):
        generation.eos_token_id = ends if len(ends) > 1 else ends[0]


def _ends(tokenizer: PreTrainedTokenizerBase, template: PromptTemplate) -> list[int]:
    return [template.end_id(tokenizer), tokenizer.eos_token_id]


def _choose_pad(tokenizer: Any, template: PromptTemplate, *, rows: int) -> None:
    found, vocabulary, source = tokenizer.pad_token, tokenizer.get_vocab(), str(tokenizer.chat_template)
    taken = {*template.encode_pairs(tokenizer, ["a"], ["b"], eos=True)[0], *_ends(tokenizer, template)}
    ids = sorted(number for number in special_ids(tokenizer) - taken if number < rows)
    free = [name for name in tokenizer.convert_ids_to_tokens(ids) if name not in source and not _MEDIA.search(name)]
    named = [name for pattern in (_PAD, _UNUSED) for name in free if pattern.search(name)]
    unknown = [tokenizer.unk_token] if tokenizer.unk_token_id not in {None, *taken} else []
    new = [name for name in _NEW if name not in vocabulary] if len(tokenizer) < rows else []
    choices = [*named, *unknown, *new, *free]
    if not choices:
        what = "none" if found is None else f"{found!r}, which ends a response"
        raise ValueError(
            f"Expected a padding token that ends no response, got {what}, and no other token can be one. Add it: "
            "tokenizer.add_special_tokens({'pad_token': '[PAD]'}); model.resize_token_embeddings(len(tokenizer))"
        )
    tokenizer.add_special_tokens({"pad_token": choices[0]})
    was = "no padding token" if found is None else f"{found!r} as padding token, which ends a response"
    warnings.warn(f"The tokenizer has {was}: {choices[0]!r} takes its place, in what is saved too.", stacklevel=4)
