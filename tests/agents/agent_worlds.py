"""Every agent, small, by the name that tests call it; what tests share; jobs of worlds of processes."""

from __future__ import annotations

import json
import os
import runpy
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal
from unittest.mock import patch

import numpy as np
import torch
from accelerate.tracking import GeneralTracker
from numpy.typing import NDArray
from safetensors.torch import save_file
from tiny_worlds import ASCII, DEMONSTRATIONS, TEXTS, Broke, Paid, Share, TinyDataset, load_policy, make_env, small_ppo
from torch import Tensor

from alpacafarm_env.agents import (
    DPO,
    KTO,
    PPO,
    SFT,
    BestOfN,
    BestOfNConfig,
    BinaryFeedME,
    BinaryFeedMEConfig,
    BinaryRewardConditioning,
    DPOConfig,
    DrGRPOConfig,
    GroupPolicy,
    KTOConfig,
    OnlineDPO,
    OnlineDPOConfig,
    Quark,
    QuarkConfig,
    RewardConditioningConfig,
    RewardModeling,
    RewardModelingConfig,
    SFTConfig,
)
from alpacafarm_env.agents.collecting import places
from alpacafarm_env.agents.evaluation import sequence_kl
from alpacafarm_env.agents.expert_iteration import ExpertIteration, ExpertIterationConfig
from alpacafarm_env.agents.language_model import LanguageModel
from alpacafarm_env.agents.loop import Loop, Resume
from alpacafarm_env.agents.quark import DataPool, quark_sums
from alpacafarm_env.agents.rollouts import Rollouts, micro_batches
from alpacafarm_env.errors import AlpacaFarmError
from alpacafarm_env.instructions import Instruction
from alpacafarm_env.wrappers.vector import AddScore

INSTRUCTIONS = tuple(Instruction(text, id=10 + i) for i, text in enumerate(TEXTS))


class Counting(Share):
    """Counts the instructions it is shown: each is scored when it is sampled, and then only."""

    def __init__(self) -> None:
        super().__init__(ASCII)
        self.asked: list[str] = []

    def score(self, instructions: Sequence[str], responses: Sequence[str]) -> NDArray[np.float64]:
        self.asked += dict.fromkeys(instructions)
        return super().score(instructions, responses)


class Silent(Share):
    """Gives no verdict on anything said to one instruction, or to all."""

    def __init__(self, *about: str) -> None:
        super().__init__(ASCII)
        self.about = about or TEXTS

    def score(self, instructions: Sequence[str], responses: Sequence[str]) -> NDArray[np.float64]:
        silent = np.array([instruction in self.about for instruction in instructions])
        return np.where(silent, np.nan, super().score(instructions, responses))


def small_expert(**changes: Any) -> ExpertIterationConfig:
    """Two rounds of three chunks and four updates."""
    sft = SFTConfig(epochs=2, batch_size=3, learning_rate=3e-3, save_every=2)
    settings: dict[str, Any] = {"num_samples": 4, "num_rounds": 2, "instructions_per_step": 2, "sft": sft}
    return ExpertIterationConfig(**{**settings, **changes})


def make_expert_iteration(policy: LanguageModel | Path, out: Path | None = None, **changes: Any) -> ExpertIteration:
    if isinstance(policy, Path):
        policy = load_policy(policy)
    settings = {"instructions": INSTRUCTIONS, "oracle": Share(ASCII), "config": small_expert(), "seed": 3, **changes}
    return ExpertIteration(policy, settings.pop("instructions"), settings.pop("oracle"), out=out, **settings)


def read(out: Path, number: int = 1) -> list[dict[str, Any]]:
    """All best responses of a round, in order."""
    files = sorted((out / f"round-{number}").glob("chunk-*.json"))
    return [best for file in files for best in json.loads(file.read_text())["best"]]


def files(out: Path) -> dict[str, bytes]:
    """Everything a run leaves that sampling and training decide."""
    kinds = (".safetensors", ".jsonl", ".gz")
    kept = [path for path in out.rglob("*") if path.suffix in kinds and path.name != "timing.jsonl"]
    return {str(path.relative_to(out)): path.read_bytes() for path in kept}


def small_quark(**changes: Any) -> QuarkConfig:
    """16 responses a step, the best 4 in updates of 2, two epochs."""
    settings: dict[str, Any] = {"total_steps": 2, "rollout_batch_size": 16, "minibatch_size": 2, "learning_rate": 1e-3}
    return QuarkConfig(**{"warmup_steps": 0, **settings, **changes})


def small_group(**changes: Any) -> DrGRPOConfig:
    """Groups of four; the loss's denominator is a number of rows."""
    settings: dict[str, Any] = {"total_steps": 2, "rollout_batch_size": 16, "minibatch_size": 8, "learning_rate": 1e-3}
    return DrGRPOConfig(**{**settings, "num_epochs": 2, "num_generations": 4, "kl_coef": 0.05, **changes})


def small_online_dpo(**changes: Any) -> OnlineDPOConfig:
    """Eight pairs a step, two epochs of two updates; sampled at another temperature than the loss's."""
    settings: dict[str, Any] = {"total_steps": 2, "rollout_batch_size": 16, "minibatch_size": 8, "learning_rate": 1e-3}
    return OnlineDPOConfig(**{**settings, "num_epochs": 2, "warmup_steps": 0, **changes})


def prepared(policy: LanguageModel, **changes: Any) -> tuple[Quark, Rollouts, Tensor, DataPool, dict[str, float]]:
    """An agent before its first update, what it sampled, and its pool."""
    agent = Quark(make_env(16), policy, config=small_quark(**changes))
    rollouts, scores, numbers, collected = agent._collector.collect(agent._loop, 1)
    pool, metrics = agent._prepare(1, rollouts, scores, numbers)
    return agent, rollouts, scores, pool, {**collected, **metrics}


def gradients(
    agent: Quark, pool: DataPool, *, micro_batch_tokens: int = 4096
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Of the mean loss over the trained rows, and the means."""
    rows = places(pool.numbers, pool.trained)
    means = agent._loop.accumulate(
        [rows[part] for part in micro_batches(pool.read.total_lengths[rows], micro_batch_tokens)],
        lambda part: quark_sums(agent.policy, pool, part, agent.config),
        count=int(pool.read.lengths[rows].sum()),
    )
    found = {name: p.grad.clone() for name, p in agent._loop.parameters.items() if p.grad is not None}
    agent._loop._optimizer.zero_grad()
    return found, means


PREFERENCES = TinyDataset().preferences()
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "reinforce.py"


def _small(agent: Any, config: Any, data: Any, policy: Path, out: Path | None = None, *, seed: int = 0, **changes: Any):
    """Six steps, or of twice the data more."""
    settings = config(epochs=2, batch_size=2, learning_rate=1e-3, save_every=2, **changes)
    return agent(load_policy(policy, max_response_tokens=16), data, config=settings, seed=seed, out=out)


def _online(agent: Any, config: Any, policy: Path, out: Path | None = None, *, seed: int = 0, **changes: Any) -> Any:
    """Four steps; each process has its share of 16 environments."""
    env = make_env(16 // int(os.environ.get("WORLD_SIZE", "1")))
    settings = config(total_steps=4, save_every=2, **changes)
    return agent(env, load_policy(policy), config=settings, seed=seed, out=out)


def _by_path(agent: Any, config: Any, policy: Path, out: Path | None = None, *, seed: int = 0) -> Any:
    """Three steps of two minibatches, small enough that rounding stays rounding; policy by path, paid oracle."""
    env = make_env(16 // int(os.environ.get("WORLD_SIZE", "1")), Paid(ASCII))
    settings = config(total_steps=3, learning_rate=2e-4, max_response_tokens=4)
    return agent(env, str(policy), config=settings, seed=seed, out=out)


def make_wide(name: str, folder: Path, lora: Any = None, **changes: Any) -> Any:
    """An agent whose batches hold all examples."""
    settings: dict[str, Any] = {"learning_rate": 1e-2, "batch_size": 8, "epochs": 3, **changes}
    if name == "reward":
        return RewardModeling(folder, PREFERENCES, config=RewardModelingConfig(**settings), lora=lora)
    policy = load_policy(folder, max_response_tokens=40, lora=lora)
    if name == "ppo":
        return PPO(make_env(8), policy, config=small_ppo(learning_rate=1e-2, **changes))
    if name == "dpo":
        return DPO(policy, PREFERENCES, config=DPOConfig(**settings))
    return SFT(policy, DEMONSTRATIONS, config=SFTConfig(**settings))


def _reward_modeling(policy: Path, out: Path | None = None, *, seed: int = 0, **changes: Any) -> RewardModeling:
    config = RewardModelingConfig(epochs=2, batch_size=2, learning_rate=1e-3, save_every=2, **changes)
    return RewardModeling(policy, PREFERENCES, config=config, seed=seed, out=out)


def _best_of_n(policy: Path, *, seed: int = 0) -> BestOfN:
    config = BestOfNConfig(num_samples=4)
    return BestOfN(load_policy(policy), Share(ASCII), config=config, seed=seed)


def _reinforce(policy: Path, *, seed: int = 0) -> Any:
    """The example of an agent of one's own."""
    made = runpy.run_path(str(EXAMPLE))["Reinforce"]
    return made(make_env(), load_policy(policy), seed=seed, num_steps=4)


Make = Callable[..., Any]
RUNS: dict[str, Make] = {
    "sft": partial(_small, SFT, SFTConfig, DEMONSTRATIONS),
    "dpo": partial(_small, DPO, DPOConfig, PREFERENCES),
    "kto": partial(_small, KTO, KTOConfig, PREFERENCES),
    "binary_feedme": partial(_small, BinaryFeedME, BinaryFeedMEConfig, PREFERENCES),
    "reward_conditioning": partial(_small, BinaryRewardConditioning, RewardConditioningConfig, PREFERENCES),
    "ppo": partial(_online, PPO, small_ppo),
    "quark": partial(_online, Quark, small_quark),
    "grpo": partial(_online, GroupPolicy, small_group),
    "online_dpo": partial(_online, OnlineDPO, small_online_dpo),
    "quark_of_all_quantiles": partial(_online, Quark, partial(small_quark, best_quantile_only=False, minibatch_size=8)),
    "expert_iteration": partial(make_expert_iteration, oracle=Paid(ASCII)),
}
"""Those with checkpoints."""
ACTORS: dict[str, Make] = {**RUNS, "best_of_n": _best_of_n, "reinforce": _reinforce}
RUNS["reward_modeling"] = _reward_modeling
EXACT: dict[str, Make] = {
    "ppo_by_path": partial(_by_path, PPO, small_ppo),
    "quark_by_path": partial(_by_path, Quark, small_quark),
    "grpo_by_path": partial(_by_path, GroupPolicy, small_group),
    "online_dpo_by_path": partial(_by_path, OnlineDPO, small_online_dpo),
    "group_in_shards": partial(_by_path, GroupPolicy, partial(small_group, sharding="full", micro_batch_tokens=64)),
    "ppo_in_shards": partial(_by_path, PPO, partial(small_ppo, sharding="full", micro_batch_tokens=64)),
}
"""Runs that two processes do as one does, to six digits after the point."""


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
