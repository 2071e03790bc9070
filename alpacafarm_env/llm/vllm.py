"""Token ids in, token ids out, by a vLLM server: its version, its models, adapters loaded into it, whole answers.

Source: vLLM, schema as of 0.33: `vllm/entrypoints/openai/completion/protocol.py` (`return_token_ids`, from 0.10.2) and
`vllm/entrypoints/serve/lora` (`load_inplace`, vllm-project/vllm#31326, from 0.15.0).
"""

import asyncio
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeGuard

from ..errors import InvalidReplyError, OutageError, PermanentAPIError
from .client import Client, ClientConfig
from .endpoint import Endpoint
from .requests import Request
from .transport import Sender

OLDEST: Final = (0, 15)
"""The first version that replaces an adapter in place."""
_NEEDS: Final = (
    "It needs VLLM_ALLOW_RUNTIME_LORA_UPDATING=True, --enable-lora and a --max-lora-rank that is large enough, and "
    "must see that folder under the same path"
)


class Choice(NamedTuple):
    """A response: its tokens, one at least, and the log-probability of each."""

    tokens: list[int]
    logprobs: list[float]


class VLLMServer:
    """Asks one vLLM server for completions."""

    def __init__(self, endpoint: Endpoint, limits: ClientConfig) -> None:
        self.endpoint, self._limits = endpoint, limits

    async def complete(self, bodies: Sequence[Mapping[str, Any]], adapter: str | None) -> list[Choice]:
        """The answers to requests of one model (`body`).

        `adapter` is the folder of the LoRA adapter that the model's name stands for, which is loaded where the server
        does not have it; None for a model that must be there.

        Raises:
            OutageError, TransientAPIError: The server is away, or does not answer.
            PermanentAPIError: It is no vLLM, or too old; it has no such model, or refuses the adapter or a request.
            InvalidReplyError: An answer is wrong or not whole, see `read_choice`.
        """
        sender = Sender(self.endpoint, timeout_s=self._limits.attempt_timeout_s)
        try:
            await self._prepare(sender, str(bodies[0]["model"]), adapter)
        finally:
            await sender.close()
        async with Client(self.endpoint, config=self._limits) as client:
            asks = (client.ask(Request(self.endpoint.base_url, "tokens", dict(sent))) for sent in bodies)
            answers = await asyncio.gather(*asks)
        return [read_choice(answer.raw, sent) for answer, sent in zip(answers, bodies, strict=True)]

    async def unload(self, name: str) -> None:
        """Takes an adapter off the server, if it is there."""
        sender = Sender(self.endpoint, timeout_s=self._limits.attempt_timeout_s)
        try:
            await sender.call("/v1/unload_lora_adapter", {"lora_name": name})
        finally:
            await sender.close()

    async def _prepare(self, sender: Sender, model: str, adapter: str | None) -> None:
        """Looks at version and models, and loads an adapter that is not there."""
        host = self.endpoint.host
        status, said = await sender.call("/version")
        if status == 0 or status >= 500 or status == 429:
            raise OutageError(f"{host} is away (status {status}): {said[:300]}. A run goes on from its last checkpoint")
        check_version(host, status, said)
        status, said = await sender.call("/v1/models")
        if status == 200 and model in re.findall(r'"id":\s*"([^"]+)"', said):
            return
        if adapter is None or status != 200:
            raise PermanentAPIError(f"{host} serves no model {model!r}. It said (status {status}): {said[:300]}")
        wanted = {"lora_name": model, "lora_path": adapter, "load_inplace": True}
        status, said = await sender.call("/v1/load_lora_adapter", wanted)
        if status != 200:
            raise PermanentAPIError(f"{host} did not load {adapter} (status {status}): {said[:500]}. {_NEEDS}")


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
