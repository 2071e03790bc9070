"""What a surrogate can see of a pair: counts and shares of a response, of the reference, and how they meet.

Nothing here is learned: no feature depends on another pair, so nothing of a test pair reaches training.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, Final

import numpy as np

from ..harness.lists import LIST_ITEM, has_list
from .data import Array, Indices, Judged, Mask

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
        self._tokens: dict[tuple[int, int], tuple[Indices, Indices, Indices]] = {}

    @cached_property
    def lengths(self) -> Array:
        """[M N, 2]: characters of the response and of the reference."""
        return self._beside(self.judged.lengths, [len(text) for text in self.judged.references])

    @cached_property
    def lists(self) -> Array:
        """[M N, 2]: 1 where the response, and where the reference, has a list."""
        own = np.array([[has_list(text) for text in row] for row in self.judged.outputs])
        return self._beside(own, [has_list(text) for text in self.judged.references])

    @cached_property
    def length_and_list(self) -> Array:
        """[M N, 3]: log ratio of the lengths, tanh of their difference, list in the response less in the reference."""
        (length, reference), (listed, other) = self.lengths.T, self.lists.T
        ratio = np.log1p(length) - np.log1p(reference)
        return np.stack([ratio, np.tanh((length - reference) / LENGTH_SCALE), listed - other], axis=1)

    @cached_property
    def length_and_list_raw(self) -> Array:
        """[M N, 7]: `length_and_list`, the two lengths, and the two lists: all that a model of length could use."""
        return np.hstack([self.length_and_list, self.lengths, self.lists])

    @cached_property
    def dense(self) -> Array:
        """[M N, 2 K + 4]: the response's measures less the reference's, the reference's own, and the four meetings."""
        asked, references = self.judged.instructions, self.judged.references
        reference = np.array([measures(x, y) for x, y in zip(asked, references, strict=True)])
        response = np.array([measures(x, y) for row in self.judged.outputs for x, y in zip(asked, row, strict=True)])
        repeated = np.tile(reference, (len(self.judged.models), 1))
        return np.hstack([response - repeated, repeated, self._meetings()])

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

    def tokens(self, buckets: int, length: int) -> tuple[Indices, Indices, Indices]:
        """Words hashed to 1 .. buckets - 1, cut or padded with 0, [., length]: instructions, references, responses."""
        if (buckets, length) not in self._tokens:
            table = (self.judged.instructions, self.judged.references, [y for row in self.judged.outputs for y in row])
            x, r, y = (np.array([_token_row(text, buckets, length) for text in side], dtype=np.int64) for side in table)
            self._tokens[buckets, length] = x, r, y
        return self._tokens[buckets, length]

    def _beside(self, own: Array | Mask, reference: Sequence[int]) -> Array:
        """Values of the responses [M, N] beside those of the references [N], as [M N, 2]."""
        return np.stack([own.ravel(), np.tile(reference, len(own))], axis=1).astype(np.float64)

    def _hashed(self, analyzer: str, ngrams: tuple[int, int]) -> Any:
        from scipy import sparse
        from sklearn.feature_extraction.text import HashingVectorizer

        vectorizer = HashingVectorizer(
            analyzer=analyzer, ngram_range=ngrams, n_features=HASHED, alternate_sign=True, norm="l2", dtype=np.float32
        )
        response = vectorizer.transform([text for row in self.judged.outputs for text in row])
        reference = vectorizer.transform(self.judged.references)
        grams = response - sparse.vstack([reference] * len(self.judged.models))
        return sparse.csr_matrix(sparse.hstack([grams, sparse.csr_matrix(self.length_and_list)]))

    def _meetings(self) -> Array:
        """Cosines of response and instruction, response and reference, reference and instruction; the last's length."""
        from scipy import sparse
        from sklearn.feature_extraction.text import HashingVectorizer

        vectorizer = HashingVectorizer(
            ngram_range=(1, 2), n_features=HASHED, alternate_sign=False, norm="l2", stop_words="english"
        )
        asked, reference = (vectorizer.transform(side) for side in (self.judged.instructions, self.judged.references))
        own = _row_products(reference, asked)
        columns = []
        for row in self.judged.outputs:
            response = sparse.csr_matrix(vectorizer.transform(row))
            columns.append(np.stack([_row_products(response, asked), _row_products(response, reference), own], axis=1))
        length = np.log1p([len(text) for text in self.judged.instructions])
        return np.hstack([np.vstack(columns), np.tile(length, len(self.judged.models))[:, None]])


def _row_products(a: Any, b: Any) -> Array:
    return np.asarray(a.multiply(b).sum(axis=1), dtype=np.float64).ravel()


def _token_row(text: str, buckets: int, length: int) -> list[int]:
    row = [1 + zlib.crc32(word.encode("utf-8", "replace")) % (buckets - 1) for word in _WORD.findall(text.lower())]
    return (row[:length] + [0] * length)[:length]


def measures(instruction: str, response: str) -> list[float]:
    """The measures of one response to an instruction, in the order of `MEASURES`."""
    words = _WORD.findall(response.lower())
    asked = {word for word in _WORD.findall(instruction.lower()) if len(word) > 3}
    text = _Text(instruction, response, words, set(words), asked)
    return [float(measure(text)) for measure in MEASURES.values()]


class _Text:
    """A response with what several measures need of it."""

    def __init__(self, instruction: str, text: str, words: list[str], known: set[str], asked: set[str]) -> None:
        self.instruction, self.text, self.words, self.known, self.asked = instruction, text, words, known, asked

    def share(self, wanted: Callable[[str], bool]) -> float:
        """Share of the characters."""
        return sum(map(wanted, self.text)) / max(1, len(self.text))

    def repeats(self, n: int) -> float:
        """Share of the word n-grams that came before."""
        grams = list(zip(*(self.words[i:] for i in range(n)), strict=False))
        return 1 - len(set(grams)) / max(1, len(grams))


def _compressed(text: str) -> float:
    raw = text.encode("utf-8", "replace")
    return len(zlib.compress(raw)) / max(1, len(raw))


def _count(pattern: re.Pattern[str]) -> Callable[[_Text], float]:
    return lambda t: np.log1p(len(pattern.findall(t.text)))


def _mark(mark: str) -> Callable[[_Text], float]:
    return lambda t: np.log1p(t.text.count(mark))


MEASURES: Final[dict[str, Callable[[_Text], float]]] = {
    "log characters": lambda t: np.log1p(len(t.text)),
    "characters up to 500": lambda t: min(len(t.text), 500) / 500,
    "characters up to 1500": lambda t: min(len(t.text), 1500) / 1500,
    "log words": lambda t: np.log1p(len(t.words)),
    "has a list": lambda t: has_list(t.text),
    "log list items": _count(LIST_ITEM),
    "log sentences": _count(_SENTENCE),
    "words a sentence": lambda t: len(t.words) / max(1, len(_SENTENCE.findall(t.text))),
    "type-token ratio": lambda t: len(t.known) / max(1, len(t.words)),
    "log distinct words": lambda t: np.log1p(len(t.known)),
    "mean word length": lambda t: sum(map(len, t.words)) / max(1, len(t.words)),
    "compressed size": lambda t: _compressed(t.text),
    "repeated word pairs": lambda t: t.repeats(2),
    "repeated word triples": lambda t: t.repeats(3),
    "instruction's words used": lambda t: len(t.asked & t.known) / max(1, len(t.asked)),
    "words of the instruction": lambda t: len(t.asked & t.known) / max(1, len(t.known)),
    "instruction repeated": lambda t: t.instruction.strip()[:60] in t.text,
    "refusal": lambda t: bool(_REFUSAL.search(t.text)),
    "refusal at the start": lambda t: bool(_REFUSAL.search(t.text[:_SHORT])),
    "hedges": _count(_HEDGE),
    "leaked template": lambda t: bool(_LEAK.search(t.text)),
    "code": lambda t: "```" in t.text,
    "bold": lambda t: "**" in t.text,
    "addresses the reader": lambda t: np.log1p(t.words.count("you") + t.words.count("your")),
    "speaks of itself": lambda t: np.log1p(t.words.count("i") + t.words.count("my")),
    "digits": lambda t: t.share(str.isdigit),
    "capitals": lambda t: t.share(str.isupper),
    "neither letter nor digit nor space": lambda t: t.share(lambda c: not c.isalnum() and not c.isspace()),
    "beyond ASCII": lambda t: t.share(lambda c: not c.isascii()),
    "starts with a capital": lambda t: t.text[:1].isupper(),
    "ends a sentence": lambda t: t.text.rstrip()[-1:] in tuple(".!?)\"'`"),
    "ends in a question": lambda t: t.text.rstrip().endswith("?"),
    **{f"log count of {mark!r}": _mark(mark) for mark in _MARKS},
}
"""Name -> measure of one response."""
