"""The methods that the ranking compares: a name, a title, what it needs, and how to make its agent.

A method of one's own is a `Method` in any importable module, named on the command line as `module:attribute`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

import gymnasium as gym
from gymnasium.vector import AutoresetMode, VectorEnv

from ... import agents, sandbox
from ...data import Dataset, load_dataset
from ...errors import DataError
from ...instructions import Demonstration, Instruction, Preference
from ...oracles.base import RewardOracle
from ...oracles.registry import make_oracle
from ...sandbox import writers
from ...sandbox.dataset import Sandbox
from ...seeding import keyed_rng
from ..harness.agent_options import naming, with_options

Feedback = Literal["simulated", "human"]
LABELS = {"simulated": "sim_ann", "human": "human"}
"""Whose labels a method learns from -> the judge of the sandbox: p_sim^ann (25 % flips), or one of 16 human raters."""
Config = TypeVar("Config")


class Actor(Protocol):
    """What a method makes. One that learns has `updates()` too, a generator of metrics; `num_steps` says how many."""

    def act(self, instructions: Sequence[str]) -> tuple[str, ...]:
        """A response to each instruction."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What a method makes its agent from, for one feedback and seed."""

    seed: int
    folder: Path
    """The cell's own, for `out=` of an agent; a second call resumes there."""
    feedback: Feedback = "simulated"
    quick: bool = False
    """Whether a small run of the same shape is wanted."""
    preset: Literal["sandbox", "paper"] = "sandbox"
    """Which of each config's presets is used."""
    dataset: str = "sandbox"
    sft: str = "sandbox"
    """Folder of the SFT policy that every method starts from; "sandbox" is the shipped one."""
    reward: str | None = None
    """Folder of the reward model trained on this feedback's labels, for methods that need one."""
    template: str | None = None
    """Name of the models' prompt template, in the place of what their folders say."""
    lora: int = 0
    """Rank of the LoRA adapters that are trained; 0 trains all weights."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the policy's weights."""
    max_prompt_tokens: int | None = None
    """Longest prompt trained on; None for AlpacaFarm's 192."""
    changed: tuple[tuple[str, float], ...] = ()
    """Fields of the agent's config that have other values than the preset's: (name, value)."""
    allow_overlap: bool = False
    """Whether an instruction of the data may stand in two splits."""

    @cached_property
    def data(self) -> Dataset:
        """The dataset."""
        return load_dataset(self.dataset, allow_overlap=self.allow_overlap)

    def config(self, preset: type[Config], **quick: Any) -> Config:
        """The preset of an agent's config; in a quick run with the fields of `quick`, always with those of `changed`.

        Raises:
            DataError: See `with_options`.
        """
        chosen: Any = getattr(preset, self.preset)()
        config: Config = with_options(replace(chosen, **quick) if self.quick else chosen, self.changed)
        return config

    def policy(self) -> agents.LanguageModel:
        """A fresh copy of the SFT policy."""
        import torch
        from peft import LoraConfig

        from ...agents.processes import default_device

        options: dict[str, Any] = {"max_response_tokens": 64 if self.preset == "sandbox" else 300}
        if self.max_prompt_tokens is not None:
            options["max_prompt_tokens"] = self.max_prompt_tokens
        if self.lora:  # rank 8 and alpha 64 are what AlpacaFarm's own LoRA runs had
            options["lora"] = LoraConfig(
                r=self.lora, lora_alpha=8 * self.lora, target_modules="all-linear", task_type="CAUSAL_LM"
            )
        folder, dtype = sandbox.POLICY if self.sft == "sandbox" else self.sft, getattr(torch, self.dtype)
        with naming(f"--max-prompt-tokens {self.max_prompt_tokens}, --preset {self.preset}"):
            return agents.LanguageModel.from_pretrained(
                folder, device=default_device(), dtype=dtype, template=self.template, **options
            )

    def preferences(self) -> tuple[Preference, ...]:
        """The pairs of SFT samples as this feedback labels them; the seed is the annotators' too."""
        if isinstance(self.data, Sandbox):
            found = self.data.preferences(judge=sandbox.judge(LABELS[self.feedback], seed=self.seed))
        elif self.feedback == "human":
            raise DataError(
                f"--feedback human: expected the sandbox, got {self.dataset}, whose pairs have the labels they have. "
                "Leave --feedback out."
            )
        else:
            found = self.data.preferences("preference")
        return found[:2000] if self.quick else found

    @property
    def reward_model(self) -> str:
        """Folder of the reward model.

        Raises:
            DataError: The job has none.
        """
        if self.reward is None:
            raise DataError("This method needs a reward model: expected a folder (train: --reward-model), got none.")
        return self.reward

    @property
    def _reward_spec(self) -> dict[str, str]:
        return {"reward_model": self.reward_model} | ({"template": self.template} if self.template else {})

    def oracle(self) -> RewardOracle:
        """The reward model as an oracle."""
        return make_oracle(self._reward_spec, dataset=self.data)

    def env(self, num_envs: int) -> VectorEnv[Any, Any, Any]:
        """AlpacaFarm-PPO-v0 with the reward model as its reward; `num_envs` of all processes together."""
        from ...agents.processes import Processes

        return gym.make_vec(
            "AlpacaFarm-PPO-v0",
            num_envs=num_envs // Processes().count,
            dataset=self.data,
            oracle=self._reward_spec,
            autoreset_mode=AutoresetMode.DISABLED,
        )


@dataclass(frozen=True)
class Method:
    """A method of the ranking."""

    name: str
    """As in table.csv and on the command line."""
    title: str
    """For readers."""
    make: Callable[[Job], Actor]
    """The agent, untrained; what `updates()` still has to do is done by the caller."""
    needs: Literal["nothing", "preferences", "reward"] = "reward"
    """What of a feedback it learns from. A method that needs nothing has one run for both feedbacks."""
    paper: tuple[float | None, float | None] = (None, None)
    """Win rate against Davinci003 in Table 2 of AlpacaFarm, %: trained on and judged by (simulated, human) feedback."""
    paper_note: str = ""
    """What of the paper's method this row stands for, where that is not the name."""
    trained: bool = True
    """Whether the ranking trains it (from the common SFT policy), and not only asks it."""
    effort: int = 60
    """Seconds it takes on one core, roughly: its weight in the progress report."""


# -------------------------------------------------------------------------------------------------- the paper's methods


def make_sft(job: Job) -> Actor:
    """The SFT policy as it is."""
    return agents.PolicyActor(job.policy(), seed=job.seed)


def make_sft_52k(job: Job) -> Actor:
    """SFT from scratch on the demonstrations of all training splits, for as many passes as fit about the same time."""
    if not isinstance(job.data, Sandbox):
        raise DataError(f"sft_52k: expected the sandbox, got {job.dataset}: its demonstrations are written on demand.")
    splits = ("sft", "preference") if job.quick else ("sft", "preference", "unlabeled", "val")
    demonstrations = [each for split in splits for each in job.data.demonstrations(split)]
    config = replace(agents.SFTConfig.sandbox(), epochs=1 if job.quick else 3)
    return agents.SFT(_untrained(job), demonstrations, config=config, seed=job.seed, out=job.folder)


def make_base(job: Job) -> Actor:
    """A language model that has read pages about the world, but no instruction; it continues the instruction's text."""
    from ...templates import PromptTemplate

    if not isinstance(job.data, Sandbox):
        raise DataError(f"base: expected the sandbox, got {job.dataset}: its pages are written on demand.")
    policy = _untrained(job)
    policy.template = PromptTemplate(with_input="{instruction}\n{input}\n", without_input="{instruction}\n")
    pages = [writers.page(keyed_rng(job.seed, "page", number)) for number in range(8000)]
    read = [Demonstration(Instruction(heading), text) for heading, text in pages]
    config = replace(agents.SFTConfig.sandbox(), epochs=2)
    return agents.SFT(policy, read, config=config, seed=job.seed, out=job.folder)


def _untrained(job: Job) -> agents.LanguageModel:
    """The SFT policy's architecture with new random weights."""
    import torch

    if job.lora:
        raise DataError(f"--lora: expected 0 for a method that trains from scratch, got {job.lora}.")
    policy = job.policy()
    with torch.random.fork_rng():  # transformers initialises from the global generator
        torch.manual_seed(job.seed)
        fresh = type(policy.model)(policy.model.config).to(policy.device)
    policy.model.load_state_dict(fresh.state_dict())
    return policy


@dataclass(frozen=True)
class StandIn:
    """A writer of the sandbox in the place of a model behind an API: it only acts."""

    name: str
    habits: writers.Writer
    seed: int

    def act(self, instructions: Sequence[str]) -> tuple[str, ...]:
        """What the writer answers, keyed on name, seed and instruction."""
        return tuple(writers.write(self.habits, str(x), keyed_rng(self.seed, self.name, str(x))) for x in instructions)


def make_stand_in(name: str, job: Job) -> Actor:
    """The stand-in for a model behind an API."""
    return StandIn(name, writers.API_MODELS[name], job.seed)


Labels = Callable[[Job], tuple[Preference, ...]]


def make_feedme(job: Job, labels: Labels = Job.preferences) -> Actor:
    """Binary FeedME, on the feedback's labels of the pairs or on others."""
    config = job.config(agents.BinaryFeedMEConfig, epochs=1, save_every=10)
    return agents.BinaryFeedME(job.policy(), labels(job), config=config, seed=job.seed, out=job.folder)


def make_reward_conditioning(job: Job, labels: Labels = Job.preferences) -> Actor:
    """Binary reward conditioning, on the feedback's labels of the pairs or on others."""
    if job.lora:
        raise DataError(
            f"--lora: expected 0 for reward_conditioning, got {job.lora}: control tokens need embeddings of their own."
        )
    config = job.config(agents.RewardConditioningConfig, epochs=1, save_every=10)
    return agents.BinaryRewardConditioning(job.policy(), labels(job), config=config, seed=job.seed, out=job.folder)


def make_dpo(job: Job) -> Actor:
    """DPO."""
    config = job.config(agents.DPOConfig, save_every=10)
    return agents.DPO(job.policy(), job.preferences(), config=config, seed=job.seed, out=job.folder)


def make_best_of_n(job: Job, **changes: Any) -> Actor:
    """Best-of-n with the preset's n, or with some settings changed, such as the 16 of the paper's analysis."""
    config = replace(job.config(agents.BestOfNConfig, num_samples=8), **changes)
    return agents.BestOfN(job.policy(), job.oracle(), config=config, seed=job.seed)


def make_expert_iteration(job: Job) -> Actor:
    """Expert iteration."""
    instructions = job.data.instructions("unlabeled")
    config = job.config(agents.ExpertIterationConfig, num_instructions=400)
    if config.num_instructions is not None:
        config = replace(config, num_instructions=min(config.num_instructions, len(instructions)))
    oracle = job.oracle()
    return agents.ExpertIteration(job.policy(), instructions, oracle, config=config, seed=job.seed, out=job.folder)


def make_quark(job: Job, **changes: Any) -> Actor:
    """Quark, perhaps with some settings changed."""
    config = replace(job.config(agents.QuarkConfig, total_steps=6), **changes)
    return agents.Quark(job.env(config.rollout_batch_size), job.policy(), config=config, seed=job.seed, out=job.folder)


def make_ppo(job: Job) -> Actor:
    """PPO."""
    config, reward = job.config(agents.PPOConfig, total_steps=6), job.reward_model
    env = job.env(config.rollout_batch_size)
    return agents.PPO(env, job.policy(), value_init=reward, config=config, seed=job.seed, out=job.folder)


def _stand_in(name: str, title: str, paper: tuple[float, float]) -> Method:
    make, note = partial(make_stand_in, name), f"{title} there"
    return Method(name, f"{title} stand-in", make, "nothing", paper, note, trained=False, effort=5)


PAGES = "LLaMA 7B there, pages about the world read here"
METHODS = (
    _stand_in("gpt4", "GPT-4", (79.0, 69.8)),
    _stand_in("chatgpt", "ChatGPT", (61.4, 52.9)),
    Method("ppo", "PPO", make_ppo, "reward", (46.8, 55.1), effort=130),
    Method("dpo", "DPO", make_dpo, "preferences", (46.8, None), effort=60),
    Method("best_of_n", "Best-of-n", make_best_of_n, "reward", (45.0, 50.7), "n = 1024 there", effort=80),
    Method("best_of_16", "Best-of-16", partial(make_best_of_n, num_samples=16), "reward", effort=30),
    Method("expert_iteration", "Expert iteration", make_expert_iteration, "reward", (41.9, 45.7), effort=120),
    Method("sft_52k", "SFT 52k", make_sft_52k, "nothing", (39.2, 40.7), "42k demonstrations here", False, effort=180),
    Method("sft", "SFT 10k", make_sft, "nothing", (36.7, 44.3), "", False, effort=5),
    Method("binary_feedme", "Binary FeedME", make_feedme, "preferences", (36.6, 37.9), effort=60),
    Method("quark", "Quark", make_quark, "reward", (35.6, None), effort=100),
    Method(
        "reward_conditioning", "Binary reward conditioning", make_reward_conditioning, "preferences", (32.4, None),
        effort=80,
    ),
    _stand_in("davinci001", "Davinci001", (24.4, 32.5)),
    Method("base", "Base model, no SFT", make_base, "nothing", (11.3, 6.5), PAGES, False, effort=30),
)  # fmt: skip
"""The rows of the paper's Table 2, best first, and best-of-16."""
