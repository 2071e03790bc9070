"""Token ids in, token ids out, by a vLLM server: its version, its models, adapters loaded into it, whole answers.

Source: vLLM, schema as of 0.33: `vllm/entrypoints/openai/completion/protocol.py` (`return_token_ids`, from 0.10.2) and
`vllm/entrypoints/serve/lora` (`load_inplace`, vllm-project/vllm#31326, from 0.15.0).
"""

import asyncio
import json
import re
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeGuard

from ..errors import (
    APIError,
    ContentRefusedError,
    InvalidReplyError,
    OutageError,
    PermanentAPIError,
)
from .client import Client, ClientConfig
from .endpoint import Endpoint
from .requests import Request
from .transport import Sender

OLDEST: Final = (0, 15)
"""The first version that replaces an adapter in place."""
MOST_FRUITLESS: Final = 3
"""Rounds of requests in a row without a single answer, from a server that is up, after which it is given up."""
POLL_S: Final = 1.0
"""Seconds between looks at a server that is away."""
_NEEDS: Final = (
    "It needs VLLM_ALLOW_RUNTIME_LORA_UPDATING=True, --enable-lora and a --max-lora-rank that is large enough, and "
    "must see that folder under the same path"
)


class Choice(NamedTuple):
    """A response: its tokens, one at least, and the log-probability of each."""

    tokens: list[int]
    logprobs: list[float]


class VLLMServer:
    """Asks one vLLM server for completions, and waits for it while it is away.

    Args:
        restart_s: Seconds that a server which is away is waited for.
        when_away: Called after the server was away: it may be another one now.
    """

    def __init__(
        self, endpoint: Endpoint, limits: ClientConfig, *, restart_s: float, when_away: Callable[[], None]
    ) -> None:
        self.endpoint, self._limits, self._restart_s, self._when_away = endpoint, limits, restart_s, when_away

    async def complete(self, bodies: Sequence[Mapping[str, Any]], adapter: str | None) -> list[Choice]:
        """The answers to requests of one model (`body`); what has come is kept while the server is away.

        `adapter` is the folder of the LoRA adapter that the model's name stands for, which is loaded where the server
        does not have it; None for a model that must be there.

        Raises:
            OutageError: The server is away for longer than `restart_s`.
            PermanentAPIError: It is no vLLM, or too old; it has no such model, or refuses the adapter or a request.
            TransientAPIError: It is there, but does not answer.
            InvalidReplyError: An answer is wrong or not whole, see `read_choice`.
        """
        choices: list[Choice | None] = [None] * len(bodies)
        failure, fruitless = None, 0
        while missing := [row for row, choice in enumerate(choices) if choice is None]:
            await self._ready(str(bodies[0]["model"]), adapter)
            if failure is not None:
                self._when_away()
                if fruitless >= (2 if isinstance(failure, PermanentAPIError) else MOST_FRUITLESS):
                    raise failure
            failure = await self._round(bodies, missing, choices)
            fruitless = fruitless + 1 if choices.count(None) == len(missing) else 0
        return [choice for choice in choices if choice is not None]

    async def unload(self, name: str) -> None:
        """Takes an adapter off the server, if it is there."""
        sender = Sender(self.endpoint, timeout_s=self._limits.attempt_timeout_s)
        try:
            await sender.call("/v1/unload_lora_adapter", {"lora_name": name})
        finally:
            await sender.close()

    async def _round(
        self, bodies: Sequence[Mapping[str, Any]], missing: Sequence[int], choices: list[Choice | None]
    ) -> APIError | None:
        """Asks for what is missing, once; one of the failures that another round may mend, None if there is none."""
        async with Client(self.endpoint, config=self._limits) as client:
            asks = (client.ask(Request(self.endpoint.base_url, "tokens", dict(bodies[row]))) for row in missing)
            outcomes = await asyncio.gather(*asks, return_exceptions=True)
        failures = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        for row, outcome in zip(missing, outcomes, strict=True):
            if not isinstance(outcome, BaseException):
                choices[row] = read_choice(outcome.raw, bodies[row])
        for failure in failures:
            if not isinstance(failure, APIError) or isinstance(failure, ContentRefusedError):
                raise failure
        return next((failure for failure in failures if isinstance(failure, APIError)), None)

    async def _ready(self, model: str, adapter: str | None) -> None:
        """Returns once the server is up and has the model."""
        sender = Sender(self.endpoint, timeout_s=self._limits.attempt_timeout_s)
        until, warned = time.monotonic() + self._restart_s, False
        try:
            while problem := await self._prepare(sender, model, adapter):
                if time.monotonic() > until:
                    raise OutageError(f"{self.endpoint.host} is away for restart_s={self._restart_s:g}: {problem}")
                if not warned:
                    warnings.warn(
                        f"{self.endpoint.host} is away ({problem}); waiting for it, {self._restart_s:g} s at most "
                        "(restart_s).",
                        stacklevel=2,
                    )
                    warned = True
                self._when_away()
                await asyncio.sleep(POLL_S)
        finally:
            await sender.close()

    async def _prepare(self, sender: Sender, model: str, adapter: str | None) -> str:
        """Looks at version and models, and loads an adapter that is not there; why the server seems away, else ""."""
        host = self.endpoint.host
        status, said = await sender.call("/version")
        if status == 0 or status >= 500 or status == 429:
            return f"status {status}: {said[:300]}"
        check_version(host, status, said)
        status, said = await sender.call("/v1/models")
        if status == 0:
            return said[:300]
        if status == 200 and model in re.findall(r'"id":\s*"([^"]+)"', said):
            return ""
        if adapter is None or status != 200:
            raise PermanentAPIError(f"{host} serves no model {model!r}. It said (status {status}): {said[:300]}")
        wanted = {"lora_name": model, "lora_path": adapter, "load_inplace": True}
        status, said = await sender.call("/v1/load_lora_adapter", wanted)
        if status not in (0, 200):
            raise PermanentAPIError(f"{host} did not load {adapter} (status {status}): {said[:500]}. {_NEEDS}")
        return "" if status else said[:300]


def check_version(host: str, status: int, said: str) -> None:
    """Raises PermanentAPIError unless this is the reply of a vLLM, `OLDEST` or newer, to GET /version."""
    version = re.search(r'"version":\s*"((\d+)\.(\d+)[^"]*)"', said) if status == 200 else None
    least = ".".join(map(str, OLDEST))
    if version is None:
        raise PermanentAPIError(
            f"{host} does not say which version of vLLM it is (GET /version, status {status}): {said[:200]}. Sampling "
            f"needs vLLM {least} or newer at base_url"
        )
    if (int(version[2]), int(version[3])) < OLDEST:
        raise PermanentAPIError(f"{host} is vLLM {version[1]}, too old; sampling needs {least} or newer")


def body(
    model: str,
    prompt: Sequence[int],
    *,
    max_tokens: int,
    temperature: float,
    stop_token_ids: Sequence[int],
    seed: int | None = None,
) -> dict[str, Any]:
    """A request for one response. All that the server would else take from the model's generation config is said."""
    exact = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0}
    # Which tokens end a response, `stop_token_ids` says alone.
    ending = {"max_tokens": max_tokens, "stop_token_ids": list(stop_token_ids), "ignore_eos": True}
    wanted = {"n": 1, "logprobs": 0, "return_token_ids": True}
    drawn = {"temperature": temperature, "frequency_penalty": 0.0, **({} if seed is None else {"seed": seed})}
    return {"model": model, "prompt": list(prompt), **ending, **drawn, **exact, **wanted}


def read_choice(raw: str, sent: Mapping[str, Any]) -> Choice:
    """The response in the raw reply to a request (`body`).

    Raises:
        InvalidReplyError: It is another model's, lacks a token's id or log-probability, or did not end as asked for.
    """
    reply = json.loads(raw)
    if reply.get("model") != sent["model"]:
        problem = f"The server answered as model {reply.get('model')!r}, a version other than {sent['model']!r}"
        raise InvalidReplyError(problem)
    if len(reply["choices"]) != 1:
        raise InvalidReplyError(f"The server sent {len(reply['choices'])} responses where 1 was asked for")
    (choice,) = reply["choices"]
    tokens, prompt, reason = (choice.get(name) for name in ("token_ids", "prompt_token_ids", "finish_reason"))
    for name, ids in (("token_ids", tokens), ("prompt_token_ids", prompt)):
        if not _are(ids, int) or not ids:
            raise InvalidReplyError(f"The reply has {str(ids)[:80]} as {name}; expected ids, as return_token_ids asks")
    if prompt != sent["prompt"]:
        raise InvalidReplyError("The reply is to another prompt: its prompt_token_ids are not those that were sent")
    scored = (choice.get("logprobs") or {}).get("token_logprobs")
    if not _are(scored, int, float) or len(scored) != len(tokens):
        count = len(scored) if isinstance(scored, list) else "no"
        raise InvalidReplyError(f"The reply has {len(tokens)} token ids but {count} log-probabilities")
    limit, ends = sent["max_tokens"], set(sent["stop_token_ids"])
    ended = len(tokens) == limit if reason == "length" else reason == "stop" and tokens[-1] in ends
    if not ended or len(tokens) > limit or ends & set(tokens[:-1]):
        raise InvalidReplyError(
            f"A response of {len(tokens)} tokens, the last {tokens[-1]}, ended with {reason!r}; expected 'stop' at the "
            f"first of {sorted(ends)}, or 'length' at {limit} tokens. Is the server's --max-model-len too small?"
        )
    return Choice(tokens, [float(value) for value in scored])


def _are(values: Any, *kinds: type) -> TypeGuard[list[Any]]:
    return isinstance(values, list) and all(type(value) in kinds for value in values)
