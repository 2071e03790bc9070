"""Jobs of worlds of processes, in a module that these can import."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal
from unittest.mock import patch

import numpy as np
import torch
from accelerate.tracking import GeneralTracker
from agent_worlds import EXACT, RUNS, small_quark
from numpy.typing import NDArray
from safetensors.torch import save_file
from tiny_worlds import ASCII, DEMONSTRATIONS, TEXTS, Broke, Share, TinyDataset, load_policy, make_env, small_ppo

from alpacafarm_env.agents import DPO, PPO, SFT, ExpertIteration, Quark, SFTConfig
from alpacafarm_env.agents.evaluation import sequence_kl
from alpacafarm_env.agents.language_model import LanguageModel
from alpacafarm_env.agents.loop import Loop, Resume
from alpacafarm_env.errors import AlpacaFarmError
from alpacafarm_env.wrappers.vector import AddScore


def train_and_disagree(policy: Path, out: Path) -> None:
    """Every agent that has runs, then runs that cannot begin."""
    for name, make in {**RUNS, **EXACT}.items():
        make(policy, out / name, seed=2).learn()
    rank = int(os.environ["RANK"])
    tracker = Recorder(file=out / f"tracked-{rank}")
    stopped = RUNS["sft"](policy).learn(callback=lambda each: rank == 0 or each["step"] < 2, trackers=[tracker])
    (out / f"stopped-{rank}").write_text(str(stopped["step"]))
    disagree(str(policy), out)


def disagree(policy: str, out: Path) -> None:
    """Runs that the two processes would begin differently; each writes down what it was told."""
    rank = int(os.environ["RANK"])

    def begin(name: str, *, learning_rate: float = 1e-3, resume: Resume = "auto") -> SFT:
        config = SFTConfig(learning_rate=learning_rate, batch_size=5, epochs=1)
        return SFT(policy, DEMONSTRATIONS, config=config, out=out / name, resume=resume)

    def blind() -> SFT:
        """One process does not see the other's disk."""
        newest = Loop._newest
        with patch.object(Loop, "_newest", staticmethod(lambda *given: None if rank else newest(*given))):
            return begin("kept")

    begin("kept").learn()
    data, ppo = TinyDataset(), small_ppo(max_response_tokens=4)
    attempts: dict[str, Callable[[], object]] = {
        "learning_rate": lambda: begin("settings", learning_rate=(1e-3, 2e-3)[rank]),
        "out": lambda: begin(f"folder-{rank}"),
        "newest checkpoint": blind,
        "resume='never'": lambda: begin("kept", resume=("auto", "never")[rank]),
        "num_envs": lambda: PPO(make_env((8, 4)[rank]), policy, config=ppo),
        "wrappers": lambda: PPO(
            (make_env(8), AddScore(make_env(8), key="share", oracle=Share(ASCII)))[rank], policy, config=ppo
        ),
        "responses": lambda: DPO(policy, data.preferences()[rank:]),
        "demonstrations": lambda: SFT(policy, DEMONSTRATIONS[rank:]),
        "instructions_sha256": lambda: ExpertIteration(policy, TEXTS[rank:], Share(ASCII)),
        "out of money": lambda: PPO(make_env(8, Broke(ASCII)), policy, config=ppo).learn(),
        "of money": lambda: ExpertIteration(policy, TEXTS[:1], Broke(ASCII)).learn(),
    }
    for name, attempt in attempts.items():
        try:
            attempt()
        except AlpacaFarmError as error:
            with (out / f"told-{rank}").open("a") as file:
                file.write(f"{name} -> {error}\n")
    begin("kept")  # they are still together


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


class Recorder(GeneralTracker):
    name = "recorder"
    requires_logging_directory = False
    main_process_only = False
    made: ClassVar[list[Recorder]] = []
    """Those made by name."""

    def __init__(self, project: str = "", *, file: Path | None = None) -> None:
        super().__init__()
        self.project, self.file, self.started, self.finished = project, file, 0, 0
        self.settings: dict[str, Any] = {}
        self.steps: dict[int | None, dict[str, float]] = {}
        if project:
            self.made.append(self)

    @property
    def tracker(self) -> None:
        """It has no library behind it."""

    def start(self) -> None:
        self.started += 1

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.settings |= values

    def log(self, values: dict[str, Any], step: int | None) -> None:
        self.steps[step] = values
        if self.file is not None:
            self.file.write_text(str(list(self.steps)))

    def finish(self) -> None:
        self.finished += 1
