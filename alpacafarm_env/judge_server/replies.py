"""An annotator's answer as a served model gives it, on the wire."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

from ..annotators.prompts import Shown

BYTES_PER_TOKEN: Final = 4
"""Tokens are counted as bytes of UTF-8 over this: there is no tokenizer. The judge server's own text is ASCII."""
_LEAST_LOGPROB: Final = -9999.0


def count_tokens(text: str) -> int:
    """Tokens of a text, rounded up."""
    return -(-len(text.encode("utf-8", "surrogatepass")) // BYTES_PER_TOKEN)


@dataclass(frozen=True)
class JudgeQuestion:
    """A request, read.

    Attributes:
        annotator: The name of who is asked.
        items: The pairs, in the order they are shown, or the responses to rate.
        kind: "chat" or "completion".
        format: The prompt's format: "lines", "label", "json", "logprobs" or "rating".
        top_logprobs: How many logprobs a token gets; None for none at all.
    """

    annotator: str
    items: Sequence[Shown]
    kind: str
    model: str
    format: str
    prompt_tokens: int = 0
    seed: int | None = None
    temperature: float = 1.0
    max_tokens: int | None = None
    top_logprobs: int | None = None


@dataclass(frozen=True)
class Verdict:
    """One item's verdict: P(the second response is better) in the annotator's eyes, what it says, and why."""

    chance: float
    second: bool
    reason: str


@dataclass(frozen=True)
class Rated:
    """One response's rating, 1 to 7, and what the annotator says of it."""

    rating: int
    critique: str


@dataclass(frozen=True)
class Piece:
    """A part of the text. A label has `options` that could have stood there: {text: probability}, itself included."""

    text: str
    options: dict[str, float] | None = None


@dataclass(frozen=True)
class JudgeAnswer:
    """What is answered to a question: a verdict or a rating per item, in order. `name` is the reply's id."""

    question: JudgeQuestion
    verdicts: tuple[Verdict | Rated, ...]
    name: str = "judge"

    @cached_property
    def pieces(self) -> list[Piece]:
        """The whole text in pieces, a label apart from what surrounds it."""
        if self.question.format in _FIELDS:
            return _json_pieces(self.verdicts, *_FIELDS[self.question.format])
        return _label_pieces([said for said in self.verdicts if isinstance(said, Verdict)], self.question.format)

    @cached_property
    def text(self) -> str:
        """The text, as far as the limit allows."""
        whole, limit = "".join(piece.text for piece in self.pieces), self.question.max_tokens
        return whole if limit is None else whole[: limit * BYTES_PER_TOKEN]

    @property
    def usage(self) -> dict[str, int]:
        """The tokens that are charged."""
        prompt, said = self.question.prompt_tokens, count_tokens(self.text)
        return {"prompt_tokens": prompt, "completion_tokens": said, "total_tokens": prompt + said}

    def completion(self) -> dict[str, Any]:
        """The reply's JSON body, as the endpoint of this kind gives it."""
        text, chat = self.text, self.question.kind == "chat"
        whole = len(text) == sum(len(piece.text) for piece in self.pieces)
        said = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
        logprobs = None if self.question.top_logprobs is None else self._logprobs(self.question.top_logprobs)
        choice = {"index": 0, **said, "logprobs": logprobs, "finish_reason": "stop" if whole else "length"}
        return {
            "id": self.name,
            "object": "chat.completion" if chat else "text_completion",
            "created": 0,  # a clock would make two runs' replies differ
            "model": self.question.model,
            "choices": [choice],
            "usage": self.usage,
        }

    def _logprobs(self, count: int) -> dict[str, Any]:
        """Each piece as one token, with its `count` likeliest texts; the pieces that begin within the text."""
        kept, start = [], 0
        for piece in self.pieces:
            if start < len(self.text):
                options = piece.options or {piece.text: 1.0}
                likeliest = sorted(options.items(), key=lambda option: (-option[1], option[0]))[:count]
                top = {text: _logprob(chance) for text, chance in likeliest}
                kept.append((piece.text, _logprob(options[piece.text]), top, start))
            start += len(piece.text)
        if self.question.kind == "completion":
            names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
            return {name: [token[place] for token in kept] for place, name in enumerate(names)}
        content = [
            {**_token(text, value), "top_logprobs": [_token(*item) for item in top.items()]}
            for text, value, top, _ in kept
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


_FIELDS: Final = {"json": ("explanation", "a_better"), "rating": ("critique", "rating")}
"""Of an object in a reply, by format: the words, then the verdict."""


def _json_pieces(verdicts: Sequence[Verdict | Rated], words: str, label: str) -> list[Piece]:
    """An array of objects {words: ..., label: true, false or a rating}."""
    pieces = []
    for place, said in enumerate(verdicts):
        if isinstance(said, Rated):
            text, value = said.critique, Piece(str(said.rating))
        else:
            options = {"true": 1.0 - said.chance, "false": said.chance}
            text, value = said.reason, Piece("false" if said.second else "true", options)
        head = f'{"," if place else "["}\n  {{"{words}": {json.dumps(text)}, "{label}": '
        pieces += [Piece(head), value, Piece("}")]
    return [*pieces, Piece("\n]" if pieces else "[]")]


def _logprob(probability: float) -> float:
    return max(math.log(probability), _LEAST_LOGPROB) if probability > 0 else _LEAST_LOGPROB


def _token(text: str, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


@dataclass(frozen=True)
class HttpReply:
    """A reply to send, with a Content-Length of its body's bytes."""

    status: int
    body: bytes
    headers: tuple[tuple[str, str], ...] = (("Content-Type", "application/json"),)


def as_json(content: object, status: int = 200) -> HttpReply:
    """A reply whose body is JSON."""
    return HttpReply(status, json.dumps(content).encode())


def as_error(status: int, message: str, code: str, field: str | None = None) -> HttpReply:
    """A refusal, with the error object that OpenAI-compatible servers send; `field` is the body's that is wrong."""
    return as_json({"error": {"message": message, "type": code, "param": field, "code": code}}, status)
