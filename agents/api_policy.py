"""API policies: a chat or completion model behind an OpenAI-compatible server, as an agent that only acts.

1. Chat: one request an instruction, which is the user's message; a length limit in characters, if there is one, is the
   system's message. Completion: one request an instruction, its prompt rendered from a template.
2. At most `max_concurrency` requests are in flight; the client library repeats what may pass (409, 429, 5xx, broken
   connections, time-outs). What cannot pass (wrong key, unknown model) ends the call at once.
3. Every reply is checked: an answer without text is an error, never an empty response.

Source: AlpacaFarm (Dubois et al. 2023, arXiv:2305.14387), appendix A and released code; `paper_baselines()` has the
settings of its four API models. Deviations from that code:

1. The sentence that states the length limit is our own.
2. Without a `template`, a chat model reads the instruction alone. Theirs reads Alpaca's prompt, and always the one that
   announces an input; the settings of `paper_baselines()` announce an input only where there is one.
3. Completion models get one prompt a request too, not ten: one refused prompt then does not cost nine others.
4. Retries are bounded, and a refused key is not retried; theirs repeats every failure for ever.
"""

import asyncio
import os
from collections import Counter
from collections.abc import Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from json import JSONDecodeError
from math import inf
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar, get_args
from urllib.parse import urlsplit

from ..errors import PolicyError, did_you_mean
from ..oracles.base import shorten
from ..seeding import keyed_rng
from ..templates import ALPACA, PromptTemplate

if TYPE_CHECKING:
    from openai import AsyncOpenAI, OpenAIError

Kind = Literal["chat", "completion"]
MaxTokensField = Literal["max_tokens", "max_completion_tokens"]
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class APIPolicyConfig:
    """Settings of an API policy; the defaults are AlpacaFarm's for a completion model."""

    temperature: float | None = 0.7
    """Sampling temperature, 0 or more. None: not sent (some reasoning models take no other than their own)."""
    top_p: float | None = 1.0
    """Nucleus sampling, in (0, 1]. None: not sent."""
    max_tokens: int = 300
    """Longest response in tokens of the served model."""
    max_tokens_field: MaxTokensField = "max_tokens"
    """What a chat request calls that limit. Every compatible server reads "max_tokens", and several ignore the other
    without a word; OpenAI's newer models refuse "max_tokens". Completion requests always use "max_tokens"."""
    length_limit_chars: int | None = None
    """The limit in characters that the prompt states (AlpacaFarm: GPT-4 500, ChatGPT 1000). None: none stated."""
    seed: int | None = None
    """Sends each request a seed that depends on this one, the instruction, and how many equal ones stand before it in
    the call. A server may ignore it, and none promises equal answers. None: not sent."""
    max_concurrency: int = 8
    """Requests in flight at once."""
    max_retries: int = 5
    """How often one request is repeated after a failure that may pass."""
    timeout_s: float = 60.0
    """Seconds an attempt may be silent before it counts as failed."""
    deadline_s: float = 600.0
    """Seconds one instruction may take in all, repeats and the waits between them included."""

    def __post_init__(self) -> None:
        self._require(
            self.max_tokens_field in get_args(MaxTokensField), "max_tokens_field", f"one of {get_args(MaxTokensField)}"
        )
        limit = self.length_limit_chars
        self._require(limit is None or _is_count(limit, 1), "length_limit_chars", "an integer, 1 or more, or None")
        for name, least in (("max_tokens", 1), ("max_concurrency", 1), ("max_retries", 0)):
            self._require(_is_count(getattr(self, name), least), name, f"an integer, {least} or more")
        self._require(self.seed is None or isinstance(self.seed, int), "seed", "an integer, or None")
        self._require(self.temperature is None or 0 <= self.temperature < inf, "temperature", "0 or more, or None")
        self._require(self.top_p is None or 0 < self.top_p <= 1, "top_p", "in (0, 1], or None")
        for name in ("timeout_s", "deadline_s"):
            self._require(0 < getattr(self, name) < inf, name, "finite and above 0")

    @classmethod
    def paper(cls, length_limit_chars: int | None = None) -> Self:
        """AlpacaFarm's settings; the limit is 500 for GPT-4, 1000 for ChatGPT and not stated for Davinci."""
        return cls(length_limit_chars=length_limit_chars)

    @classmethod
    def sandbox(cls) -> Self:
        """Settings for the sandbox, whose instructions ask for a sentence or two."""
        return cls(max_tokens=64, length_limit_chars=200)

    def _require(self, holds: bool, name: str, expected: str) -> None:
        if not holds:
            raise ValueError(f"{type(self).__name__}.{name} must be {expected}, got {getattr(self, name)!r}")


@dataclass
class TokenUsage:
    """What a policy's replies have cost so far, as the server counts it; replies that end in an error count too."""

    replies: int = 0
    """Answered requests. Failed attempts, and requests dropped because another one failed, are not in it."""
    prompt_tokens: int = 0
    """Tokens read."""
    completion_tokens: int = 0
    """Tokens written."""
    uncounted: int = 0
    """Replies without a believable count (missing, negative, not an integer); their tokens are in neither sum."""

    def add(self, usage: object) -> None:
        """Count one reply, from its `usage`."""
        counts: list[Any] = [getattr(usage, name, None) for name in ("prompt_tokens", "completion_tokens")]
        believable = all(map(_is_count, counts))
        self.replies, self.uncounted = self.replies + 1, self.uncounted + (not believable)
        self.prompt_tokens += counts[0] if believable else 0
        self.completion_tokens += counts[1] if believable else 0


class APIPolicy:
    """A served language model that answers instructions. It does not learn, so it has `act` alone.

    Args:
        model: The model's name on the server.
        base_url: The server's address up to "/v1"; None: $OPENAI_BASE_URL, or OpenAI's own.
        api_key: The key; None: $OPENAI_API_KEY, read at each call. A server without keys takes any text. It is kept out
            of messages, reprs and pickles.
        kind: "chat" or "completion", the endpoint.
        config: Settings.
        template: The prompt's. None: Alpaca's for "completion", the instruction alone for "chat".

    Attributes:
        usage: Tokens used by all calls so far, a `TokenUsage`.

    Raises:
        PolicyError: There is no key.
        ValueError: `base_url` is no address, or holds a user, a password or a query.
    """

    def __init__(
        self,
        model: str,
        *,
        base_url: str | None = None,
        api_key: str | None = None,
        kind: Kind = "chat",
        config: APIPolicyConfig | None = None,
        template: PromptTemplate | None = None,
    ) -> None:
        if kind not in get_args(Kind):
            raise did_you_mean("kind of API", kind, get_args(Kind))
        if base_url is not None:
            _check_address(base_url)
        self.model, self.base_url, self.kind = model, base_url, kind
        self.config = config or APIPolicyConfig()
        self.template = template or (ALPACA if kind == "completion" else None)
        self.usage = TokenUsage()

        def key() -> str:
            found = (api_key or os.environ.get("OPENAI_API_KEY", "")).strip()
            if not found or not found.isascii() or not found.isprintable():
                what = "has a key with characters that no key has" if found else "has no key"
                raise PolicyError(f'{self!r} {what}. Pass api_key ("no-key" if none is needed) or set OPENAI_API_KEY.')
            return found

        self._key = key  # a function: vars() does not show what it returns, and pickle refuses it
        key()

    def __repr__(self) -> str:
        return f"APIPolicy({self.model!r}, kind={self.kind!r}, base_url={self.base_url!r})"

    def act(self, instructions: Sequence[str]) -> tuple[str, ...]:
        """Ask for a response to each instruction; in their order. Works inside a running event loop too (Jupyter).

        Raises:
            PolicyError: A request failed for good, or its reply has no text. The other requests are dropped;
                what had arrived is in the error's `responses`.
            TypeError: `instructions` is a single text.
        """
        if isinstance(instructions, str):
            raise TypeError(f"act expects a sequence of instructions, got the text {shorten(instructions)}")
        return _run(self._answers(list(instructions))) if len(instructions) else ()

    def request(self, instruction: str, occurrence: int = 0) -> dict[str, Any]:
        """The body sent for an instruction that `occurrence` equal ones precede in the call."""
        config, limit = self.config, self.config.length_limit_chars
        text = self.template.render(instruction) if self.template else str(instruction)
        rule = f"Keep every answer shorter than {limit} characters." if limit else ""
        body: dict[str, Any] = {"model": self.model}
        if self.kind == "chat":
            system = [{"role": "system", "content": rule}] if rule else []
            body["messages"] = [*system, {"role": "user", "content": text}]
            body[config.max_tokens_field] = config.max_tokens
        else:
            body["prompt"] = f"{rule}\n\n{text}" if rule else text
            body["max_tokens"] = config.max_tokens
        optional = {"temperature": config.temperature, "top_p": config.top_p}
        if config.seed is not None:
            optional["seed"] = int(keyed_rng(config.seed, "api policy", instruction, occurrence).integers(2**31))
        return body | {name: value for name, value in optional.items() if value is not None}

    async def _answers(self, instructions: list[str]) -> tuple[str, ...]:
        from openai import AsyncOpenAI

        config, failure = self.config, None
        answers: list[str | None] = [None] * len(instructions)
        rows, seen = iter(range(len(instructions))), Counter[str]()

        async def work() -> None:
            for row in rows:  # shared by all workers
                occurrence, instruction = seen[instructions[row]], instructions[row]
                seen[instruction] += 1
                answers[row] = await self._answer(client, instruction, self.request(instruction, occurrence))

        async with AsyncOpenAI(
            api_key=self._key(), base_url=self.base_url, timeout=config.timeout_s, max_retries=config.max_retries
        ) as client:
            try:
                async with asyncio.TaskGroup() as group:
                    for _ in range(min(config.max_concurrency, len(instructions))):
                        group.create_task(work())
            except ExceptionGroup as errors:
                failure = errors.exceptions[0]
        if isinstance(failure, PolicyError):
            failure.responses = tuple(answers)
        if failure:
            raise failure
        return tuple(answer for answer in answers if answer is not None)

    async def _answer(self, client: "AsyncOpenAI", instruction: str, body: dict[str, Any]) -> str:
        from openai import OpenAIError

        create: Any = client.chat.completions.create if self.kind == "chat" else client.completions.create
        try:
            async with asyncio.timeout(self.config.deadline_s):
                reply = await create(**body)
        except OpenAIError as error:
            problem = self._explain(error)
        except TimeoutError:
            problem = f"no answer within deadline_s={self.config.deadline_s:g} seconds, repeats included"
        except (JSONDecodeError, UnicodeDecodeError) as error:
            problem = f"the reply is not JSON ({type(error).__name__}), or was cut off"
        else:
            self.usage.add(getattr(reply, "usage", None))
            text, problem = self._read(reply)
            if text is not None:
                return text
        # Raised out here, so that no library error, which may quote the key, hangs on it as its context.
        problem = problem.replace(self._key(), "[key]")
        raise PolicyError(f"{self!r}: {problem[:500]}. Instruction: {shorten(instruction)}")

    def _read(self, reply: object) -> tuple[str | None, str]:
        """The text of a reply, or None and what is wrong. The library checks nothing: any field may be any type."""
        choices = getattr(reply, "choices", None)
        if not isinstance(choices, list) or not choices:
            return None, f"the reply has no choice, hence no finish_reason: {reply!r}"
        part = getattr(choices[0], "message", None) if self.kind == "chat" else choices[0]
        text = getattr(part, "content" if self.kind == "chat" else "text", None)
        if isinstance(text, str) and text.strip():
            return text, ""
        reason = getattr(choices[0], "finish_reason", None)
        return None, f"the answer has no text but {text!r}, with finish_reason={reason!r}"

    def _explain(self, error: "OpenAIError") -> str:
        """What a failed request means and what to do."""
        status = getattr(error, "status_code", None)
        if status is None or status in (408, 409, 429) or status >= 500:
            return f"no answer after up to {self.config.max_retries} repeats: {error}"
        what = {
            401: "the server refused the key; check api_key or OPENAI_API_KEY",
            403: "the key may not use this model or server",
            404: f"the server has no model {self.model!r}, or base_url is wrong (it mostly ends in /v1)",
        }.get(status, "the server refused the request; see temperature, top_p, seed and max_tokens_field of the config")
        return f"{what}. The server said: {error}"


def paper_baselines() -> dict[str, dict[str, Any]]:
    """The API models of AlpacaFarm's Table 2, best first, each with the arguments of `APIPolicy` it had there.

    Their provider has retired all four, so put the name of another model in:
    `APIPolicy(**paper_baselines()["GPT-4"] | {"model": "my-model", "base_url": "http://localhost:8000/v1"})`.
    """

    def settings(model: str, kind: Kind, limit: int | None) -> dict[str, Any]:
        return {"model": model, "kind": kind, "config": APIPolicyConfig.paper(limit), "template": ALPACA}

    return {
        "GPT-4": settings("gpt-4-0314", "chat", 500),
        "ChatGPT": settings("gpt-3.5-turbo-0301", "chat", 1000),
        "Davinci003": settings("text-davinci-003", "completion", None),
        "Davinci001": settings("text-davinci-001", "completion", None),
    }


def _run(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end, from plain code or, on a second thread, from code that a running loop calls."""
    inside = True
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        inside = False
    if not inside:  # out here, lest every error has that RuntimeError as its context
        return asyncio.run(main)
    tasks: list[tuple[asyncio.AbstractEventLoop, asyncio.Task[T]]] = []

    async def cancellable() -> T:
        task = asyncio.create_task(main)
        tasks.append((asyncio.get_running_loop(), task))
        return await task

    with ThreadPoolExecutor(1) as thread:
        future = thread.submit(asyncio.run, cancellable())
        try:
            return future.result()
        except KeyboardInterrupt:  # leaving the block waits for the thread, so end its requests first
            for loop, task in tasks:
                with suppress(RuntimeError):  # the loop has ended by itself
                    loop.call_soon_threadsafe(task.cancel)
            raise


def _check_address(base_url: str) -> None:
    with suppress(ValueError):  # its own message may quote a password
        parts = urlsplit(base_url)
        if parts.scheme in ("http", "https") and parts.hostname and not set("@?#") & set(base_url):
            return
    raise ValueError("base_url must look like https://host/v1, with no user, password, query or fragment in it")


def _is_count(value: object, least: int = 0) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
