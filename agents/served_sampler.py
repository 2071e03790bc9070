"""Rollouts by a vLLM server: token ids both ways over HTTP, the policy's LoRA adapter loaded whenever it has changed.

Start the server with the policy's base model, whose tokenizer and weights must be the policy's own:

    VLLM_ALLOW_RUNTIME_LORA_UPDATING=True vllm serve BASE --enable-lora --max-lora-rank 64 --max-model-len 512

1. An adapter's name on the server carries a running number and a digest of its weights, so that no name ever means two
   adapters. It is loaded when the server does not list it: after an update, and after a restart. The one before it is
   unloaded. A reply that names another model is an error.
2. One request a response, many in flight, repeated where that may help; its seed comes from the row's random numbers. A
   server that stays away is an error: the run goes on from its last checkpoint.
3. At the start, and after a server's error, the policy scores a few responses itself. Log-probabilities that differ
   mean other weights or another tokenizer: refused, with the number.
4. A reply is believed only if it is whole: every token's id and log-probability, an end that was asked for.

What is spoken, and by which versions: `alpacafarm_env.llm.vllm`.
"""

import hashlib
import shutil
import tempfile
import uuid
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import peft
import torch
from torch import Tensor

from ..errors import APIError, PolicyError
from ..llm.client import ClientConfig, run
from ..llm.endpoint import OPENAI_KEY, Endpoint
from ..llm.vllm import Choice, VLLMServer, body
from .checkpoints import fingerprint
from .rollouts import Rollouts, pad_rows, ragged
from .sampling import Samples
from .settings import Count, Positive, Settings

NUM_CHECKED, CHECKED_TOKENS = 8, 32
"""Responses that the policy scores at the start, and their tokens at most."""


@dataclass(frozen=True, kw_only=True)
class ServedSamplerConfig(Settings):
    """Where the server is, and how it is asked. JSON-able."""

    base_url: str
    """Its address, with or without "/v1" at the end."""
    model: str | None = None
    """The name of a served model that is the policy as it is. Such a policy cannot be trained. None: its LoRA adapter
    is loaded into the server."""
    adapter_dir: str | None = None
    """A folder that the server sees under the same path, where adapters are written. None: this machine's temporary
    folder."""
    api_key_env: str = OPENAI_KEY
    """The environment variable with the server's key; none is needed on this machine."""
    allow_insecure: bool = False
    """Take http:// to another machine too."""
    max_concurrency: Count = 256
    """Requests in flight at once."""
    timeout_s: Positive = 600.0
    """Wall-clock seconds of one attempt, waiting in the server's queue included."""
    max_mismatch: Positive = 0.1
    """Nats a token by which the policy's log-probabilities may differ from the server's, on average."""


class _Served(NamedTuple):
    """A model by its name on the server, and the folder of its adapter, None for a model that is there anyway."""

    name: str
    folder: Path | None = None
    digest: str = ""


class ServedSampler:
    """Samples a policy's responses through a vLLM server; see the module.

    Log-probabilities are the server's: by default those at temperature 1, whatever the temperature (vLLM's
    `--logprobs-mode raw_logprobs`). Draws are keyed, but a server's kernels may round otherwise in another batch.

    Raises:
        ValueError: `base_url` is no address, or http:// to another machine.
    """

    def __init__(self, config: ServedSamplerConfig) -> None:
        self.config = config
        url = config.base_url.rstrip("/").removesuffix("/v1") + "/v1"
        endpoint = Endpoint(url, api_key_env=config.api_key_env, allow_insecure=config.allow_insecure)
        limits = ClientConfig(
            max_concurrency=config.max_concurrency, attempt_timeout_s=config.timeout_s, deadline_s=4 * config.timeout_s
        )
        self._server = VLLMServer(endpoint, limits)
        self._served: _Served | None = None
        self._version, self._matches = 0, False

    @classmethod
    def of(cls, given: "ServedSampler | Mapping[str, Any]", model: Any) -> "ServedSampler":
        """A sampler, or one from settings by name, for this model.

        Raises:
            TypeError: There is no such setting.
            ValueError: Nothing of the model can be loaded into a server, and no served model is named.
        """
        if isinstance(given, Mapping):
            given = cls(ServedSamplerConfig(**given))
        if given.config.model is None and not isinstance(model, peft.PeftModel):
            raise ValueError(
                "A server takes LoRA adapters, not a whole model's weights: load the policy with lora=LoraConfig(...) "
                'to train it, or name the served model, {"base_url": ..., "model": NAME}, if it is not to be trained '
                "(best-of-n, evaluation)"
            )
        return given

    def check_trainable(self) -> None:
        """ValueError if training the policy would not reach the server."""
        if self.config.model is not None:
            raise ValueError(
                f"Training does not change the served model {self.config.model!r}, so its responses would not be the "
                "policy's. With LoRA leave the sampler's model out, and its adapter is loaded; without LoRA set "
                "policy.sampler = None"
            )

    def sample(
        self,
        policy: Any,
        prompts: Sequence[Sequence[int]],
        *,
        uniforms: Tensor | None,
        max_new_tokens: int,
        temperature: float,
        eos_token_ids: Sequence[int],
        silent: Sequence[int] = (),
    ) -> Samples:
        """As `sampling.sample`; a row of `uniforms` decides no token itself, but the seed of the row's request.

        Raises:
            APIError: The server is too old, has no such model, is away, or answers wrongly.
            PolicyError: Its log-probabilities are not the policy's.
            ValueError: The policy has control tokens, which a server does not know.
        """
        if silent:
            raise ValueError("A server knows no control tokens; set policy.sampler = None")
        served = self._current(policy)
        if not self._matches and prompts:
            self._check_match(policy, served, prompts, eos_token_ids, min(CHECKED_TOKENS, max_new_tokens))
        seeds = [None] * len(prompts) if uniforms is None else [_seed(row) for row in uniforms.cpu()]
        options: dict[str, Any] = {"max_tokens": max_new_tokens, "temperature": temperature}
        options["stop_token_ids"] = eos_token_ids
        bodies = [body(served.name, row, seed=seed, **options) for row, seed in zip(prompts, seeds, strict=True)]
        choices = self._complete(served, bodies)
        tokens, lengths = ragged([choice.tokens for choice in choices], policy.device)
        logprobs = torch.tensor([value for choice in choices for value in choice.logprobs], device=policy.device)
        ended = torch.tensor([choice.tokens[-1] in eos_token_ids for choice in choices], device=policy.device)
        padded = [pad_rows(flat, lengths, width=max_new_tokens) for flat in (tokens, logprobs)]
        return Samples(padded[0], padded[1], lengths, ended.bool())

    def _complete(self, served: _Served, bodies: Sequence[dict[str, Any]]) -> list[Choice]:
        try:
            return run(self._server.complete(bodies, None if served.folder is None else str(served.folder)))
        except APIError:
            self._matches = False  # it may be another server when it is asked again
            raise

    def _current(self, policy: Any) -> _Served:
        """The served model that is the policy as it is now; a changed adapter is written, and replaces the last one."""
        if self.config.model is not None:
            return _Served(self.config.model)
        digest = fingerprint((n, p) for n, p in policy.model.named_parameters() if p.requires_grad or "lora_" in n)
        last = self._served
        if last is not None and last.digest == digest:
            return last
        self._version += 1
        name = f"alpacafarm-{self._version}-{digest[:16]}"
        folder = (self._folder() if last is None or last.folder is None else last.folder.parent) / name
        policy.save(folder)
        self._served = _Served(name, folder, digest)
        if last is not None and last.folder is not None:
            run(self._server.unload(last.name))
            shutil.rmtree(last.folder, ignore_errors=True)
        return self._served

    def _folder(self) -> Path:
        """A new folder for adapters, there for as long as this object."""
        beside = Path(self.config.adapter_dir or tempfile.gettempdir()).absolute()
        folder = beside / f"alpacafarm-adapters-{uuid.uuid4().hex[:12]}"
        folder.mkdir(parents=True)  # as readable as the umask permits: the server may be another user's
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        return folder

    def _check_match(
        self, policy: Any, served: _Served, prompts: Sequence[Sequence[int]], ends: Sequence[int], max_tokens: int
    ) -> None:
        """Raises PolicyError unless policy and server agree on a few responses, drawn at temperature 1."""
        few = list(dict.fromkeys(map(tuple, prompts)))[:NUM_CHECKED]
        options: dict[str, Any] = {"max_tokens": max_tokens, "temperature": 1.0, "stop_token_ids": ends}
        choices = self._complete(served, [body(served.name, row, seed=i, **options) for i, row in enumerate(few)])
        gap = float("inf")
        if max(max(choice.tokens) for choice in choices) < policy.model.get_input_embeddings().weight.shape[0]:
            with torch.no_grad():
                ours = policy.logprobs(_as_rollouts(few, choices, policy.device)).cpu()
            gap = float((ours - torch.tensor([value for choice in choices for value in choice.logprobs])).abs().mean())
        if not gap <= self.config.max_mismatch:
            raise PolicyError(
                f"{self._server.endpoint.host} samples from another model than the policy: on {len(few)} responses "
                f"their log-probabilities differ by {gap:.3g} nats a token on average, and at most max_mismatch="
                f"{self.config.max_mismatch:g} is accepted. Serve the policy's own base model, with its tokenizer"
            )
        self._matches = True


def _seed(uniforms: Tensor) -> int:
    """63 bits from the first random numbers of a row, of 24 bits each."""
    digest = hashlib.sha256(uniforms[:8].to(torch.float64).numpy().tobytes()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def _as_rollouts(prompts: Sequence[Sequence[int]], choices: Sequence[Choice], device: torch.device) -> Rollouts:
    blank, rows = ("",) * len(choices), [choice.tokens for choice in choices]
    return Rollouts.given(blank, blank, prompts, rows, [True] * len(choices), device)
