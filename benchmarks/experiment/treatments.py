"""Reward treatments of the over-optimization study: whose labels, how noisy, how many, and how they make one reward."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Any, Final, Literal, cast

import gymnasium as gym
import numpy as np
import pydantic
from gymnasium.vector import AutoresetMode, VectorEnv
from numpy.typing import NDArray
from pydantic import Field

from ... import sandbox
from ...arguments import match_name
from ...cli.options import Count
from ...errors import UnknownNameError
from ...folders import hash_model
from ...instructions import Instruction, Preference
from ...oracles import BaselineSubtracted, Ensemble, RewardModel
from ...oracles.base import NoDeepCopy, PreferenceOracle, RewardOracle, Verdicts, checked
from ...oracles.ensemble import DISAGREEMENT
from ...oracles.judges import Flip
from ...plugins import find_attribute
from ...sandbox.dataset import Sandbox, label
from .reward_models import sft_policy

Env = VectorEnv[Any, Any, Any]
SLOTS = 256  # responses that a wrapped environment scores at a time
LEVEL_SAMPLES: Final = 4
"""SFT's answers whose mean score an ensemble's members subtract: they differ most in their level on an instruction,
which no label decides."""
UWO_WEIGHT: Final = 0.5
"""UWO's weight of the variance. Coste et al. 2023 (arXiv 2310.02743) take 0.5 for best-of-n and 0.1 for PPO, in units
of their own; here both methods have one reward."""


@dataclass(frozen=True)
class Labels:
    """The labels that reward models learn from; treatments of equal ones share models. Fields as in `Treatment`."""

    judge: str
    flip: float
    num_labels: int
    layers: int | None = None

    @property
    def name(self) -> str:
        """For cells, folders and tables: "sim_eval, flip 0.25, 2000 labels"."""
        layers = "" if self.layers is None else f", layers {self.layers}"
        flip = np.format_float_positional(self.flip, trim="-")
        return f"{self.judge}, flip {flip}, {self.num_labels} labels{layers}"

    def pairs(self, seed: int) -> tuple[Preference, ...]:
        """The pairs of SFT samples as the judge labels them, less the ties; the seed is the annotators' too."""
        data = cast(Sandbox, sandbox.SANDBOX)
        return label(
            data.instructions("preference")[: self.num_labels], data.pairs()[: self.num_labels], self.annotator(seed)
        )

    def annotator(self, seed: int) -> PreferenceOracle:
        """The judge with its noise: the pairs that get a coin at 17.5 % are among those that get one at 25 %."""
        judge = sandbox.judge(self.judge, seed)
        return Flip(judge, self.flip, seed=seed) if self.flip else judge


@pydantic.dataclasses.dataclass(frozen=True)
class Treatment:
    """A reward to train on and to choose by; everything else of the study is held fixed."""

    name: Annotated[str, Field(pattern="^[^:,/]+$")]
    """As in table.csv and on the command line."""
    title: str
    """For readers."""
    judge: str = "sim_eval"
    """Who labels the pairs: a judge of the sandbox."""
    flip: Annotated[float, Field(ge=0, le=0.5)] = 0.0
    """Share of the labels that is flipped."""
    num_labels: Count = 2_000
    """Pairs that are labelled, of the sandbox's 10,000; ties are left out."""
    members: Annotated[int, Field(ge=0)] = 1
    """Reward models. They share the labels and differ in the start of the head and the order of the pairs. 0, with
    an `oracle`: none is trained."""
    combine: Literal["mean", "min", "uwo"] = "mean"
    """How the members' scores make one: their mean, their minimum (WCO), or mean - 0.5 variance (UWO). Each scores an
    answer less the mean of some of SFT's own (`oracles.BaselineSubtracted`)."""
    layers: Count | None = None
    """How many of the policy's layers the reward models keep, from the embedding on. None: all (it has 3)."""
    kl_coef: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    """PPO's KL penalty: how much reward, in standard deviations of SFT's answers to one instruction, a nat costs. The
    less, the farther PPO goes. None: the study's; else PPO is the only method, as others have no such penalty."""
    wrap: Callable[[Env], Env] | None = None
    """A wrapper of your own over AlpacaFarm-PPO-v0, whose reward is the members'. It decides the reward in training;
    responses are scored by stepping it."""
    oracle: Any = None
    """An oracle of your own instead of the members' score. Without members PPO's value model starts from the SFT
    policy, with them from the first one."""

    def __post_init__(self) -> None:
        if not self.members and self.oracle is None:
            raise ValueError(f"Treatment {self.name!r}: expected members, or an oracle of your own, got neither")

    def labels(self, most: int) -> Labels:
        """The labels that its reward models learn from; `most` labels at most."""
        return Labels(self.judge, self.flip, min(self.num_labels, most), self.layers)

    def settings(self) -> dict[str, Any]:
        """All that decides its reward, JSON-able; of callables whether there is one, of models their content."""
        left_out = {"title", *(() if self.members > 1 else ("combine",))}
        values = {field.name: getattr(self, field.name) for field in fields(self) if field.name not in left_out}
        given = hash_model(self.oracle.path) if isinstance(self.oracle, RewardModel) else self.oracle is not None
        return {**values, "wrap": self.wrap is not None, "oracle": given}

    def reward(self, models: Sequence[Path]) -> RewardOracle:
        """The reward before `wrap`, of the members' folders."""
        if self.oracle is not None:
            return cast(RewardOracle, self.oracle)
        members: list[RewardOracle] = [RewardModel(each, name=f"member_{i}") for i, each in enumerate(models)]
        if len(members) == 1:
            return members[0]
        members = [BaselineSubtracted(member, sft_answers) for member in members]
        return Ensemble(members, self.combine, UWO_WEIGHT if self.combine == "uwo" else None)

    def env(self, models: Sequence[Path], num_envs: int, split: str = "unlabeled") -> Env:
        """AlpacaFarm-PPO-v0 with this treatment's reward."""
        env = gym.make_vec(
            "AlpacaFarm-PPO-v0",
            num_envs=num_envs,
            dataset="sandbox",
            split=split,
            oracle=self.reward(models),
            on_unscored="truncate",
            autoreset_mode=AutoresetMode.DISABLED,
        )
        return env if self.wrap is None else self.wrap(env)

    def proxy(self, models: Sequence[Path], split: str = "eval") -> RewardOracle:
        """The reward that is maximised, as an oracle of responses to instructions of a split."""
        if self.wrap is None:
            return self.reward(models)
        return EnvOracle(self.name, partial(self.env, models, split=split))


class EnvOracle(NoDeepCopy):
    """The reward of a wrapped environment as an oracle; `make` makes one of so many slots, without autoreset."""

    def __init__(self, name: str, make: Callable[[int], Env]) -> None:
        self.name = name
        self._env = cache(make)

    def score(self, instructions: Sequence[str], responses: Sequence[str]) -> NDArray[np.float64]:
        """The environment's reward for each response, [B]; NaN where it has no verdict."""
        return self.judge(instructions, responses).scores

    def judge(self, instructions: Sequence[str], responses: Sequence[str]) -> Verdicts:
        """The same for `Instruction`s of the environment's split, with an ensemble's "disagreement" as a detail."""
        rewards, spread = np.empty(len(responses)), np.full(len(responses), np.nan)
        for first in range(0, len(responses), SLOTS):
            rows = slice(first, first + SLOTS)
            ids = [each.id for each in instructions[rows] if isinstance(each, Instruction)]
            env = self._env(len(ids))
            env.reset(options={"instruction_ids": ids})
            _, stepped, _, _, infos = env.step(responses[rows])
            rewards[rows] = checked(f"The reward of {self.name!r} (its wrapper's step)", stepped, len(ids))
            spread[rows] = infos.get(DISAGREEMENT, math.nan)
        return Verdicts(rewards, {} if np.isnan(spread).all() else {DISAGREEMENT: spread})


_ANSWERS: Final[dict[str, list[str]]] = {}


def sft_answers(instructions: Sequence[str]) -> list[list[str]]:
    """SFT's `LEVEL_SAMPLES` answers to each instruction, at temperature 1: the same whatever else is asked."""
    from ...agents.loop import keyed_generator
    from ...sandbox.dataset import SEED

    if new := list({str(each): each for each in instructions if str(each) not in _ANSWERS}.values()):
        generators = [keyed_generator(SEED, "level", str(each)) for each in new]
        texts = sft_policy().generate(new, generator=generators, num_samples=LEVEL_SAMPLES).texts
        for place, each in enumerate(new):
            _ANSWERS[str(each)] = list(texts[place * LEVEL_SAMPLES :][:LEVEL_SAMPLES])
    return [_ANSWERS[str(each)] for each in instructions]


TREATMENTS: Final = (
    Treatment("none", "no noise"),
    Treatment("flip_175", "17.5 % flips", flip=0.175),
    Treatment("ann", "25 % flips (p_sim^ann)", flip=0.25),
    Treatment("flip_35", "35 % flips", flip=0.35),
    Treatment("gpt4", "one greedy annotator (p_sim^GPT-4)", judge="sim_gpt4"),
    Treatment("human", "human raters", judge="human"),
    Treatment("labels_10000", "25 % flips, 10,000 labels", flip=0.25, num_labels=10_000),
    Treatment("layers_1", "25 % flips, reward model of 1 layer", flip=0.25, layers=1),
    Treatment("mean_3", "25 % flips, mean of 3", flip=0.25, members=3, combine="mean"),
    Treatment("wco_3", "25 % flips, minimum of 3 (WCO)", flip=0.25, members=3, combine="min"),
    Treatment("uwo_3", "25 % flips, mean - variance of 3 (UWO)", flip=0.25, members=3, combine="uwo"),
    *(
        Treatment(f"kl_{str(coef)[2:]}", f"25 % flips, KL penalty {coef}", flip=0.25, kl_coef=coef)
        for coef in (0.0125, 0.025, 0.1, 0.2)
    ),
)
"""The sweep: noise, label counts, model sizes, ensembles, and PPO's KL penalty on both sides of the study's."""
BY_NAME: Final = {treatment.name: treatment for treatment in TREATMENTS}


def find_treatment(spec: str) -> Treatment:
    """A treatment by its name, or any `Treatment` by `module:attribute`; UnknownNameError for anything else."""
    if ":" not in spec:
        return BY_NAME[match_name("treatment", spec, BY_NAME)]
    own = find_attribute("Treatment", spec)
    if not isinstance(own, Treatment):
        raise UnknownNameError(f"Treatment {spec!r}: expected a Treatment, got {type(own).__name__}")
    return own
