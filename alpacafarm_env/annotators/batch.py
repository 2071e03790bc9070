"""Asks a batch of questions: shared requests, repeats, and other processes that ask the same.

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
from time import monotonic
from typing import Any, Final, TypeVar

from ..errors import (
    BudgetExceededError,
    ContentRefusedError,
    InvalidReplyError,
    ReplayMissError,
    TransientAPIError,
    UnparsableVerdictError,
)
from ..llm.client import Client
from ..llm.ledger import operations as sql
from ..llm.ledger.operations import Stored
from ..llm.ledger.store import Ledger
from ..llm.replies import read_reply
from ..llm.requests import Request
from ..oracles.base import shorten
from ..seeding import keyed_rng
from .config import AnnotatorConfig, ModelConfig, Prompt
from .prompts import Shown, render
from .verdicts import Opinion, parse

T = TypeVar("T")
MAX_TRIES: Final = 3
"""Requests for one pair alone; after them a reply without a verdict is final."""
_POLL_S: Final = (0.05, 1.0)
"""Seconds between looks for answers to another process's questions: first and longest wait."""
AHEAD: Final = 256
"""Requests prepared beyond those in flight (some kilobytes each): those that wait to be repeated must not hold others
up."""


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


@dataclass(frozen=True)
class Question:
    """What is shown to one annotator (its number), a pair in one order; `key` names it in the ledger."""

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
    seconds: float


class BatchRun:
    """One call of a pool about some questions, by key; `on_progress` is called after each answer."""

    def __init__(
        self,
        questions: Mapping[str, Question],
        served: Sequence[Served],
        ledger: Ledger,
        client: Callable[[], Client],
        on_progress: Callable[[Progress], None] | None,
    ) -> None:
        self._questions, self._served = questions, served
        self._ledger, self._client, self._on_progress = ledger, client, on_progress
        self._open = dict(questions)
        self._answers: dict[str, Answer] = {}
        self._costs: dict[str, float] = {}  # of the questions asked in this call
        self._spent, self._ended, self._start = 0.0, False, monotonic()

    async def run(self) -> dict[str, Answer]:
        """The answer of each question, by key."""
        await self._read(list(self._open))
        if self._open and self._ledger.replay:
            missing = next(iter(self._open.values()))
            served = self._served[missing.annotator]
            raise ReplayMissError(
                f"{len(self._open)} of {len(self._questions)} questions have no stored answer in {self._ledger.path} "
                f"from {served.base_url} with seed {served.seed}; the first is for {served.config.name}, "
                f"model {served.model.model!r}, instruction {shorten(missing.item.instruction)}. Answers are kept by "
                "server, model, prompt and seed: give those of the run to replay, or run once without replay."
            )
        if self._open:
            async with self._client() as client:
                await self._ask_all(client)
        return self._answers

    async def _ask_all(self, client: Client) -> None:
        owner, wait_s = self._ledger.new_owner(), _POLL_S[0]
        self._places = asyncio.Semaphore(client.limiter.most + AHEAD)
        while self._open:
            wanted = list(self._open)
            try:
                mine = await self._do(sql.claim, wanted, owner)
                tries = await self._read(mine)  # some may have been answered between the look and the claim
                batches = self._batches([key for key in mine if key in self._open], tries)
                await self._all(self._ask(client, batch, tried) for batch, tried in batches)
            except BudgetExceededError as error:
                kept = f"{len(self._answers)} of {len(self._questions)} questions are answered and kept"
                raise BudgetExceededError(f"{error} {kept}: run again to go on from there.") from None
            finally:
                # Also when the claim was cut short: it comes first in the ledger's queue.
                await self._do(sql.release, wanted, owner)
            if self._open:  # others are asking these
                wait_s = _POLL_S[0] if mine else min(2 * wait_s, _POLL_S[1])
                await asyncio.sleep(wait_s)
                await self._read(list(self._open))

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
            size = self._served[annotator].config.batch_size
            shared += [(questions[n : n + size], 0) for n in range(0, len(questions), size)]
        return alone + shared

    async def _all(self, asks: Iterable[Awaitable[None]]) -> None:
        """Runs them together. If one fails, those in flight, which are paid for, still arrive first."""
        outcomes = await asyncio.gather(*asks, return_exceptions=True)
        for outcome in outcomes:
            if outcome is not None:
                raise outcome

    async def _ask(self, client: Client, questions: list[Question], tries: int) -> None:
        """Asks until each question has a verdict or a reason."""
        if self._ended:
            return
        try:
            await self._persist(client, questions, tries)
        except BaseException:
            self._ended = True
            raise

    async def _persist(self, client: Client, questions: list[Question], tries: int) -> None:
        served = self._served[questions[0].annotator]
        keys, items = [question.key for question in questions], [question.item for question in questions]
        try:
            # A place is given back before anything is asked again: nobody who holds one waits for another.
            async with self._places:
                request = served.request(items, tries)
                reply = await client.ask(request, questions=keys, label=served.config.name)
            if not reply.cached:
                self._pay(keys, reply.cost_usd)
            opinions = parse(served.prompt.format, reply.reply, len(keys))
        except (ContentRefusedError, TransientAPIError) as error:
            self._pay(keys, error.cost_usd)
            if len(keys) == 1 or isinstance(error, TransientAPIError):
                reason = f"{type(error).__name__}: {error}"
                self._settle(keys, [Answer(reason=reason)] * len(keys))
            else:  # one of them may have been refused: the others are not to suffer
                await self._all(self._ask(client, [question], 0) for question in questions)
        except UnparsableVerdictError as error:
            if len(keys) > 1:
                await self._all(self._ask(client, [question], 0) for question in questions)
            elif tries + 1 < MAX_TRIES:
                await self._ask(client, questions, tries + 1)
            else:
                self._settle(keys, [Answer(reason=_unparsable(error))])
        else:
            self._settle(keys, [Answer(*opinion) for opinion in opinions])

    async def _read(self, keys: Sequence[str]) -> dict[str, int]:
        """Settles the questions whose stored reply has a verdict; returns the tries so far of the others."""
        unread: dict[str, int] = {}
        read: dict[str, list[Opinion] | Exception] = {}  # by request
        for key, stored in (await self._do(sql.lookup, keys)).items():
            if stored.request_key not in read:
                read[stored.request_key] = self._opinions(self._questions[key], stored)
            opinions = read[stored.request_key]
            if not isinstance(opinions, Exception):
                self._settle([key], [Answer(*opinions[stored.position])])
            elif stored.size == 1 and stored.tries >= MAX_TRIES:
                self._settle([key], [Answer(reason=_unparsable(opinions))])
            else:
                unread[key] = stored.tries
        return unread

    def _opinions(self, question: Question, stored: Stored) -> list[Opinion] | Exception:
        """The verdicts of a stored reply on all questions of its request, or why there are none."""
        served = self._served[question.annotator]
        try:
            return parse(served.prompt.format, read_reply(served.model.kind, stored.raw), stored.size)
        except (UnparsableVerdictError, InvalidReplyError) as error:
            return error

    def _pay(self, keys: Sequence[str], cost_usd: float) -> None:
        self._spent += cost_usd
        for key in keys:
            self._costs[key] = self._costs.get(key, 0.0) + cost_usd / len(keys)

    def _settle(self, keys: Sequence[str], answers: Sequence[Answer]) -> None:
        for key, answer in zip(keys, answers, strict=True):
            self._answers[key] = replace(answer, cost_usd=self._costs.get(key, 0.0), cached=key not in self._costs)
            self._open.pop(key, None)
        if self._on_progress:
            seconds = monotonic() - self._start
            self._on_progress(Progress(len(self._answers), len(self._questions), self._spent, seconds))

    async def _do(self, operation: Callable[..., T], *args: Any) -> T:
        return await asyncio.wrap_future(self._ledger.do(operation, *args))


def _unparsable(error: Exception) -> str:
    return f"{UnparsableVerdictError.__name__}: no verdict in {MAX_TRIES} replies; the last: {error}"
