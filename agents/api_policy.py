"""API policies: a chat or completion model behind an OpenAI-compatible server, as an agent that only acts.

1. Chat: one request an instruction, which is the user's message; a length limit in characters, if there is one, is the
   system's message. Completion: one request an instruction, its prompt rendered from a template.
2. At most `max_concurrency` requests are in flight; failures that may pass are repeated (408, 409, 429, 5xx, broken
   connections, time-outs, replies that are no answer). Others (wrong key, unknown model) end the call at once.
3. An answer without text is an error, never an empty response.

Source: AlpacaFarm (Dubois et al. 2023, arXiv:2305.14387), appendix A and released code. Deviations from that code:

1. The sentence that states the length limit is our own.
2. Without a `template`, a chat model reads the instruction alone. Theirs reads Alpaca's prompt, and always the one that
   announces an input; `paper_baselines()` announce an input only where there is one.
3. Completion models get one prompt a request too, not ten: one refused prompt then does not cost nine others.
4. Retries are bounded, and a refused key is not retried; theirs repeats every failure for ever.
"""

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import Field

from ..errors import APIError, PolicyError, did_you_mean
from ..instructions import system_front
from ..llm.client import Client, ClientConfig, run
from ..llm.endpoint import Endpoint
from ..llm.requests import Request
from ..oracles.base import check_batch, shorten
from ..seeding import keyed_rng
from ..templates import ALPACA, PromptTemplate
from .settings import Count, Natural, NonNegative, Positive, Settings

Kind = Literal["chat", "completion"]
MaxTokensField = Literal["max_tokens", "max_completion_tokens"]


@dataclass(frozen=True, kw_only=True)
class APIPolicyConfig(Settings):
    """Settings of an API policy; the defaults are AlpacaFarm's for a completion model."""

    temperature: NonNegative | None = 0.7
    """Sampling temperature, 0 or more. None: not sent (some reasoning models take no other than their own)."""
    top_p: Annotated[float, Field(gt=0, le=1)] | None = 1.0
    """Nucleus sampling, in (0, 1]. None: not sent."""
    max_tokens: Count = 300
    """Longest response in tokens of the served model."""
    max_tokens_field: MaxTokensField = "max_tokens"
    """A chat request's name for that limit. Every compatible server reads "max_tokens", and several ignore the other
    without a word; OpenAI's newer models refuse "max_tokens". Completion requests always use "max_tokens".
    """
    length_limit_chars: Count | None = None
    """The limit in characters that the prompt states (AlpacaFarm: GPT-4 500, ChatGPT 1000). None: none stated."""
    seed: int | None = None
    """Sends each request a seed that depends on this one, the instruction, and the equal ones before it in the call. A
    server may ignore it, and none promises equal answers. None: not sent."""
    max_concurrency: Count = 8
    """Requests in flight at once."""
    max_retries: Natural = 5
    """How often a request is repeated after a failure that may pass."""
    timeout_s: Positive = 60.0
    """Wall-clock seconds of an attempt, from the first byte sent to the last byte read."""
    deadline_s: Positive = 600.0
    """Seconds of one instruction, repeats and the waits between them included."""

    @classmethod
    def paper(cls, length_limit_chars: int | None = None) -> Self:
        """AlpacaFarm's settings; the limit is 500 for GPT-4, 1000 for ChatGPT and not stated for Davinci."""
        return cls(length_limit_chars=length_limit_chars)

    @classmethod
    def sandbox(cls) -> Self:
        """Settings for the sandbox, whose instructions ask for a sentence or two."""
        return cls(max_tokens=64, length_limit_chars=200)


class APIPolicy:
    """A served language model that answers instructions. It does not learn, so it has `act` alone.

    Args:
        model: The model's name on the server.
        base_url: The server's address up to "/v1"; None: $OPENAI_BASE_URL, or OpenAI's own.
        api_key: The key; None: $OPENAI_API_KEY, read at each call. A server on this machine needs none; to another one
            without keys pass any text. It is kept out of messages and reprs, and a policy is not pickled.
        kind: "chat" or "completion", the endpoint.
        template: The prompt's. None: Alpaca's for "completion", the instruction alone for "chat".
        allow_insecure: Take http:// to another machine too. Anybody on the way can then read the key and the texts.

    Attributes:
        usage: What all calls so far have cost, as the server counts it: replies, prompt_tokens and completion_tokens;
            "uncounted" are replies without a believable count, whose tokens are in neither sum.

    Raises:
        PolicyError: There is no key.
        ValueError: `base_url` is no address, holds a user, a password or a query, or is http:// to another machine.
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
        allow_insecure: bool = False,
    ) -> None:
        if kind not in get_args(Kind):
            raise did_you_mean("kind of API", kind, get_args(Kind))
        self.endpoint = Endpoint(base_url, api_key, allow_insecure=allow_insecure)
        self.model, self.base_url, self.kind = model, self.endpoint.base_url, kind
        self.config = config or APIPolicyConfig()
        self.template = template or (ALPACA if kind == "completion" else None)
        self.usage = Counter[str]()
        problem = ""
        try:
            self.endpoint.key()
        except APIError as error:
            problem = str(error)
        if problem:
            raise PolicyError(f"{self!r}: {problem}")

    def __repr__(self) -> str:
        return f"APIPolicy({self.model!r}, kind={self.kind!r}, base_url={self.base_url!r})"

    def act(self, instructions: Sequence[str]) -> tuple[str, ...]:
        """Ask for a response to each instruction; in their order. Works inside a running event loop too (Jupyter).

        PolicyError if a request failed for good, or its reply has no text: the other requests are dropped, and what had
        arrived is in the error's `responses`.
        """
        check_batch(instructions)
        return run(self._answers(list(instructions))) if len(instructions) else ()

    def request(self, instruction: str, occurrence: int = 0) -> dict[str, Any]:
        """The body sent for an instruction that `occurrence` equal ones precede in the call."""
        config, limit = self.config, self.config.length_limit_chars
        own = "" if self.template else getattr(instruction, "system", "")
        text = self.template.render(instruction) if self.template else instruction.removeprefix(system_front(own))
        rule = f"Keep every answer shorter than {limit} characters." if limit else ""
        body: dict[str, Any] = {"model": self.model}
        if self.kind == "chat":
            rules = "\n\n".join(filter(None, (own, rule)))
            system = [{"role": "system", "content": rules}] if rules else []
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
        config, failure = self.config, None
        answers: list[str | None] = [None] * len(instructions)
        rows, seen = iter(range(len(instructions))), Counter[str]()

        async def work() -> None:
            for row in rows:  # shared by all workers
                instruction = instructions[row]
                seen[instruction] += 1
                answers[row] = await self._answer(client, instruction, self.request(instruction, seen[instruction] - 1))

        settings = ClientConfig(
            max_concurrency=config.max_concurrency,
            max_attempts=config.max_retries + 1,
            attempt_timeout_s=config.timeout_s,
            deadline_s=config.deadline_s,
        )
        async with Client(self.endpoint, config=settings) as client:
            try:
                async with asyncio.TaskGroup() as group:
                    for _ in range(config.max_concurrency):
                        group.create_task(work())
            except ExceptionGroup as errors:
                failure = errors.exceptions[0]
        if isinstance(failure, PolicyError):
            failure.responses = tuple(answers)
        if failure:
            raise failure
        return tuple(answer for answer in answers if answer is not None)

    async def _answer(self, client: Client, instruction: str, body: dict[str, Any]) -> str:
        problem = ""
        try:
            reply = (await client.ask(Request(self.base_url, self.kind, body))).reply
        except APIError as error:
            problem = str(error)
        if problem:
            raise PolicyError(f"{self!r}: {problem[:700]}. Instruction: {shorten(instruction)}")
        counts = {"prompt_tokens": reply.prompt_tokens, "completion_tokens": reply.completion_tokens}
        self.usage.update({"uncounted": 1} if None in counts.values() else counts, replies=1)
        return reply.text


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
