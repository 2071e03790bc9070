"""Recorded judgements as a table of models by instructions, its folds, and what a surrogate can see of its texts.

A surrogate is tested only on models that it was not trained on. All of them answer the same instructions and are
compared with the same reference, so one that saw an instruction in training knows how good the reference's answer is.
Hence two protocols: `disjoint` leaves out models and instructions, as with new prompts, and counts; `models` leaves out
models alone. No feature is learned or depends on another pair, so nothing of a test pair reaches training.
"""

import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ...annotators.analysis import LIST_ITEM, has_list
from ...data import RecordedDataset
from ...errors import DataError
from ...seeding import keyed_rng
from ..experiment.evaluation import subset

NEAR: Final = 0.25
"""A model is near the reference if its win rate is within this of one half, so that naming the usual winner is wrong in
a quarter of the cases at least. Counted from the judgements alone."""
PROTOCOLS: Final = ("disjoint", "models")
POOLS: Final = ("half 0", "half 1", "near_reference")
LENGTH_SCALE: Final = 500
"""Characters: the difference in length is tanh(characters / this)."""
HASHED: Final = 2**17
"""Columns of the hashed n-grams."""
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
Mask = NDArray[np.bool_]
Indices = NDArray[np.int64]


@dataclass(frozen=True)
class Judged:
    """M models' responses to N instructions, the reference's, and the judge's credits.

    Raises:
        DataError: Fewer than four models or instructions, which cannot be split in folds.
    """

    models: tuple[str, ...]
    instructions: tuple[str, ...]
    references: tuple[str, ...]
    outputs: tuple[tuple[str, ...], ...]
    """[M][N]."""
    credits: Array
    """[M, N] credit of the model in [0, 1], 0.5 for identical texts; NaN = no verdict."""

    def __post_init__(self) -> None:
        if min(self.credits.shape) < 4:
            raise DataError(
                f"expected judgements of 4 or more models on 4 or more instructions, got {self.credits.shape}: "
                "models and instructions are left out in folds."
            )

    @cached_property
    def decisive(self) -> Mask:
        """[M, N] where the judge preferred one of the two texts: what is trained on and tested."""
        return np.isin(self.credits, (0, 1))

    @cached_property
    def lengths(self) -> Array:
        """[M, N] characters of the responses."""
        return np.array([[len(text) for text in row] for row in self.outputs], dtype=np.float64)

    @cached_property
    def win_rates(self) -> Array:
        """[M] mean credit."""
        return np.asarray(np.nanmean(self.credits, axis=1))

    @cached_property
    def near(self) -> Mask:
        """[M] the models near the reference."""
        return np.asarray(np.abs(self.win_rates - 0.5) <= NEAR)

    def model_folds(self, count: int) -> Indices:
        """[M] fold of each model, dealt in turn in the order of their win rates, so that folds are alike."""
        return np.argsort(np.argsort(self.win_rates, kind="stable")) % count

    def members(self, pool: str) -> Mask:
        """[M] the models of a best-of-n pool, which are left out together."""
        return self.near if pool == "near_reference" else self.model_folds(2) == int(pool.removeprefix("half "))


def read_judged(dataset: RecordedDataset, num_instructions: int | None = None) -> Judged:
    """All judged models of a folder, on all its instructions or on an evenly spread part of them."""
    every, references = dataset.instructions("eval"), dataset.references("eval")
    rows = subset(len(every), num_instructions or len(every))
    return Judged(
        dataset.judged,
        tuple(str(every[row]) for row in rows),
        tuple(references[row] for row in rows),
        tuple(tuple(dataset.outputs(model)[row] for row in rows) for model in dataset.judged),
        np.array([dataset.judgements(model)[rows] for model in dataset.judged]),
    )


def parts(judged: Judged, protocol: str, folds: int, *, diagonal: bool = False) -> Iterator[tuple[Mask, Mask]]:
    """(train, test), both [M, N], of a protocol, or of a best-of-n pool (its models left out, instructions disjoint).

    `folds` are of models, and of instructions. `diagonal`: of the disjoint folds only those with equal numbers, which
    test 1 / folds of the pairs.
    """
    by_model = np.where(judged.members(protocol), 0, -1) if protocol in POOLS else judged.model_folds(folds)
    count = 1 if protocol == "models" else folds
    by_instruction = keyed_rng(0, "recorded_surrogate").permutation(len(judged.instructions)) % count
    for model in range(int(by_model.max()) + 1):
        for instruction in range(int(by_instruction.max()) + 1):
            left_out, asked = (by_model == model)[:, None], (by_instruction == instruction)[None]
            if protocol == "models":  # every instruction is asked, in training too
                yield ~left_out & judged.decisive, left_out & asked
            elif not diagonal or instruction == model:
                yield ~left_out & ~asked & judged.decisive, left_out & asked


class Features:
    """The features of all pairs of a table; pair (m, i) is row m N + i."""

    def __init__(self, judged: Judged) -> None:
        self.judged = judged
        self.responses = [text for row in judged.outputs for text in row]
        self.tokens = cache(self._hash_tokens)

    @cached_property
    def length_and_list(self) -> Array:
        """[M N, 3]: log ratio of the lengths, tanh of their difference, list in the response less in the reference."""
        return self.length_and_list_raw[:, :3].copy()

    @cached_property
    def length_and_list_raw(self) -> Array:
        """[M N, 7]: `length_and_list`, the two lengths, and the two lists: all that a model of length could use."""
        sides = (self.responses, self.judged.references)
        found = [np.array([(float(len(text)), float(has_list(text))) for text in side]) for side in sides]
        (length, listed), (reference, other) = found[0].T, self._repeated(found[1]).T
        ratio, gap = np.log1p(length) - np.log1p(reference), np.tanh((length - reference) / LENGTH_SCALE)
        return np.stack([ratio, gap, listed - other, length, reference, listed, other], axis=1)

    @cached_property
    def dense(self) -> Array:
        """[M N, 2 K + 4]: the response's measures less the reference's, the reference's, cosines of hashed words.

        The cosines are of response and instruction, response and reference, reference and instruction; last is the
        log length of the instruction.
        """
        asked = self.judged.instructions
        texts = zip(asked * (1 + len(self.judged.models)), (*self.judged.references, *self.responses), strict=True)
        found = np.array([list(measures(x, y).values()) for x, y in texts], dtype=np.float64)
        own = self._repeated(found[: len(asked)])
        response, reference, instruction = self._hash(
            asked, ngram_range=(1, 2), alternate_sign=False, stop_words="english"
        )
        met = [(response, instruction), (response, reference), (reference, instruction)]
        cosines = [np.asarray(one.multiply(two).sum(axis=1)) for one, two in met]
        length = self._repeated(np.log1p([[len(text)] for text in asked]))
        return np.hstack([found[len(asked) :] - own, own, *cosines, length])

    @cached_property
    def words(self) -> Any:
        """[M N, HASHED + 3] sparse: hashed word 1- and 2-grams of the response less the reference's, each of norm 1.

        Next to them `length_and_list`, unscaled: rows of norm 1 cannot say how long a text is.
        """
        return self._grams("word", (1, 2))

    @cached_property
    def characters(self) -> Any:
        """[M N, HASHED + 3] sparse: as `words`, of character 3- to 5-grams within words."""
        return self._grams("char_wb", (3, 5))

    def _grams(self, analyzer: str, ngrams: tuple[int, int]) -> Any:
        from scipy import sparse

        response, reference = self._hash(analyzer=analyzer, ngram_range=ngrams, dtype=np.float32)
        return sparse.csr_matrix(sparse.hstack([response - reference, sparse.csr_matrix(self.length_and_list)]))

    def _hash(self, *more: Any, **options: Any) -> list[Any]:
        """Hashed n-grams of the responses, and of the references (and instructions) for every pair."""
        from sklearn.feature_extraction.text import HashingVectorizer

        vectorizer = HashingVectorizer(n_features=HASHED, **options)
        others = [self._repeated(vectorizer.transform(side)) for side in (self.judged.references, *more)]
        return [vectorizer.transform(self.responses), *others]

    def _hash_tokens(self, buckets: int, length: int) -> tuple[Indices, ...]:
        """Words hashed to 1 .. buckets - 1, cut or padded with 0, [., length]: instructions, references, responses."""
        table = (self.judged.instructions, self.judged.references, self.responses)
        return tuple(np.array([_token_row(text, buckets, length) for text in side], dtype=np.int64) for side in table)

    def _repeated(self, values: Any) -> Any:
        """Values of the instructions or references [N, .] for every pair, [M N, .]."""
        from scipy import sparse

        stack = sparse.vstack if sparse.issparse(values) else np.concatenate
        return stack([values] * len(self.judged.models))


def _token_row(text: str, buckets: int, length: int) -> list[int]:
    row = [1 + zlib.crc32(word.encode("utf-8", "replace")) % (buckets - 1) for word in _WORD.findall(text.lower())]
    return (row[:length] + [0] * length)[:length]


def measures(instruction: str, text: str) -> dict[str, float]:
    """The measures of a response by itself and against its instruction: counts, mostly as logarithms, and shares."""
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


def _repeats(words: list[str], n: int) -> float:
    """Share of the word n-grams that came before."""
    grams = list(zip(*(words[i:] for i in range(n)), strict=False))
    return 1 - len(set(grams)) / max(1, len(grams))
