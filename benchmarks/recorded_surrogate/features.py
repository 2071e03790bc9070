"""What a surrogate can see of a pair: counts and shares of a response, of the reference, and how they meet.

Nothing here is learned: no feature depends on another pair, so nothing of a test pair reaches training.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence
from functools import cache, cached_property
from typing import Any, Final

import numpy as np

from ..harness.evaluation import LIST_ITEM, has_list
from .data import Array, Indices, Judged

_WORD: Final = re.compile(r"[^\W_]+(?:'\w+)?")
_SENTENCE: Final = re.compile(r"[.!?](?:\s|$)")
_REFUSAL: Final = re.compile(
    r"\b(?:as an ai|i(?: am|'m) (?:sorry|unable)|i can(?:not|'t)|i apologi[sz]e|i do(?: not|n't) have|"
    r"(?:un|not )able to)\b",
    re.IGNORECASE,
)
_HEDGE: Final = re.compile(r"\b(?:however|may|might|could|depends|generally|note that|important to)\b", re.IGNORECASE)
_LEAK: Final = re.compile(r"#+ ?(?:Instruction|Input|Response)|</s>|<\||(?:Human|User|Assistant):")
_MARKS: Final = (",", ":", '"', "?", "!", "(", "\n", "\n\n")
_SHORT: Final = 120
"""Characters: a refusal within the first so many is meant as one."""
LENGTH_SCALE: Final = 500
"""Characters: the difference in length is tanh(characters / this)."""
HASHED: Final = 2**17
"""Columns of the hashed n-grams."""


class Features:
    """The features of all pairs of a table; pair (m, i) is row m N + i."""

    def __init__(self, judged: Judged) -> None:
        self.judged = judged
        self.tokens = cache(self._hash_tokens)

    @cached_property
    def responses(self) -> list[str]:
        """[M N]."""
        return [text for row in self.judged.outputs for text in row]

    @cached_property
    def length_and_list(self) -> Array:
        """[M N, 3]: log ratio of the lengths, tanh of their difference, list in the response less in the reference."""
        return self.length_and_list_raw[:, :3].copy()

    @cached_property
    def length_and_list_raw(self) -> Array:
        """[M N, 7]: `length_and_list`, the two lengths, and the two lists: all that a model of length could use."""
        found = [[(float(len(text)), float(has_list(text))) for text in side] for side in self._sides()]
        (length, listed), (reference, other) = np.array(found[0]).T, self._repeated(np.array(found[1])).T
        ratio, gap = np.log1p(length) - np.log1p(reference), np.tanh((length - reference) / LENGTH_SCALE)
        return np.stack([ratio, gap, listed - other, length, reference, listed, other], axis=1)

    @cached_property
    def dense(self) -> Array:
        """[M N, 2 K + 4]: the response's measures less the reference's, the reference's own, and the four meetings."""
        asked = self.judged.instructions
        texts = zip(asked * (1 + len(self.judged.models)), (*self.judged.references, *self.responses), strict=True)
        found = np.array([list(measures(x, y).values()) for x, y in texts], dtype=np.float64)
        reference = self._repeated(found[: len(asked)])
        return np.hstack([found[len(asked) :] - reference, reference, self._meetings()])

    @cached_property
    def words(self) -> Any:
        """[M N, HASHED + 3] sparse: hashed word 1- and 2-grams of the response less the reference's, each of norm 1.

        `length_and_list` stands beside them, at its own scale: rows of norm 1 cannot say how long a text is.
        """
        return self._hashed("word", (1, 2))

    @cached_property
    def characters(self) -> Any:
        """[M N, HASHED + 3] sparse: as `words`, of character 3- to 5-grams within words."""
        return self._hashed("char_wb", (3, 5))

    def _hash_tokens(self, buckets: int, length: int) -> tuple[Indices, ...]:
        """Words hashed to 1 .. buckets - 1, cut or padded with 0, [., length]: instructions, references, responses."""
        table = (self.judged.instructions, self.judged.references, self.responses)
        return tuple(np.array([_token_row(text, buckets, length) for text in side], dtype=np.int64) for side in table)

    def _sides(self) -> tuple[Sequence[str], Sequence[str]]:
        return self.responses, self.judged.references

    def _repeated(self, values: Any) -> Any:
        """Values of the instructions or references [N, .] for every pair, [M N, .]."""
        from scipy import sparse

        stack = sparse.vstack if sparse.issparse(values) else np.concatenate
        return stack([values] * len(self.judged.models))

    def _hashed(self, analyzer: str, ngrams: tuple[int, int]) -> Any:
        from scipy import sparse
        from sklearn.feature_extraction.text import HashingVectorizer

        vectorizer = HashingVectorizer(analyzer=analyzer, ngram_range=ngrams, n_features=HASHED, dtype=np.float32)
        response, reference = (vectorizer.transform(side) for side in self._sides())
        grams = response - self._repeated(reference)
        return sparse.csr_matrix(sparse.hstack([grams, sparse.csr_matrix(self.length_and_list)]))

    def _meetings(self) -> Array:
        """Cosines of response and instruction, response and reference, reference and instruction; the last's length."""
        from sklearn.feature_extraction.text import HashingVectorizer

        vectorizer = HashingVectorizer(
            ngram_range=(1, 2), n_features=HASHED, alternate_sign=False, stop_words="english"
        )
        response, reference = (vectorizer.transform(side) for side in self._sides())
        asked = self._repeated(vectorizer.transform(self.judged.instructions))
        met = [(response, asked), (response, self._repeated(reference)), (self._repeated(reference), asked)]
        length = self._repeated(np.log1p([[len(text)] for text in self.judged.instructions]))
        return np.hstack([*(np.asarray(one.multiply(two).sum(axis=1)) for one, two in met), length])


def _token_row(text: str, buckets: int, length: int) -> list[int]:
    row = [1 + zlib.crc32(word.encode("utf-8", "replace")) % (buckets - 1) for word in _WORD.findall(text.lower())]
    return (row[:length] + [0] * length)[:length]


def measures(instruction: str, text: str) -> dict[str, float]:
    """The measures of a response by itself and beside its instruction: counts, mostly as logarithms, and shares."""
    words = _WORD.findall(text.lower())
    known, asked = set(words), {word for word in _WORD.findall(instruction.lower()) if len(word) > 3}
    raw, characters = text.encode("utf-8", "replace"), max(1, len(text))
    sentences = len(_SENTENCE.findall(text))
    found: dict[str, float] = {
        "log characters": np.log1p(len(text)),
        "characters up to 500": min(len(text), 500) / 500,
        "characters up to 1500": min(len(text), 1500) / 1500,
        "log words": np.log1p(len(words)),
        "has a list": has_list(text),
        "log list items": np.log1p(len(LIST_ITEM.findall(text))),
        "log sentences": np.log1p(sentences),
        "words a sentence": len(words) / max(1, sentences),
        "type-token ratio": len(known) / max(1, len(words)),
        "log distinct words": np.log1p(len(known)),
        "mean word length": sum(map(len, words)) / max(1, len(words)),
        "compressed size": len(zlib.compress(raw)) / max(1, len(raw)),
        "repeated word pairs": _repeats(words, 2),
        "repeated word triples": _repeats(words, 3),
        "instruction's words used": len(asked & known) / max(1, len(asked)),
        "words of the instruction": len(asked & known) / max(1, len(known)),
        "instruction repeated": instruction.strip()[:60] in text,
        "refusal": bool(_REFUSAL.search(text)),
        "refusal at the start": bool(_REFUSAL.search(text[:_SHORT])),
        "hedges": np.log1p(len(_HEDGE.findall(text))),
        "leaked template": bool(_LEAK.search(text)),
        "code": "```" in text,
        "bold": "**" in text,
        "addresses the reader": np.log1p(words.count("you") + words.count("your")),
        "speaks of itself": np.log1p(words.count("i") + words.count("my")),
        "digits": sum(map(str.isdigit, text)) / characters,
        "capitals": sum(map(str.isupper, text)) / characters,
        "neither letter nor digit nor space": sum(not c.isalnum() and not c.isspace() for c in text) / characters,
        "beyond ASCII": sum(not c.isascii() for c in text) / characters,
        "starts with a capital": text[:1].isupper(),
        "ends a sentence": text.rstrip()[-1:] in tuple(".!?)\"'`"),
        "ends in a question": text.rstrip().endswith("?"),
    }
    return found | {f"log count of {mark!r}": np.log1p(text.count(mark)) for mark in _MARKS}


def _repeats(words: list[str], n: int) -> float:
    """Share of the word n-grams that came before."""
    grams = list(zip(*(words[i:] for i in range(n)), strict=False))
    return 1 - len(set(grams)) / max(1, len(grams))
