"""How a batch of questions is asked: shared requests, repeats, what other processes ask at the same time.

A question is one pair shown to one annotator in one order. Questions of one annotator share requests, in the order of
the batch: what a model says of a pair may depend on the pairs that were asked with it, the first time. A shared reply
without exactly one verdict a pair is asked for again pair by pair, and a pair's own reply without a verdict up to
`MAX_TRIES` times in all. Replies are stored as they come and read from there, so that nothing is paid for twice: not
after a kill, not by a process beside this one (it leases what it asks), not by a better parser.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from time import monotonic
from typing import Any, Final, TypeVar

from ..errors import ContentRefusedError, InvalidReplyError, ReplayMissError, TransientAPIError, UnparsableVerdictError
from ..llm.client import Client
from ..llm.ledger import operations as sql
from ..llm.ledger.operations import Stored
from ..llm.ledger.store import Ledger
from ..llm.replies import read_reply
from ..llm.requests import Request
from ..oracles.base import shorten
from ..seeding import keyed_rng
from .config import AnnotatorConfig, ModelConfig, Prompt
from .prompts import Item, render
from .verdicts import parse

T = TypeVar("T")
MAX_TRIES: Final = 3
"""Requests for one pair alone, after which replies without a verdict are final."""
_POLL_S: Final = (0.05, 1.0)
"""Seconds between looks at what another process is asking: at first, and at most."""
AHEAD: Final = 256
"""Requests made beyond those that may be in flight: a few kilobytes each. Some of them wait for their next attempt, and
are not to keep others from theirs."""


@dataclass(frozen=True)
class Served:
    """One annotator of a pool with its prompt and the model that plays its role."""

    config: AnnotatorConfig
    prompt: Prompt
    model: ModelConfig


@dataclass(frozen=True)
class Question:
    """One pair, shown to one annotator in one order; `key` is its name in the ledger, and no request's."""

    annotator: int
    item: Item
    key: str

    @classmethod
    def about(cls, served: Served, annotator: int, item: Item, *, base_url: str, seed: int) -> Question:
        """The question and its key: of all that is asked about the pair alone, and of the annotator's batch size.

        The size counts because neighbours in a request may sway a verdict.
        """
        alone = make_request(served, [item], base_url=base_url, seed=seed)
        named = replace(alone, sample=f"{alone.sample}, in requests of {served.config.batch_size}")
        return cls(annotator, item, named.key)

    @property
    def pair(self) -> tuple[str, ...]:
        """The instruction and the unordered pair."""
        return (self.item.instruction, *sorted(self.item[1:]))


@dataclass(frozen=True)
class Answer:
    """What is known of a question: P(second shown preferred), or NaN and why."""

    score: float = math.nan
    cost_usd: float = 0.0
    cached: bool = True
    reason: str = ""


@dataclass(frozen=True)
class Progress:
    """How far one call is."""

    done: int
    total: int
    cost_usd: float
    """Spent by this call so far; NaN if a model has no price."""
    seconds: float


def make_request(served: Served, items: Sequence[Item], *, base_url: str, seed: int, tries: int = 0) -> Request:
    """The request that asks one annotator about up to its batch size of items.

    Args:
        served: The annotator.
        items: The pairs.
        base_url: The server.
        seed: The pool's. It is sent too; a model that refuses it has "seed" in `omit`.
        tries: How often the same was asked before; each try is another draw.
    """
    config, prompt, model = served.config, served.prompt, served.model
    field = "messages" if model.kind == "chat" else "prompt"
    body: dict[str, Any] = {"model": model.model, field: render(prompt, items, model.kind)}
    body[model.max_tokens_field] = config.max_tokens + model.extra_tokens
    body |= {"temperature": config.temperature, "top_p": config.top_p}
    body["seed"] = seed if not tries else int(keyed_rng(seed, "try", tries).integers(2**31))
    if model.kind == "completion":
        body["stop"] = ["\n\n"]  # a model that continues texts would go on to pairs of its own
    if prompt.format == "logprobs":
        body |= {"logprobs": True, "top_logprobs": 20} if model.kind == "chat" else {"logprobs": 20}
    kept = {name: value for name, value in body.items() if name not in model.omit}
    return Request(base_url, model.kind, kept, f"seed {seed}" + (f", try {tries}" if tries else ""))


class BatchRun:
    """One call of a pool: `run` answers its questions.

    Args:
        questions: What is asked, by key.
        served: The pool's annotators; a question names one by its number.
        ledger: Where answers are kept and looked up.
        client: Opens a client of the server at `base_url`.
        base_url: The server's address.
        seed: The pool's.
        on_progress: Called after each answer.
    """

    def __init__(
        self,
        questions: Mapping[str, Question],
        served: Sequence[Served],
        *,
        ledger: Ledger,
        client: Callable[[], Client],
        base_url: str,
        seed: int,
        on_progress: Callable[[Progress], None] | None,
    ) -> None:
        self._questions, self._served, self._ledger, self._client = questions, served, ledger, client
        self._base_url, self._seed, self._on_progress = base_url, seed, on_progress
        self._open = dict(questions)
        self._answers: dict[str, Answer] = {}
        self._costs: dict[str, float] = {}  # of the questions that were asked in this call, which others were not
        self._spent = 0.0
        self._ended = False
        self._start = monotonic()

    async def run(self) -> dict[str, Answer]:
        """The answer of each question, by key."""
        await self._read(list(self._open))
        if self._open and self._ledger.replay:
            missing = next(iter(self._open.values()))
            served = self._served[missing.annotator]
            raise ReplayMissError(
                f"{len(self._open)} of {len(self._questions)} pairs have no stored answer in {self._ledger.path} from "
                f"{self._base_url} with seed {self._seed}; the first is for {served.config.name}, "
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
            finally:
                # Also when the claim was cut short: it stands before this in the ledger's queue.
                await self._do(sql.release, wanted, owner)
            if self._open:  # another call is asking these
                wait_s = _POLL_S[0] if mine else min(2 * wait_s, _POLL_S[1])
                await asyncio.sleep(wait_s)
                await self._read(list(self._open))

    def _batches(self, keys: Sequence[str], tries: Mapping[str, int]) -> list[tuple[list[Question], int]]:
        """Questions never asked share requests; one whose reply had no verdict goes alone.

        The two orders of a pair never stand in one request, where the judge would see the contradiction.
        """
        alone = [([self._questions[key]], tries[key]) for key in keys if key in tries]
        groups: dict[tuple[int, int], list[Question]] = {}
        seen: dict[tuple[int, tuple[str, ...]], int] = {}
        for key in keys:
            if key not in tries:
                question = self._questions[key]
                place = (question.annotator, question.pair)
                seen[place] = seen.get(place, -1) + 1
                groups.setdefault((question.annotator, seen[place]), []).append(question)
        shared: list[tuple[list[Question], int]] = []
        for (annotator, _), questions in groups.items():
            size = self._served[annotator].config.batch_size
            shared += [(questions[n : n + size], 0) for n in range(0, len(questions), size)]
        return alone + shared

    async def _all(self, asks: Iterable[Awaitable[None]]) -> None:
        """Runs them together. If one fails, those in flight, which are paid for, still arrive before it is raised."""
        outcomes = await asyncio.gather(*asks, return_exceptions=True)
        for outcome in outcomes:
            if outcome is not None:
                raise outcome

    async def _ask(self, client: Client, questions: list[Question], tries: int) -> None:
        """Asks until each question has a verdict or a reason why not."""
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
            # First come, first served, as the client is. A place is given back before anything is asked again, so that
            # nobody who holds one waits for another.
            async with self._places:
                request = make_request(served, items, base_url=self._base_url, seed=self._seed, tries=tries)
                reply = await client.ask(request, questions=keys, label=served.config.name)
            if not reply.cached:
                self._pay(keys, reply.cost_usd)
            scores = parse(served.prompt.format, reply.reply, len(keys))
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
            self._settle(keys, [Answer(score) for score in scores])

    async def _read(self, keys: Sequence[str]) -> dict[str, int]:
        """Settles the questions whose stored reply has a verdict; the tries so far of those whose has none."""
        unread: dict[str, int] = {}
        read: dict[str, list[float] | Exception] = {}  # by request: questions that shared one share its reply
        for key, stored in (await self._do(sql.lookup, keys)).items():
            if stored.request_key not in read:
                read[stored.request_key] = self._scores(self._questions[key], stored)
            scores = read[stored.request_key]
            if not isinstance(scores, Exception):
                self._settle([key], [Answer(scores[stored.position])])
            elif stored.size == 1 and stored.tries >= MAX_TRIES:
                self._settle([key], [Answer(reason=_unparsable(scores))])
            else:
                unread[key] = stored.tries
        return unread

    def _scores(self, question: Question, stored: Stored) -> list[float] | Exception:
        """What a stored reply says of all questions of its request, or why it says nothing."""
        served = self._served[question.annotator]
        try:
            return parse(served.prompt.format, read_reply(served.model.kind, stored.raw), stored.size)
        except (UnparsableVerdictError, InvalidReplyError) as error:
            return error

    def _pay(self, keys: Sequence[str], cost_usd: float) -> None:
        """What a request that was sent cost, shared out among its questions."""
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
