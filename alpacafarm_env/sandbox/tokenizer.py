"""The sandbox's tokenizer: every word of the world is one token, everything else falls back to bytes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from . import gold, tasks, world

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SPECIAL_TOKENS = {"pad_token": "<pad>", "eos_token": "</s>"}


def vocabulary() -> list[str]:
    """The world's pieces of text, as a byte-level pre-tokenizer cuts them (a word with the space before it)."""
    import regex  # a dependency of transformers; it knows the Unicode classes of the byte-level split

    split = regex.compile(r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")
    numbers = " ".join(world.NUMBER_WORDS)
    texts: list[str] = [" ".join(sorted(world.claim_words())), numbers]
    texts += [_fixed_words(f"{template.text} {template.input}") for template in tasks.TEMPLATES]
    texts += [*tasks.wordings(), *gold.OPENERS, *gold.CLOSERS]
    texts += [f"It {a.verb} a. {a.noun} and an {a.noun}, an" for c in world.CATEGORIES for a in c.aspects]
    pieces = {piece for text in texts for piece in split.findall(text)}
    words = {piece.strip() for piece in pieces if piece.strip().isalpha()}
    capitals = {world.named(topic).split()[0].capitalize() for topic in world.topic_categories()}
    starts = {word.lower() for text in texts for word in text.split(".")[0].split()[:1]}
    inner = {f" {word}" for word in words | capitals | starts | {"The", "It"}}
    others = {"Response", "The", "Items", "Item", "It", "\n", "\n\n", "-", ".", ",", "!", ":", "?"}
    return sorted(pieces | inner | capitals | starts | others)


def _fixed_words(text: str) -> str:
    return " ".join(word for word in text.replace(".", " .").replace(",", " ,").split() if "{" not in word)


def build(extra: Iterable[str] = ()) -> PreTrainedTokenizerFast:
    """A lossless byte-level tokenizer: a Unigram model over whole words and the 256 bytes.

    It is built and not trained, so that it is the same on every machine.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {piece for text in [*vocabulary(), *extra] for piece, _ in byte_level.pre_tokenize_str(text)}
    pieces = [(token, 0.0) for token in SPECIAL_TOKENS.values()]
    # A byte costs more than a word, so that a known word is never spelled out.
    pieces += [(char, -20.0) for char in alphabet] + [(word, -5.0) for word in sorted(words - set(alphabet))]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=None, byte_fallback=False))
    tokenizer.pre_tokenizer = byte_level
    tokenizer.decoder = decoders.ByteLevel()
    wrap: Any = PreTrainedTokenizerFast  # its constructor is untyped
    wrapped: PreTrainedTokenizerFast = wrap(
        tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **SPECIAL_TOKENS
    )
    return wrapped
