"""The sandbox's annotators as served models: reads the request back, asks the annotator, and words the reply.

Verdicts and ratings are those of the sandbox's own pools in process, seed for seed: `sandbox.judges.Annotators`,
`sandbox.raters.Raters` and this module share the annotators, their log-odds or likings and the draws.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from ..annotators.config import AnnotatorConfig, PoolConfig, check, load_pool, load_prompt
from ..annotators.prompts import Item, Shown, Single, read
from ..data.schema import shown
from ..errors import PoolError
from ..oracles.judges import KeyedDraws, probability
from ..sandbox import tasks
from ..sandbox.judges import FEATURES, GREEDY, POOL, features, log_odds
from ..sandbox.raters import Raters

POOLS: Final = ("alpaca_farm", "greedy", "weighted", "raters")
"""The pools whose prompts are always recognized."""
BY_TASTE: Final = "by length, lists, courtesy and position alone"
"""How the sandbox's annotators judge what they do not understand."""
_FALLBACK: Final = GREEDY[0]
"""Answers for annotators that the sandbox has none of that name for."""
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


class Verdict(NamedTuple):
    """One pair's verdict: P(the second response is better) in the annotator's eyes, and the opinion given."""

    chance: float
    second: bool


class Rated(NamedTuple):
    """One response's rating, 1 to 7, and the annotator's words about it."""

    rating: int
    critique: str


class Piece(NamedTuple):
    """A part of the text. A label has `options` that could have stood there: {text: probability}, itself included."""

    text: str
    options: dict[str, float] | None = None


@dataclass(frozen=True)
class JudgeAnswer:
    """The answer to a question: a verdict or a rating per item, in order. `name` is the reply's id."""

    question: JudgeQuestion
    verdicts: tuple[Verdict | Rated, ...]
    name: str = "judge"

    @cached_property
    def pieces(self) -> list[Piece]:
        """The whole text in pieces, a label apart from what surrounds it."""
        form = self.question.format
        parts = [piece for place, said in enumerate(self.verdicts) for piece in _worded(said, form, place)]
        end = [Piece("\n]")] if form in ("json", "rating") else []
        return [piece for piece in (*parts, *end) if piece.text]

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
        content: list[dict[str, Any]] = []
        start = 0
        for piece in self.pieces:
            if start < len(self.text):
                options = piece.options or {piece.text: 1.0}
                likeliest = sorted(options.items(), key=lambda option: (-option[1], option[0]))[:count]
                top = [_token(*option) for option in likeliest]
                content.append({**_token(piece.text, options[piece.text]), "top_logprobs": top})
            start += len(piece.text)
        return {"content": content, "refusal": None}


def _worded(said: Verdict | Rated, form: str, place: int) -> list[Piece]:
    """An item's part of the text: of a JSON array, or a line with Output (a) or (b), or the letter alone."""
    start = f"{',' if place else '['}\n  {{"
    if isinstance(said, Rated):
        head = f'{start}"critique": {json.dumps(said.critique)}, "rating": '
        return [Piece(head), Piece(str(said.rating)), Piece("}")]
    if form == "json":
        head = f'{start}"explanation": "The {"second" if said.second else "first"} response is better.", "a_better": '
        options = {"true": 1.0 - said.chance, "false": said.chance}
        return [Piece(head), Piece("false" if said.second else "true", options), Piece("}")]
    label = Piece("b" if said.second else "a", {"a": 1.0 - said.chance, "b": said.chance})
    number = f"{place + 1}. " if form == "lines" else ""
    before, after = ("", "") if form == "logprobs" else (f"{number}Output (", ")")
    return [Piece("\n" * (place > 0) + before), label, Piece(after)]


def _token(text: str, probability: float) -> dict[str, Any]:
    logprob = max(math.log(probability), _LEAST_LOGPROB) if probability > 0 else _LEAST_LOGPROB
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


_Tokens = Annotated[int, Field(ge=1)]


class _Body(BaseModel):
    """Settings that change the answer; a value that the judge server could not honour is refused, others ignored."""

    model_config = ConfigDict(strict=True, frozen=True, allow_inf_nan=False)
    model: Annotated[str, Field(min_length=1)]
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    seed: int | None = None
    max_tokens: _Tokens | None = None
    max_completion_tokens: _Tokens | None = None
    stream: Literal[False] | None = None
    n: Literal[1] = 1


class _Message(BaseModel):
    role: str
    content: str


class _Chat(_Body):
    messages: Annotated[list[_Message], Field(min_length=1)]
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None


class _Completion(_Body):
    prompt: str
    logprobs: None = None


class SandboxJudge:
    """The sandbox's annotators as served models.

    Args:
        seed: Seeds the verdicts of requests without a seed.
        pools: Further pools, names or files, whose prompts are recognized; their annotators judge as the sandbox's of
            that name, others as its greedy one.
        anyway: Judge instructions of another world too, see `answer`; else they are refused.
    """

    def __init__(self, seed: int = 0, pools: Iterable[str | Path] = (), *, anyway: bool = False) -> None:
        self.seed = seed
        self.anyway = anyway
        members, self._streams = _members((*_bundled(), *map(load_pool, pools)))
        prompts = {file: load_prompt(file) for file in members}
        self._prompts = {prompt.name: prompt for prompt in prompts.values()}
        self._members = {prompts[file].name: served for file, served in members.items()}
        own = {annotator.name: annotator for annotator in (*POOL, *GREEDY)}
        self._annotators = {name: own.get(name, _FALLBACK) for name in self._streams}

    def annotator(self, prompt: str, model: str) -> str:
        """Who answers a prompt; of several, the one whose role is in the model's name."""
        members = self._members[prompt]
        return next((member.name for member in members if member.role in model.lower()), members[0].name)

    def read(self, kind: str, content: Mapping[str, Any]) -> JudgeQuestion:
        """Reads a request's body.

        Raises:
            PoolError: It cannot be answered, or its instructions are not the sandbox's; the message says why.
            InvalidResponseError: A text that cannot be written as UTF-8.
        """
        body: _Chat | _Completion
        prompt: Any
        if kind == "chat":
            body = check(_Chat, content, "The request")
            prompt, top_logprobs = content["messages"], (body.top_logprobs or 0) if body.logprobs else None
            text = "".join(message.content for message in body.messages)
        else:
            body = check(_Completion, content, "The request")
            prompt, top_logprobs, text = body.prompt, None, body.prompt
        name, items = read(prompt, self._prompts.values())
        if not self.anyway:
            _refuse_foreign(items)
        return JudgeQuestion(
            annotator=self.annotator(name, body.model),
            items=items,
            kind=kind,
            model=body.model,
            format=self._prompts[name].format,
            prompt_tokens=count_tokens(text),
            seed=body.seed,
            temperature=body.temperature,
            max_tokens=body.max_completion_tokens or body.max_tokens,
            top_logprobs=top_logprobs,
        )

    def answer(self, question: JudgeQuestion, key: str) -> JudgeAnswer:
        """The annotator's answer to a question from `read`; `key`, a digest of the body, names it.

        Temperature 0 gives the likelier verdict, the first response's where both are alike. Above it a verdict is a
        draw from the annotator's own probability, whose log-odds are divided by the temperature. The draw is keyed on
        the seed, the annotator's pool, the instruction and the unordered pair: the same pair, among whatever other
        pairs, gets the same verdict, and another seed is another opinion.

        A rating is that of `Raters.rate`, at the request's temperature.

        An instruction of another world than the sandbox's is judged by the annotator's tastes alone: length, lists,
        courtesy and position.
        """
        pairs = [item for item in question.items if isinstance(item, Item)]
        singles = [item for item in question.items if isinstance(item, Single)]
        said = self._rated(question, singles) if singles else self._compared(question, pairs)
        return JudgeAnswer(question, tuple(said), f"judge-{key[:24]}")

    def _compared(self, question: JudgeQuestion, pairs: Sequence[Item]) -> Iterable[Verdict]:
        annotator = self._annotators[question.annotator]
        instructions, first, second_shown = ([pair[place] for pair in pairs] for place in range(3))
        gaps = _features(instructions, second_shown) - _features(instructions, first)
        odds = log_odds(gaps, annotator.weights(), annotator.position, annotator.temperature)
        if question.temperature == 0:
            second = odds > 0
        else:
            draws = KeyedDraws(self._seed(question), self._streams[question.annotator])
            with np.errstate(over="ignore"):  # near 0 any leaning is a certainty
                second = draws.b_wins(pairs, odds / question.temperature)
        return map(Verdict, probability(odds).tolist(), second.tolist())

    def _rated(self, question: JudgeQuestion, singles: Sequence[Single]) -> Iterable[Rated]:
        annotator, stream = self._annotators[question.annotator], self._streams[question.annotator]
        raters, who = Raters(stream, [annotator], seed=self._seed(question)), np.zeros(len(singles), np.int64)
        rows = _features([item.instruction for item in singles], [item.output for item in singles])
        ratings = raters.rate(singles, who, temperature=question.temperature, found=rows)
        return map(Rated, ratings.astype(int).tolist(), raters.critiques(singles, who))

    def _seed(self, question: JudgeQuestion) -> int:
        return self.seed if question.seed is None else question.seed


def _refuse_foreign(items: Sequence[Shown]) -> None:
    if foreign := [item.instruction for item in items if not tasks.known(item.instruction)]:
        raise PoolError(
            f"Expected instructions of the sandbox, but {len(foreign)} of {len(items)} in this request are not, for "
            f"instance {shown(foreign[0])}. The judge server's annotators know the sandbox's world only: ask a real "
            f"model about other texts, or start judge-server with --anyway to have them judged {BY_TASTE}."
        )


@cache
def _bundled() -> tuple[PoolConfig, ...]:
    """`POOLS`, read once, as it takes 0.1 s; the users' own pools may change between two servers."""
    return tuple(map(load_pool, POOLS))


def _members(pools: Iterable[PoolConfig]) -> tuple[dict[str, list[AnnotatorConfig]], dict[str, str]]:
    """Prompt -> the annotators that are asked by it, and annotator -> its pool's draws."""
    members: dict[str, list[AnnotatorConfig]] = {}
    streams: dict[str, str] = {}
    for pool in pools:
        for member in pool.annotators:
            members.setdefault(member.prompt, []).append(member)
            streams.setdefault(member.name, pool.stream)
    return members, streams


_ANY_TASK: Final = "List two traits of a lion."
"""Some instruction of the sandbox: length, lists and courtesy do not depend on it."""


def _features(instructions: Sequence[str], responses: Sequence[str]) -> NDArray[np.float64]:
    """[B, features]; for an instruction of another world those that can be seen without understanding, else 0."""
    rows = features(instructions, responses)
    for row in np.flatnonzero(np.isnan(rows).any(axis=1)).tolist():
        rows[row] = features([_ANY_TASK], [responses[row]])[0]
        rows[row, : FEATURES.index("length")] = 0.0
    return rows
