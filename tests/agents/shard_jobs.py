"""What processes do in the tests of sharding."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from agent_worlds import small_quark
from numpy.typing import NDArray
from safetensors.torch import save_file
from tiny_worlds import ASCII, DEMONSTRATIONS, TEXTS, Share, load_policy, make_env, small_ppo

from alpacafarm_env.agents import PPO, SFT, Quark, SFTConfig
from alpacafarm_env.agents.evaluation import sequence_kl
from alpacafarm_env.agents.language_model import LanguageModel

SMALL: dict[str, Any] = {"total_steps": 3, "learning_rate": 2e-4, "max_response_tokens": 4, "sharding": "full"}


class FirstHalf(Share):
    """Scores the first eight of sixteen responses: of two processes those of the first."""

    def score(self, instructions: Sequence[str], responses: Sequence[str]) -> NDArray[np.float64]:
        first = int(os.environ.get("RANK", "0")) * len(responses)
        scored = first + np.arange(len(responses)) < 8
        return np.where(scored, super().score(instructions, responses), np.nan)


def _env(oracle: Share | None = None, *, rows: int = 16, **options: Any) -> Any:
    """Of all processes together, so many rows."""
    return make_env(rows // int(os.environ.get("WORLD_SIZE", "1")), oracle, **options)


def _tied(policy: Path, out: Path) -> Quark:
    """One table of embeddings, which control tokens enlarge."""
    model = load_policy(policy)
    config = type(model.model.config)(**{**model.model.config.to_dict(), "tie_word_embeddings": True})
    torch.manual_seed(5)
    tied = LanguageModel(type(model.model)(config), model.tokenizer, model.template, max_response_tokens=4)
    settings = small_quark(best_quantile_only=False, minibatch_size=8, **SMALL)
    return Quark(_env(), tied, config=settings, seed=2, out=out)


def _ppo(policy: Path, out: Path, oracle: Share | None = None, **changes: Any) -> PPO:
    config = small_ppo(**SMALL, **changes)
    return PPO(_env(oracle, on_unscored="truncate"), str(policy), config=config, seed=2, out=out)


VARIANTS = {
    "tied": _tied,
    "head": partial(_ppo, value="head", micro_batch_tokens=64),
    "few": partial(_ppo, oracle=FirstHalf(ASCII), minibatch_size=4),
    "checkpointed": partial(_ppo, gradient_checkpointing=True),
}


def train_variants(policy: Path, out: Path) -> None:
    """Each of `VARIANTS`."""
    for name, make in VARIANTS.items():
        make(policy, out / name).learn()


def evaluate(policy: Path, out: Path) -> None:
    """The divergence of each process's responses, in as many passes as it needs: more of the first process."""
    rank, count = (int(os.environ.get(name, default)) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1")))
    agent = _ppo(policy, out / "run")
    agent.learn()
    uniforms = torch.rand(len(TEXTS), 4, generator=torch.Generator().manual_seed(0))
    rollouts = agent.policy.generate(TEXTS[rank::count], generator=uniforms[rank::count], max_new_tokens=4)
    with agent.whole():
        found = sequence_kl(agent.policy, rollouts, 1.0, max_tokens=None if rank else 1)
    save_file({"kl": found}, out / f"{rank}.safetensors")


def train_until(policy: Path, out: Path, step: int, sharding: Literal["none", "full"]) -> None:
    """PPO of four steps, begun or continued, up to one of them."""
    config = small_ppo(
        total_steps=4,
        rollout_batch_size=12,
        minibatch_size=6,
        learning_rate=2e-4,
        max_response_tokens=4,
        save_every=1,
        sharding=sharding,
    )
    for metrics in PPO(_env(rows=12), str(policy), config=config, seed=2, out=out).updates():
        if metrics["step"] == step:
            break


def train_bfloat16(policy: Path, out: Path) -> None:
    """Updates that bfloat16 cannot hold."""
    model = load_policy(policy, dtype=torch.bfloat16, max_response_tokens=16)
    config = SFTConfig(epochs=12, batch_size=5, learning_rate=1e-6, save_every=1, keep_checkpoints=20, sharding="full")
    SFT(model, DEMONSTRATIONS, config=config, out=out).learn()


def newest(out: Path) -> Path:
    """The last checkpoint."""
    return max(out.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
