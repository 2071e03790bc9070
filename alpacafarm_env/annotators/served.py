"""Pools of LLM annotators on a server, and how they are asked: shared requests, repeats, other processes' answers.

A question is one pair shown to one annotator in one order, or one response to be rated. Questions to one annotator
share requests, in the order of the batch. If a shared reply does not hold exactly one verdict per question, each is
asked alone, up to `MAX_TRIES` times. Replies are stored as they arrive and read from there, so nothing is paid for
twice: not after a kill, not by another process (questions are leased), not for a better parser.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

from .. import errors
from ..llm.client import Client
from ..llm.ledger import operations as sql
from ..llm.replies import read_reply
from ..llm.requests import Request
from ..oracles.base import shorten
from ..seeding import keyed_rng
from .config import (
    AnnotatorConfig,
    ModelConfig,
    Prompt,
)
from .prompts import Opinion, Shown, parse, render

T = TypeVar("T")
MAX_TRIES: Final = 3
"""Requests for one pair alone; after them a reply without a verdict is final."""
AHEAD: Final = 256
"""Requests prepared beyond those in flight (some kilobytes each): those that wait to be repeated must not hold others
up."""
_POLL_S: Final = (0.05, 1.0)
"""Seconds between looks for answers to another process's questions: first and longest wait."""


@dataclass(frozen=True)
class Served:
    """An annotator of a pool, with its prompt and model, on a server; `seed` is the pool's."""

    config: AnnotatorConfig
    prompt: Prompt
    model: ModelConfig
    base_url: str
    seed: int

    def request(self, items: Sequence[Shown], tries: int = 0) -> Request:
        """The request about some pairs or responses, at most the batch size; each of several tries is another draw."""
        model, seed = self.model, self.seed
        field = "messages" if model.kind == "chat" else "prompt"
        body: dict[str, Any] = {"model": model.model, field: render(self.prompt, items, model.kind)}
        body[model.max_tokens_field] = self.config.max_tokens + model.extra_tokens
        body |= {"temperature": self.config.temperature, "top_p": self.config.top_p}
        body["seed"] = seed if not tries else int(keyed_rng(seed, "try", tries).integers(2**31))
        if model.kind == "completion":
            body["stop"] = ["\n\n"]  # a model that continues texts would go on to pairs of its own
        if self.prompt.format == "logprobs":
            body |= {"logprobs": True, "top_logprobs": 20} if model.kind == "chat" else {"logprobs": 20}
        kept = {name: value for name, value in body.items() if name not in model.omit}
        return Request(self.base_url, model.kind, kept, f"seed {seed}" + (f", try {tries}" if tries else ""))

    def question(self, annotator: int, item: Shown) -> Question:
        """The question to this annotator, which has this number in its pool.

        Its key is that of the request for the item alone and the batch size: neighbours may sway a verdict.
        """
        alone = self.request([item])
        named = replace(alone, sample=f"{alone.sample}, in requests of {self.config.batch_size}")
        return Question(annotator, item, named.key)

    def read(self, raw: str, size: int) -> list[Opinion] | Exception:
        """The opinions in a raw reply about `size` pairs or responses, or why there are none."""
        try:
            return parse(self.prompt.format, read_reply(self.model.kind, raw), size)
        except (errors.UnparsableVerdictError, errors.InvalidReplyError) as error:
            return error


@dataclass(frozen=True)
class Question:
    """A pair in one order, or a response, for one annotator (its number); `key` names it in the ledger."""

    annotator: int
    item: Shown
    key: str

    @property
    def subject(self) -> tuple[str, ...]:
        """Instruction and unordered pair; the instruction alone of a response to rate."""
        return (self.item.instruction, *(sorted(self.item[1:]) if len(self.item) > 2 else ()))


@dataclass(frozen=True)
class Answer:
    """P(second shown preferred) or a rating, with its explanation or critique; or NaN and why."""

    score: float = math.nan
    words: str = ""
    cost_usd: float = 0.0
    cached: bool = True
    reason: str = ""


@dataclass(frozen=True)
class Progress:
    """Progress of one call."""

    done: int
    total: int
    cost_usd: float
    """Spent by this call; NaN if a model has no price."""


class Call:
    """One call of a pool, a `pool.ServedPool`, about some questions, by key."""

    def __init__(self, pool: Any, questions: Mapping[str, Question]) -> None:
        self._pool, self._ledger, self._questions = pool, pool.ledger, questions
        self._open = dict(questions)
        self._answers: dict[str, Answer] = {}
        self._costs: dict[str, float] = {}  # of the questions asked in this call
        self._spent, self._ended = 0.0, False

    async def run(self) -> dict[str, Answer]:
        """The answer of each question, by key."""
        if self._ledger.replay:
            self._read(await self._do(sql.lookup, list(self._open)))
            self._check_replayed()
            return self._answers
        owner, again, wait_s = self._ledger.new_owner(), dict[str, int](), _POLL_S[0]
        try:
            async with self._pool.client() as client:
                self._places = asyncio.Semaphore(client.limiter.most + AHEAD)
                while self._open:
                    stored, mine = await self._do(sql.claim, list(self._open), owner, again)
                    unread = self._read(stored)
                    new = unread.keys() - again.keys()
                    again |= unread
                    if new:  # replies without a verdict: their questions are claimed too, before anything is asked
                        continue
                    if batches := self._batches([key for key in mine if key in self._open], again):
                        await _all(self._ask(client, *batch) for batch in batches)
                        wait_s = _POLL_S[0]
                    elif self._open:  # others are asking these
                        await asyncio.sleep(wait_s)
                        wait_s = min(2 * wait_s, _POLL_S[1])
        except errors.BudgetExceededError as error:
            kept = f"{len(self._answers)} of {len(self._questions)} questions are answered and kept"
            raise errors.BudgetExceededError(f"{error} {kept}: run again to go on from there.") from None
        finally:
            await self._do(sql.release, owner)  # also if a claim was cut short: that comes first in the ledger's queue
        return self._answers

    def _batches(self, keys: Sequence[str], tries: Mapping[str, int]) -> list[tuple[list[Question], int]]:
        """New questions share requests; one whose reply had no verdict goes alone.

        The two orders of a pair never share a request, where the judge would see the contradiction, nor do two
        responses to one instruction, which would be compared and not rated.
        """
        alone = [([self._questions[key]], tries[key]) for key in keys if key in tries]
        groups: dict[tuple[int, int], list[Question]] = {}
        seen: dict[tuple[int, tuple[str, ...]], int] = {}
        for key in keys:
            if key not in tries:
                question = self._questions[key]
                place = (question.annotator, question.subject)
                seen[place] = seen.get(place, -1) + 1
                groups.setdefault((question.annotator, seen[place]), []).append(question)
        shared: list[tuple[list[Question], int]] = []
        for (annotator, _), questions in groups.items():
            size = self._pool.served[annotator].config.batch_size
            shared += [(questions[n : n + size], 0) for n in range(0, len(questions), size)]
        return alone + shared

    async def _ask(self, client: Client, questions: list[Question], tries: int) -> None:
        """Asks until each question has a verdict or a reason: those of a reply without verdicts again, each alone."""
        pending = [(questions, tries)]
        try:
            while pending:
                left = await _all(self._request(client, *batch) for batch in pending)
                pending = [batch for batches in left for batch in batches]
        except BaseException:
            self._ended = True
            raise

    async def _request(self, client: Client, questions: list[Question], tries: int) -> list[tuple[list[Question], int]]:
        """One request about some questions: settles them, or returns what is to be asked next, and for which time."""
        served = self._pool.served[questions[0].annotator]
        keys = [question.key for question in questions]
        apart = [([question], 0) for question in questions] if len(questions) > 1 else []
        try:
            async with self._places:
                if self._ended:
                    return []
                request = served.request([question.item for question in questions], tries)
                reply = await client.ask(request, questions=keys, label=served.config.name)
        except (errors.ContentRefusedError, errors.TransientAPIError) as error:
            self._pay(keys, error.cost_usd)
            if apart and isinstance(error, errors.ContentRefusedError):
                return apart  # one of them may have been refused: the others are not to suffer
            self._settle(keys, [Answer(reason=f"{type(error).__name__}: {error}")] * len(keys))
            return []
        if reply.attempts:
            self._pay(keys, reply.cost_usd)
        opinions = served.read(reply.raw, len(keys))
        if not isinstance(opinions, Exception):
            self._settle(keys, [Answer(*opinion) for opinion in opinions])
        elif apart:
            return apart
        elif tries + 1 < MAX_TRIES:
            return [(questions, tries + 1)]
        else:
            self._settle(keys, [Answer(reason=_unparsable(opinions))])
        return []

    def _read(self, stored: Mapping[str, sql.Stored]) -> dict[str, int]:
        """Settles the questions whose stored reply has a verdict; returns the tries so far of the others."""
        unread: dict[str, int] = {}
        read: dict[str, list[Opinion] | Exception] = {}  # by request
        for key, reply in stored.items():
            served = self._pool.served[self._questions[key].annotator]
            if reply.request_key not in read:
                read[reply.request_key] = served.read(reply.raw, reply.size)
            opinions = read[reply.request_key]
            if not isinstance(opinions, Exception):
                self._settle([key], [Answer(*opinions[reply.position])])
            elif reply.size == 1 and reply.tries >= MAX_TRIES:
                self._settle([key], [Answer(reason=_unparsable(opinions))])
            else:
                unread[key] = reply.tries
        return unread

    def _check_replayed(self) -> None:
        if self._open:
            missing = next(iter(self._open.values()))
            served = self._pool.served[missing.annotator]
            raise errors.ReplayMissError(
                f"{len(self._open)} of {len(self._questions)} questions have no stored answer in {self._ledger.path} "
                f"from {served.base_url} with seed {served.seed}; the first is for {served.config.name}, "
                f"model {served.model.model!r}, instruction {shorten(missing.item.instruction)}. Answers are kept by "
                "server, model, prompt and seed: give those of the run to replay, or run once without replay."
            )

    def _pay(self, keys: Sequence[str], cost_usd: float) -> None:
        self._spent += cost_usd
        for key in keys:
            self._costs[key] = self._costs.get(key, 0.0) + cost_usd / len(keys)

    def _settle(self, keys: Sequence[str], answers: Sequence[Answer]) -> None:
        for key, answer in zip(keys, answers, strict=True):
            self._answers[key] = replace(answer, cost_usd=self._costs.get(key, 0.0), cached=key not in self._costs)
            self._open.pop(key, None)
        if self._pool.on_progress:
            self._pool.on_progress(Progress(len(self._answers), len(self._questions), self._spent))

    async def _do(self, operation: Callable[..., T], *args: Any) -> T:
        return await asyncio.wrap_future(self._ledger.do(operation, *args))


async def _all(awaitables: Iterable[Awaitable[T]]) -> list[T]:
    """Awaits them together. If one fails, the others, which are paid for, still arrive first."""
    outcomes = await asyncio.gather(*awaitables, return_exceptions=True)
    results: list[T] = []
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
        results.append(outcome)
    return results


def _unparsable(error: Exception) -> str:
    return f"{errors.UnparsableVerdictError.__name__}: no verdict in {MAX_TRIES} replies; the last: {error}"
