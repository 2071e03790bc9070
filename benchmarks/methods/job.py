"""A job, from which a method makes its agent, and the options that choose it on a command line."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self, TypeVar

import gymnasium as gym
import tyro
from gymnasium.vector import AutoresetMode, VectorEnv

from ... import agents, sandbox
from ...bases import base_of, is_adapter
from ...cli.options import Count, Options, Positive
from ...data import Dataset
from ...data.load import training_dataset
from ...errors import DataError
from ...instructions import Demonstration, Preference
from ...oracles import make_oracle
from ...oracles.base import RewardOracle
from ...sandbox.dataset import Sandbox
from .presets import OPTIONS, PRESETS, Dtype, PresetName, choose_preset, naming, with_defaults, with_options

Labellers = Literal["ann", "human"]
"""Whose labels a method learns from, as options call them: p_sim^ann (25 % flips), or 16 human raters, one a label."""
Feedback = Literal["simulated", "human"]
FEEDBACK_OF: Final[Mapping[Labellers, Feedback]] = {"ann": "simulated", "human": "human"}
"""The same, as tables call it."""
LABELS = {"simulated": "sim_ann", "human": "human"}
"""Whose labels a method learns from -> the judge of the sandbox: p_sim^ann (25 % flips), or one of 16 human raters."""
FEEDBACKS = tuple(LABELS)
"""Also the two columns of the paper's Table 2."""
Config = TypeVar("Config")
Example = TypeVar("Example", Demonstration, Preference)
ONE_BATCH = 160
"""Examples of a dry run: more than any preset has in a batch, with those that are held out."""


@dataclass(frozen=True, kw_only=True)
class ModelOptions(Options):
    """Options that `train` and `win_rate_curve` share."""

    data: Annotated[str, tyro.conf.arg(name="dataset", aliases=["--data"])] = "sandbox"
    """Your own data (folder, file or hub name); --policy is then needed too, and --reward-model where a reward is
    learned from."""
    policy: str = "sandbox"
    """Your own SFT model (folder or hub name) to start from."""
    reward_model: str = "sandbox"
    """Your own reward model (sequence-classification folder) to train on."""
    template: Literal["alpaca"] | None = None
    """The prompt that your own --policy and --reward-model were trained on, instead of what their folders say. Needed
    where they have neither a prompt_template.json nor a tokenizer with a chat_template."""
    judge: str | None = None
    """Who gives a win rate against the references of the data: an oracle's name, or its keywords as JSON, such as
    '{"pool": "eval", "base_url": "http://localhost:8000/v1", "budget_usd": 5}', or '{"reward_model": "folder"}' of a
    held-out reward model."""
    preset: PresetName | None = None
    """Settings for the sandbox's small policy; AlpacaFarm's for LLaMA 7B, as they are (paper), by LoRA on one GPU of 80
    GB, or of all weights on eight; by LoRA for a chat model of up to 3 B parameters on a GPU of 24 GB (small_chat), or
    on a CPU. Default: by the number of --policy's parameters and the device at hand; the choice is printed."""
    max_response_tokens: Count | None = None
    """Longest response, in tokens: sampled ones end there, and those of the data are cut, counted in a warning.
    Default: the preset's, 64 of sandbox and 300 of all others."""
    allow_overlap: bool = False
    """Accept data in which an instruction is in two splits, or twice in one."""
    learning_rate: Positive | None = None
    """The highest learning rate. Its default, and those of the batch sizes below, are the preset's."""
    rollout_batch_size: Count | None = None
    """Responses sampled for each step of methods that sample as they learn."""
    minibatch_size: Count | None = None
    """Responses of each of their updates."""
    micro_batch_tokens: Count | None = None
    """Tokens that go through a model at once, limited by memory; no result depends on it."""
    sampling_batch: Count | None = None
    """Responses that these sample at once, limited by memory; no result depends on it."""
    precision: Literal["auto", "float32", "bfloat16"] | None = None
    """What matrices are multiplied in; weights and losses stay float32. Default: auto, which is bfloat16 where that is
    measured to be faster, and float32 for small models, or by the presets sandbox and paper."""
    gradient_checkpointing: bool | None = None
    """Activations are computed again in the backward pass instead of being kept."""
    sharding: Literal["none", "full"] | None = None
    """Sharing of all weights among the processes of torchrun: each holds all of them, or its share."""
    value: Literal["adapter", "model"] | None = None
    """PPO's value: an adapter of its own on the policy's trunk, or a model of its own."""

    @property
    def changed(self) -> tuple[tuple[str, Any], ...]:
        """Fields of the agent's config that are given, with their values."""
        given = {field: getattr(self, name, None) for name, field in OPTIONS.items()}
        return tuple((field, value) for field, value in given.items() if value is not None)

    def settled(self) -> Self:
        """With the preset that is chosen where none is given; the main process says which and why."""
        from ...agents.processes import Processes

        if self.preset is not None:
            return self
        name, why = choose_preset(self.policy)
        if self.policy != "sandbox" and Processes().is_main:
            print(f"Preset {name} ({why}); --preset paper gives AlpacaFarm's settings.", file=sys.stderr)
        return replace(self, preset=name)


def lora_settings(rank: int) -> dict[str, Any]:
    """Adapters of all linear layers; rank 8 and alpha 64 are those of AlpacaFarm's own LoRA runs."""
    return {"r": rank, "lora_alpha": 8 * rank, "target_modules": "all-linear"}


@dataclass(frozen=True, kw_only=True)
class Job:
    """All that a method makes its agent from, for one feedback and seed."""

    seed: int
    folder: Path
    """The cell's own, for an agent's `out=`; a second call resumes there."""
    feedback: Feedback = "simulated"
    quick: bool = False
    """Whether a small run of the same shape is wanted."""
    preset: PresetName = "sandbox"
    """Which of `PRESETS` says what is not given here."""
    dataset: str = "sandbox"
    sft: str = "sandbox"
    """Folder of the SFT policy to start from; "sandbox" is the shipped one."""
    reward: str | None = None
    """Folder of the reward model trained on this feedback's labels; "sandbox" is the shipped one."""
    template: str | None = None
    """Name of the prompt template of one's own models, instead of what their folders say."""
    lora: int | None = None
    """Rank of the LoRA adapters to add and train; 0 trains all weights, or the policy's own adapters if it has some."""
    dtype: Dtype | None = None
    """Type of the policy's weights."""
    reward_dtype: Dtype | None = None
    """Type of the reward model's, where it only scores."""
    max_prompt_tokens: int | None = None
    """Longest prompt to train on; None for AlpacaFarm's 192."""
    max_response_tokens: int | None = None
    """Longest response; None for the preset's."""
    changed: tuple[tuple[str, Any], ...] = ()
    """(name, value) of the fields of the agent's config that differ from the preset."""
    allow_overlap: bool = False
    max_pairs: int | None = None
    """Most pairs and demonstrations to learn from; None: all, or in a quick run 2,000."""
    one_batch: bool = False
    """Whether a batch of examples is enough: some of all lengths, the longest among them."""

    def __post_init__(self) -> None:
        named = PRESETS[self.preset]
        default = {
            "lora": 0 if is_adapter(self.sft) else named.lora,
            "dtype": named.dtype,
            "reward_dtype": named.reward_dtype,
            "max_response_tokens": named.max_response_tokens,
        }
        for name, value in default.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)

    @property
    def trains_adapter(self) -> bool:
        """Whether adapters are what trains."""
        return bool(self.lora) or is_adapter(self.sft)

    @cached_property
    def data(self) -> Dataset:
        """The dataset."""
        return training_dataset(self.dataset, allow_overlap=self.allow_overlap)

    def config(self, preset: type[Config], **quick: Any) -> Config:
        """The preset of an agent's config, with the fields of `changed`, and in a quick run those of `quick`."""
        named = PRESETS[self.preset]
        fields = dict(named.fields)
        if ("value", "adapter") in self.changed and not self.trains_adapter:
            raise DataError("--value adapter: expected a policy with LoRA, got none. Give --lora 8, or --value model.")
        if fields.get("value") == "adapter" and not self.trains_adapter:
            del fields["value"]  # there is no adapter that it could stand beside
        if not self.has_presets_limit:
            fields["max_response_tokens"] = self.max_response_tokens
        chosen: Any = with_defaults(getattr(preset, named.config)(), fields)
        config: Config = with_options(replace(chosen, **quick) if self.quick else chosen, self.changed)
        return config

    @property
    def policy_folder(self) -> Path | str:
        """Folder or hub name of the SFT policy."""
        return sandbox.POLICY if self.sft == "sandbox" else self.sft

    @property
    def has_presets_limit(self) -> bool:
        """Whether the longest response is the preset's."""
        return self.max_response_tokens == PRESETS[self.preset].max_response_tokens

    def policy(self, **limits: int) -> agents.LanguageModel:
        """A fresh copy of the SFT policy; `limits` replace its longest prompt or response."""
        import torch

        from ...agents.processes import default_device

        options: dict[str, Any] = {"max_response_tokens": self.max_response_tokens, **limits}
        if self.max_prompt_tokens is not None:
            options.setdefault("max_prompt_tokens", self.max_prompt_tokens)
        if self.sft != "sandbox":
            options["template"] = self.template
        if self.lora:
            options |= {"lora": self.adapter("CAUSAL_LM"), "seed": self.seed}
        options |= {"device": default_device(), "dtype": getattr(torch, self.dtype or "float32")}
        # The options that decide the limits, for the error of a model without room for them.
        own = "" if self.max_prompt_tokens is None else f"--max-prompt-tokens {self.max_prompt_tokens}, "
        preset = f" (of --preset {self.preset})" if self.has_presets_limit else ""
        with naming(f"{own}--max-response-tokens {self.max_response_tokens}{preset}"):
            return agents.LanguageModel.from_pretrained(self.policy_folder, **options)

    def adapter(self, task: Literal["CAUSAL_LM", "SEQ_CLS"]) -> Any:
        """Peft's settings of the adapters to train; None where all weights are."""
        from peft import LoraConfig

        return LoraConfig(**lora_settings(self.lora), task_type=task) if self.lora else None

    def preferences(self) -> tuple[Preference, ...]:
        """The pairs of SFT samples as this feedback labels them; the seed is also the annotators'."""
        if isinstance(self.data, Sandbox):
            pairs = self.data.preferences(judge=sandbox.judge(LABELS[self.feedback], seed=self.seed))
        elif self.feedback == "human":
            raise DataError(
                f"--feedback human: expected the sandbox, got {self.dataset}, whose pairs have labels of their own. "
                "Leave --feedback out."
            )
        else:
            pairs = self.data.preferences("preference")
        return self._wanted(pairs, lambda pair: len(pair.instruction) + max(map(len, pair.responses)))

    def demonstrations(self) -> tuple[Demonstration, ...]:
        """Those of split sft."""
        return self._wanted(self.data.demonstrations("sft"), lambda each: len(each.instruction) + len(each.response))

    def _wanted(self, examples: tuple[Example, ...], length: Callable[[Example], int]) -> tuple[Example, ...]:
        examples = examples[: self.max_pairs or (2000 if self.quick else None)]
        if not self.one_batch or len(examples) <= ONE_BATCH:
            return examples
        order = sorted(examples, key=length)
        return tuple(order[(number * (len(order) - 1)) // (ONE_BATCH - 1)] for number in range(ONE_BATCH))

    @property
    def reward_model(self) -> str:
        """Folder of the reward model; a DataError if there is none."""
        if self.reward is None:
            raise DataError("This method needs a reward model: expected a folder (train: --reward-model), got none.")
        return str(sandbox.REWARD_MODEL) if self.reward == "sandbox" else self.reward

    @property
    def value_start(self) -> Path | str | None:
        """Folder of the reward model that PPO's value model starts from; None: from the policy."""
        return self.reward_model

    @property
    def reward_spec(self) -> str | dict[str, str]:
        """The reward model as an oracle is specified."""
        if self.reward == "sandbox" and self.reward_dtype is None:
            return "surrogate"
        more = {"template": self.template if self.reward != "sandbox" else None, "dtype": self.reward_dtype}
        return {"reward_model": self.reward_model} | {name: value for name, value in more.items() if value}

    @property
    def reward_shares_base(self) -> bool:
        """Whether the reward model is an adapter over the base of the adapter that trains, so that one base will do."""
        if not self.trains_adapter or not is_adapter(self.reward_model) or self.reward_dtype not in (None, self.dtype):
            return False
        if {**PRESETS[self.preset].fields, **dict(self.changed)}.get("sharding", "none") != "none":
            return False
        from ...agents.adapters import is_over

        return is_over(self.reward_model, str(base_of(self.policy_folder)))

    def oracle(self, policy: agents.LanguageModel | None = None) -> RewardOracle:
        """The reward model as an oracle; an adapter over the base of `policy` reads with the policy's own weights."""
        if policy is not None and self.reward_shares_base:
            return policy.reward_oracle(self.reward_model, template=self.template)
        return make_oracle(self.reward_spec, dataset=self.data)

    def env(self, num_envs: int, policy: agents.LanguageModel | None = None) -> VectorEnv[Any, Any, Any]:
        """AlpacaFarm-PPO-v0 with `oracle(policy)`'s reward and `num_envs` environments over all processes."""
        from ...agents.processes import Processes

        return gym.make_vec(
            "AlpacaFarm-PPO-v0",
            num_envs=num_envs // Processes().count,
            dataset=self.data,
            oracle=self.oracle(policy),
            autoreset_mode=AutoresetMode.DISABLED,
        )
