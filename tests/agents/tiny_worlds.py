"""Models, data and environments small enough for tests, and worlds of processes."""

import multiprocessing
import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import transformers
from gymnasium.vector import AutoresetMode
from hub_models import build_byte_tokenizer
from numpy.typing import NDArray
from peft import LoraConfig
from torch import Tensor
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from alpacafarm_env.agents.language_model import LanguageModel
from alpacafarm_env.agents.ppo import PPO, PPOConfig
from alpacafarm_env.agents.quark import Quark, QuarkConfig
from alpacafarm_env.envs.vector import InstructionVectorEnv
from alpacafarm_env.errors import UnscoredError
from alpacafarm_env.instructions import Demonstration, Instruction, Preference
from alpacafarm_env.oracles.base import OracleError, Verdicts
from alpacafarm_env.templates import PromptTemplate

SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
SPECIAL_IDS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
TEMPLATE = PromptTemplate(with_input="Q: {instruction}\nIn: {input}\nA:", without_input="Q: {instruction}\nA:")
INSTRUCTIONS = ("List two birds.", "Hi", "Describe the sea in one short sentence.", "What is 2+2?", "Name a tree")
LORA = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, after the three special ones; BOS in front of a text, as LLaMA's tokenizer does."""
    return build_byte_tokenizer(*SPECIAL_TOKENS.values(), **SPECIAL_TOKENS)


def build_llama(vocab_size: int, *, seed: int = 0, max_positions: int = 256, **settings: Any) -> LlamaForCausalLM:
    """Two layers, width 32, grouped heads; weights large enough that the next token is far from uniform."""
    torch.manual_seed(seed)
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "max_position_embeddings": max_positions,
    }
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=vocab_size, initializer_range=0.2, **sizes, **heads, **SPECIAL_IDS, **settings)
    return LlamaForCausalLM(config).eval()


def build_gpt2(vocab_size: int, *, seed: int = 0) -> GPT2LMHeadModel:
    """Learned absolute positions and biases: what LLaMA has not. Its dropout is on, for the agents to turn off."""
    torch.manual_seed(seed)
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256}
    return GPT2LMHeadModel(GPT2Config(vocab_size=vocab_size, initializer_range=0.2, **sizes, **SPECIAL_IDS))


HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
ENDS: dict[str, dict[str, Any]] = {
    "Llama": HEADS,
    "Qwen2": HEADS,
    "Gemma2": {**HEADS, "final_logit_softcapping": 3.0},
    "Cohere": {**HEADS, "logit_scale": 0.25},
    "Granite": {**HEADS, "logits_scaling": 4.0},
    "GPTNeoX": {"num_attention_heads": 4},
    "GPT2": {"n_head": 4, "n_embd": 32, "n_layer": 2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
}
"""Architectures that differ in what they do to logits."""


def build_ending(architecture: str, tokenizer: PreTrainedTokenizerFast) -> LanguageModel:
    """A language model of one of `ENDS`."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "max_position_embeddings": 128}
    sizes |= {"vocab_size": len(tokenizer), "initializer_range": 0.2} | SPECIAL_IDS | ENDS[architecture]
    config = getattr(transformers, f"{architecture}Config")(**sizes)
    torch.manual_seed(0)
    name = f"{architecture}{'LMHeadModel' if architecture == 'GPT2' else 'ForCausalLM'}"
    return LanguageModel(getattr(transformers, name)(config), tokenizer, TEMPLATE, max_response_tokens=8)


BUILDERS: dict[str, Callable[[int], PreTrainedModel]] = {"llama": build_llama, "gpt2": build_gpt2}


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def say_more(model: PreTrainedModel, token: int, bonus: float) -> None:
    """Add to the logit of one token, from now on."""
    extra = bonus * torch.nn.functional.one_hot(torch.tensor(token), model.config.vocab_size)
    model.get_output_embeddings().register_forward_hook(lambda module, args, logits: logits + extra)


torch.set_num_threads(1)  # models this small gain nothing from threads, and lose much on a busy machine
ASCII = "".join(map(chr, range(33, 127)))
"""About a third of the bytes: an untrained policy's share of them has room both ways."""
TEXTS = ("List two birds.", "Hi", "Describe the sea in one short sentence.", "What is 2+2?", "Name a tree")
DEMONSTRATIONS = tuple(
    Demonstration(Instruction(text, id=i, split="sft"), f"answer {i}" + "!" * i) for i, text in enumerate(TEXTS)
)


class TinyDataset:
    """Five instructions, and nothing else."""

    name, level, splits = "tiny", "sandbox", ("unlabeled",)

    def instructions(self, split: str) -> tuple[Instruction, ...]:
        return tuple(Instruction(text, id=i, split=split) for i, text in enumerate(TEXTS))

    def references(self, split: str) -> tuple[str, ...]:
        return tuple("answer" for _ in TEXTS)

    def demonstrations(self, split: str = "sft") -> tuple[Demonstration, ...]:
        return DEMONSTRATIONS

    def preferences(self, split: str = "preference") -> tuple[Preference, ...]:
        return tuple(Preference(d.instruction, (d.response, "no"), 1) for d in DEMONSTRATIONS)


class Share:
    """Scores sign x the share of the response's `size` places that hold one of `characters`."""

    name = "share"

    def __init__(self, characters: str, *, size: int = 4, sign: float = 1.0) -> None:
        self.characters, self.size, self.sign = characters, size, sign

    def score(self, instructions: Sequence[str], responses: Sequence[str]) -> NDArray[np.float64]:
        return np.array([self.sign * sum(c in self.characters for c in r) / self.size for r in responses], np.float64)


class Paid(Share):
    """Only the main process may ask it; what an answer costs is a detail."""

    paid = True

    def judge(self, instructions: Sequence[str], responses: Sequence[str]) -> Verdicts:
        if os.environ.get("RANK", "0") != "0":
            raise OracleError("asked by a process that is not the main one")
        return Verdicts(
            self.score(instructions, responses), {"cost_usd": np.array([len(text) / 100 for text in responses])}
        )


class Broke(Paid):
    """Has no money left."""

    def judge(self, instructions: Sequence[str], responses: Sequence[str]) -> Verdicts:
        raise OracleError("out of money")


class Picky(Share):
    """Gives no verdict on responses of even length."""

    def score(self, instructions: Sequence[str], responses: Sequence[str]) -> NDArray[np.float64]:
        even = np.array([len(response) % 2 == 0 for response in responses])
        return np.where(even, np.nan, super().score(instructions, responses))


class First(Share):
    """Scores the first `num_scored` responses of a batch only."""

    num_scored = 1

    def score(self, instructions: Sequence[str], responses: Sequence[str]) -> NDArray[np.float64]:
        unscored = np.arange(len(responses)) >= self.num_scored
        return np.where(unscored, np.nan, super().score(instructions, responses))


def make_env(num_envs: int = 16, oracle: Any = None, **kwargs: Any) -> InstructionVectorEnv:
    kwargs = {"autoreset_mode": AutoresetMode.DISABLED, **kwargs}
    return InstructionVectorEnv(num_envs, dataset=TinyDataset(), oracle=oracle or Share(ASCII), **kwargs)


def small_ppo(**changes: Any) -> PPOConfig:
    """Two updates of 8 of 16 responses a step, two epochs."""
    settings: dict[str, Any] = {"total_steps": 2, "rollout_batch_size": 16, "minibatch_size": 8, "learning_rate": 1e-3}
    return PPOConfig(**{**settings, **changes})


def load_policy(folder: Path, **kwargs: Any) -> LanguageModel:
    return LanguageModel.from_pretrained(folder, **{"max_response_tokens": 4, **kwargs})


def move(policy: LanguageModel, factor: float = 1.05) -> None:
    """Take the policy away from its reference."""
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.mul_(factor)


def assert_near(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], *, atol: float) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        told = partial("{}: {}".format, name)
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=atol, msg=told)


def start(job: Any, *args: Any, **environment: str) -> BaseProcess:
    """Start `job(*args)` in a fresh process, forked from a server that has the imports done."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tiny_worlds"])
    with patch.dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)):  # the server ignores sys.path until Python 3.13
        forkserver.ensure_running()
    process = context.Process(target=_run, args=(job, args, environment))
    process.start()
    return process


def _run(job: Any, args: tuple[Any, ...], environment: dict[str, str]) -> None:
    os.environ.update(environment)
    torch.set_num_threads(1)
    job(*args)


def start_world(job: Any, *args: Any, size: int) -> list[BaseProcess]:
    """Start one process a rank of a gloo world on this machine."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    world = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "CUDA_VISIBLE_DEVICES": ""}
    return [start(job, *args, RANK=str(rank), LOCAL_RANK=str(rank), **world) for rank in range(size)]


def finish(*worlds: Sequence[BaseProcess]) -> None:
    """Wait for all processes; none may have failed."""
    for process in (process for world in worlds for process in world):
        process.join(300)
        assert process.exitcode == 0


def train_ppo(policy_folder: Path, out: Path, total_steps: int) -> None:
    """A run that may be killed: it resumes what `out` holds."""
    config = small_ppo(total_steps=total_steps, save_every=2, keep_checkpoints=2, target_kl=0.01, warmup_steps=2)
    PPO(make_env(), load_policy(policy_folder), config=config, seed=3, out=out).learn()


def train_with_few_scores(policy_folder: Path, target: Path) -> None:
    """PPO and Quark where one process has no score, and PPO where none has; writes down what they say."""
    rank, said = int(os.environ["RANK"]), []
    ppo = small_ppo()
    quark = QuarkConfig(total_steps=2, rollout_batch_size=16, minibatch_size=1, learning_rate=1e-3, warmup_steps=0)
    for agent, config, num_scored in (
        (PPO, ppo, (1, 0)),
        (PPO, ppo, (0, 0)),
        (Quark, quark, (0, 5)),
        (Quark, replace(quark, best_quantile_only=False), (0, 5)),
    ):
        oracle = First(ASCII)
        oracle.num_scored = num_scored[rank]
        env: Any = make_env(8, oracle, on_unscored="truncate")
        try:
            said.append(repr(list(agent(env, load_policy(policy_folder), config=config).updates())))
        except UnscoredError as error:
            said.append(str(error))
    (target / str(rank)).write_text("\n".join(said))
