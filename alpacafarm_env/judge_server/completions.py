"""An annotator's answer as a served model gives it: the text in the format asked for, tokens, logprobs, usage."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

BYTES_PER_TOKEN: Final = 4
"""Tokens are counted as bytes of UTF-8 over this: no tokenizer is behind the judge server. Its own text is ASCII."""
_LEAST_LOGPROB: Final = -9999.0


def count_tokens(text: str) -> int:
    """Tokens of a text, rounded up."""
    return -(-len(text.encode("utf-8", "surrogatepass")) // BYTES_PER_TOKEN)


@dataclass(frozen=True)
class Verdict:
    """One item's verdict.

    Attributes:
        chance: P(the second response is better), in [0, 1], in the annotator's eyes.
        second: Whether the annotator says that the second is better.
        reason: Why, in a sentence.
    """

    chance: float
    second: bool
    reason: str


@dataclass(frozen=True)
class Piece:
    """A part of the text. A label has other texts that could have stood there: {text: probability}, itself included."""

    text: str
    options: dict[str, float] | None = None


@dataclass(frozen=True)
class JudgeAnswer:
    """What is answered to one request.

    Attributes:
        kind: "chat" or "completion".
        model: The model's name, as it was asked for.
        format: The prompt's format: "lines", "label", "json" or "logprobs".
        verdicts: One an item, in the prompt's order.
        prompt_tokens: Tokens of the prompt.
        max_tokens: The most tokens to say; None for no limit.
        top_logprobs: How many logprobs a token gets; None for none at all.
        name: The reply's id.
    """

    kind: str
    model: str
    format: str
    verdicts: tuple[Verdict, ...]
    prompt_tokens: int
    max_tokens: int | None = None
    top_logprobs: int | None = None
    name: str = "judge"

    @cached_property
    def pieces(self) -> list[Piece]:
        """The whole text in pieces, a label apart from what stands around it."""
        if self.format == "json":
            return _json_pieces(self.verdicts)
        return _label_pieces(self.verdicts, self.format)

    @cached_property
    def text(self) -> str:
        """The text, as far as the limit lets it go."""
        whole = "".join(piece.text for piece in self.pieces)
        return whole if self.max_tokens is None else whole[: self.max_tokens * BYTES_PER_TOKEN]

    @property
    def usage(self) -> dict[str, int]:
        """The tokens that are charged."""
        said = count_tokens(self.text)
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": said,
            "total_tokens": self.prompt_tokens + said,
        }

    def completion(self) -> dict[str, Any]:
        """The reply's JSON body, as the endpoint of this kind gives it."""
        text = self.text
        whole = len(text) == sum(len(piece.text) for piece in self.pieces)
        said = {"text": text} if self.kind == "completion" else {"message": {"role": "assistant", "content": text}}
        logprobs = None if self.top_logprobs is None else self._logprobs(len(text))
        choice = {"index": 0, **said, "logprobs": logprobs, "finish_reason": "stop" if whole else "length"}
        return {
            "id": self.name,
            "object": "text_completion" if self.kind == "completion" else "chat.completion",
            "created": 0,  # a clock would make two runs' replies differ
            "model": self.model,
            "choices": [choice],
            "usage": self.usage,
        }

    def _logprobs(self, length: int) -> dict[str, Any]:
        """Each piece as one token; the pieces that begin within the text's length."""
        starts = [0]
        for piece in self.pieces:
            starts.append(starts[-1] + len(piece.text))
        kept = [(start, piece) for start, piece in zip(starts, self.pieces, strict=False) if start < length]
        own = [_logprob((piece.options or {piece.text: 1.0})[piece.text]) for _, piece in kept]
        tops = [_top(piece, self.top_logprobs or 0) for _, piece in kept]
        if self.kind == "completion":
            return {
                "tokens": [piece.text for _, piece in kept],
                "token_logprobs": own,
                "top_logprobs": tops,
                "text_offset": [start for start, _ in kept],
            }
        content = [
            {**_token(piece.text, value), "top_logprobs": [_token(*item) for item in top.items()]}
            for (_, piece), value, top in zip(kept, own, tops, strict=True)
        ]
        return {"content": content, "refusal": None}


def _label_pieces(verdicts: Sequence[Verdict], format: str) -> list[Piece]:
    """Output (a) or Output (b), numbered where there may be several; the letter alone where its logprobs count."""
    pieces = []
    for place, verdict in enumerate(verdicts):
        label = Piece("b" if verdict.second else "a", {"a": 1.0 - verdict.chance, "b": verdict.chance})
        number = f"{place + 1}. " if format == "lines" else ""
        line = [label] if format == "logprobs" else [Piece(f"{number}Output ("), label, Piece(")")]
        pieces += [*([Piece("\n")] if place else []), *line]
    return pieces


def _json_pieces(verdicts: Sequence[Verdict]) -> list[Piece]:
    """An array of objects {"explanation": ..., "a_better": true or false}."""
    pieces = []
    for place, verdict in enumerate(verdicts):
        label = Piece("false" if verdict.second else "true", {"true": 1.0 - verdict.chance, "false": verdict.chance})
        head = f'{"," if place else "["}\n  {{"explanation": {json.dumps(verdict.reason)}, "a_better": '
        pieces += [Piece(head), label, Piece("}")]
    return [*pieces, Piece("\n]")] if pieces else [Piece("[]")]


def _logprob(probability: float) -> float:
    return max(math.log(probability), _LEAST_LOGPROB) if probability > 0 else _LEAST_LOGPROB


def _top(piece: Piece, count: int) -> dict[str, float]:
    """The `count` likeliest texts of a token with their logprobs, likeliest first."""
    options = piece.options or {piece.text: 1.0}
    likeliest = sorted(options, key=lambda text: (-options[text], text))[:count]
    return {text: _logprob(options[text]) for text in likeliest}


def _token(text: str, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}
