"""Features of responses: measures made by hand, and components of their words.

A measure knows one response and its instruction, no other text. Word components are fitted on texts that the caller
names: those of training alone, where a reward model is to be tested on others.
"""

import importlib
import re
import zlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Final, Self, cast

import numpy as np
from numpy.typing import NDArray

from ...annotators.analysis import has_list
from ...errors import DataError
from ...oracles.dials import LIST_ITEM

HASHED: Final = 2**16
"""Columns that words are hashed to."""
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

Array = NDArray[np.float64]


def scikit_learn() -> None:
    """Looks for the library; DataError, with how to install it, where it is missing."""
    try:
        importlib.import_module("sklearn")
    except ImportError as error:
        text = f'this needs scikit-learn ({error}). Install it: pip install "alpacafarm-env[recorded]"'
        raise DataError(text) from error


def one_thread() -> AbstractContextManager[object]:
    """Within it scikit-learn and numpy take one thread: several cells run at a time, and sums keep their order."""
    scikit_learn()
    from threadpoolctl import threadpool_limits

    return cast(AbstractContextManager[object], threadpool_limits(1))


def _repeats(words: list[str], n: int) -> float:
    """Share of the word n-grams that came before."""
    grams: list[Any] = list(zip(*(words[i:] for i in range(n)), strict=False))
    return 1 - len(set(grams)) / max(1, len(grams))


def measures(instruction: str, text: str) -> dict[str, float]:
    """The measures of one response: counts, mostly as logarithms, and shares; never NaN.

    Example:
        >>> measures("Name a fruit.", "A pear.")["log words"] == np.log1p(2)
        np.True_
    """
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
        "refusal at the start": bool(_REFUSAL.search(text[:120])),
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


MEASURES: Final = tuple(measures("", ""))
"""Names of the measures, in the order of their columns."""


def measured(instructions: Sequence[str], responses: Sequence[str]) -> Array:
    """The measures of B responses, [B, len(MEASURES)]; 0.3 ms a response of 1,000 characters."""
    rows = [list(measures(*pair).values()) for pair in zip(instructions, responses, strict=True)]
    return np.array(rows, dtype=np.float64).reshape(len(rows), len(MEASURES))


class WordComponents:
    """Components of words: hashed words -> tf-idf -> truncated SVD, fitted on texts; equal texts give equal components.

    Args:
        texts: Those that weights and components are fitted on: more than `num`.
        num: Number of components.

    Raises:
        DataError: scikit-learn is missing.
    """

    def __init__(self, texts: Sequence[str], num: int = 100) -> None:
        scikit_learn()
        from sklearn.decomposition import TruncatedSVD
        from sklearn.feature_extraction.text import HashingVectorizer, TfidfTransformer

        self.num = num
        self._hashing = HashingVectorizer(n_features=HASHED, alternate_sign=False, norm=None, dtype=np.float32)
        self._weights = TfidfTransformer(sublinear_tf=True)
        self._svd = TruncatedSVD(num, random_state=0)
        self._svd.fit(self._weights.fit_transform(self._hashing.transform(texts)))

    def __call__(self, texts: Sequence[str]) -> Array:
        """The components of B texts, [B, num]."""
        return np.asarray(self._svd.transform(self._weights.transform(self._hashing.transform(texts))), np.float64)


class Scaling:
    """Makes each column of features have mean 0 and standard deviation 1 on the rows that it was fitted on."""

    def __init__(self, mean: Array, deviation: Array) -> None:
        self.mean, self.deviation = mean, deviation

    @classmethod
    def of(cls, features: Array) -> Self:
        """Of features [B, K]; a column that is constant becomes 0."""
        deviation = features.std(axis=0)
        return cls(features.mean(axis=0), np.where(deviation > 1e-9, deviation, np.inf))

    def __call__(self, features: Array) -> Array:
        """Scaled features [B, K]."""
        return np.asarray((features - self.mean) / self.deviation)
