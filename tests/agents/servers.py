"""Servers on the loopback interface: of a chat model, and one that speaks as vLLM does."""

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path

import peft
import torch
from tiny_worlds import LORA, load_policy, make_env, small_ppo

from alpacafarm_env.agents.language_model import LanguageModel
from alpacafarm_env.agents.ppo import PPO
from alpacafarm_env.agents.rollouts import Rollouts, ragged
from alpacafarm_env.agents.sampling import sample
from alpacafarm_env.judge_server import http

FIELDS = {
    *("model", "prompt", "max_tokens", "stop_token_ids", "ignore_eos", "seed", "n", "logprobs", "return_token_ids"),
    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
}


class VLLM:
    """Serves the model in `folder` as `name`.

    Attributes:
        asked: The bodies of the requests for completions that were begun, in order; `answered` those that were sampled.
        loaded: The names of adapters, each time one was loaded; `adapters` those that are there now.
        before: Called before a request is answered, with its number from 1; a ConnectionError ends the connection.
        spoil: Changes a reply, as JSON, before it is sent.
    """

    def __init__(self, folder: Path, name: str = "base", *, version: str = "0.33.0") -> None:
        self.folder, self.name, self.version, self.port = folder, name, version, 0
        self.asked, self.answered, self.loaded = [], [], []
        self.before: Callable[[int], None] = lambda number: None
        self.spoil: Callable[[dict], object] = lambda reply: None
        self._lock = threading.Lock()
        self.start()

    def start(self) -> None:
        """Up, on the same port as before, without any adapter."""
        self.adapters: dict[str, LanguageModel] = {}
        self._base = LanguageModel.from_pretrained(self.folder)
        self._server = http.Server(http.json_app(http.threaded(self.reply)), port=self.port)
        self.port = int(self.url.rpartition(":")[2])

    def kill(self) -> None:
        """Down at once, with what is under way."""
        self._server.close()

    @property
    def url(self) -> str:
        return self._server.url

    def reply(self, method: str, path: str, content: bytes, key: str) -> http.Response:
        if (method, path) == ("GET", "/version"):
            return http.as_json({"version": self.version})
        if (method, path) == ("GET", "/v1/models"):
            return http.as_json({"object": "list", "data": [{"id": name} for name in (self.name, *self.adapters)]})
        body = json.loads(content or b"{}")
        with self._lock:
            if path == "/v1/load_lora_adapter":
                return self._load(**body)
            if path == "/v1/unload_lora_adapter":
                known = self.adapters.pop(body["lora_name"], None)
                return http.Response("Success") if known else http.as_error(404, "cannot be found", "NotFoundError")
        if path != "/v1/completions":
            return http.as_error(404, "Not Found", "NotFoundError")
        return self._complete(body)

    def _load(self, lora_name: str, lora_path: str, load_inplace: bool = False) -> http.Response:
        if lora_name in self.adapters and not load_inplace:
            return http.as_error(400, "has already been loaded", "InvalidUserInput")
        if not (Path(lora_path) / "adapter_config.json").is_file():
            return http.as_error(404, f"No adapter found for {lora_path}", "NotFoundError")
        adapted = LanguageModel.from_pretrained(self.folder)
        adapted.model = peft.PeftModel.from_pretrained(adapted.model, lora_path).eval()
        self.adapters[lora_name] = adapted
        self.loaded.append(lora_name)
        return http.Response(f"Success: LoRA adapter '{lora_name}' added successfully.")

    def _complete(self, body: dict) -> http.Response:
        if wrong := (FIELDS ^ body.keys()) - {"seed"}:  # vLLM takes what is not said from the generation config
            return http.as_error(400, f"not said, or unknown: {sorted(wrong)}", "BadRequestError")
        model = self.adapters.get(body["model"], self._base if body["model"] == self.name else None)
        if model is None:
            return http.as_error(404, f"The model `{body['model']}` does not exist.", "NotFoundError")
        with self._lock:
            self.asked.append(body)
            number = len(self.asked)
        self.before(number)
        with self._lock:
            reply = complete(model, body)
            self.answered.append(body)
        self.spoil(reply)
        return http.as_json(reply)


def train_served(folder: Path, url: str, out: Path, num_envs: int) -> None:
    """Two steps of PPO on an adapter, through a server; rank 0 writes it down."""
    policy = load_policy(folder, lora=LORA, sampler={"base_url": url})
    agent = PPO(make_env(num_envs), policy, config=small_ppo(max_response_tokens=4), seed=1)
    agent.learn()
    if os.environ.get("RANK", "0") == "0":
        agent.save(out)


def complete(model: LanguageModel, body: dict) -> dict:
    """One completion, with the log-probabilities of vLLM's default: those at temperature 1."""
    uniforms = None
    if body["temperature"] > 0:
        uniforms = torch.rand(1, body["max_tokens"], generator=torch.Generator().manual_seed(body["seed"]))
    options = {"max_new_tokens": body["max_tokens"], "temperature": body["temperature"], "uniforms": uniforms}
    drawn = sample(model._base_model, [body["prompt"]], eos_token_ids=body["stop_token_ids"], **options)
    tokens = drawn.tokens[0, : drawn.lengths[0]].tolist()
    rollouts = Rollouts(("",), ("",), *ragged([body["prompt"]]), *ragged([tokens]), torch.zeros(len(tokens)), [True])
    with torch.no_grad():
        scores = model.logprobs(rollouts).tolist()
    finished = bool(drawn.finished[0])
    choice = {"index": 0, "text": model.tokenizer.decode(tokens), "finish_reason": "stop" if finished else "length"}
    choice |= {"stop_reason": tokens[-1] if finished else None, "token_ids": tokens, "prompt_logprobs": None}
    choice |= {"prompt_token_ids": body["prompt"], "logprobs": {"token_logprobs": scores, "tokens": [""] * len(tokens)}}
    usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": len(tokens), "total_tokens": 0}
    return {"id": "cmpl-1", "object": "text_completion", "model": body["model"], "choices": [choice], "usage": usage}
