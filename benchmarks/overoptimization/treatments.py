"""Reward treatments of the over-optimization study: whose labels, how noisy, how many, and how they make one reward.

A treatment is data; everything else of the study is held fixed. One of your own is named on the command line as
`module:attribute`: a `Treatment`, an oracle or its class, or a wrapper of a batched environment.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv, VectorWrapper
from numpy.typing import NDArray

from ... import sandbox
from ...errors import UnknownNameError, did_you_mean
from ...folders import Content, hash_model
from ...instructions import Instruction
from ...oracles import BaselineSubtracted, Ensemble, RewardModel
from ...oracles.base import NoDeepCopy, PreferenceOracle, RewardOracle, Verdicts, checked
from ...oracles.judges import Flip
from ...oracles.registry import make_oracle
from ...plugins import find_attribute

Env = VectorEnv[Any, Any, Any]
DISAGREEMENT: Final = "disagreement"
"""The detail under which an ensemble tells how far its members are apart, and the table's column of it."""
SLOTS: Final = 256
"""Responses that a wrapped environment is asked about at a time."""


@dataclass(frozen=True)
class Labels:
    """What the reward models of a treatment learn from; treatments of equal labels share their reward models."""

    judge: str
    """A judge of the sandbox."""
    flip: float
    """Share of its labels that are flipped."""
    num_labels: int
    """Pairs that are labelled."""
    trunk: str | None = None
    """Folder of the model that a reward model starts from; None for the SFT policy."""
    layers: int | None = None
    """How many of its layers it keeps, the first ones; None for all."""

    @property
    def name(self) -> str:
        """For cells, folders and tables: "sim_eval, flip 0.25, 2000 labels"."""
        trunk = "" if self.trunk is None else f", trunk {_marked(self.trunk)}"
        layers = "" if self.layers is None else f", layers {self.layers}"
        flip = np.format_float_positional(self.flip, trim="-")
        return f"{self.judge}, flip {flip}, {self.num_labels} labels{trunk}{layers}"

    def annotator(self, seed: int) -> PreferenceOracle:
        """The judge with its noise: the pairs that get a coin at 17.5 % are among those that get one at 25 %."""
        judge = sandbox.judge(self.judge, seed)
        return Flip(judge, self.flip, seed=seed) if self.flip else judge


def _marked(folder: str) -> str:
    """Tells models apart by their content: other weights in the same place, and folders of one name."""
    return f"{Path(folder).name} ({hashlib.sha256(json.dumps(hash_model(Path(folder))).encode()).hexdigest()[:8]})"


@dataclass(frozen=True)
class Cell:
    """What a treatment's `oracle` is given: one seed of the study."""

    seed: int
    reward_models: tuple[Path, ...]
    """Folders of the members, trained on the treatment's labels; as many as `members`."""


@dataclass(frozen=True)
class Treatment:
    """A reward to train on and to choose by."""

    name: str
    """As in table.csv and on the command line."""
    title: str
    """For readers."""
    judge: str = "sim_eval"
    """Who labels the pairs: a judge of the sandbox."""
    flip: float = 0.0
    """Noise added to the labels: the share that is flipped, 0 to 0.5."""
    num_labels: int = 2_000
    """Pairs that are labelled, of the sandbox's 10,000; ties are left out. The more, the less the noise."""
    members: int = 1
    """Reward models. They share the labels and differ in the start of the head and the order of the pairs. 0, with
    an `oracle`: none is trained."""
    combine: Literal["mean", "min", "uwo"] = "mean"
    """How the members' scores make one: their mean, their minimum (WCO), or mean - uwo_weight * variance (UWO)."""
    uwo_weight: float = 0.5
    """UWO's weight of the variance, a unit of reward for each squared one. Coste et al. 2023 (arXiv 2310.02743) take
    0.5 for best-of-n and 0.1 for PPO, in units of their own; here both methods have one reward."""
    level_samples: int = 4
    """An ensemble's members score an answer less the mean of so many of SFT's own (`oracles.BaselineSubtracted`): as
    they come (0) they differ most in their level on an instruction, which no label decides. A single model's choices
    are the same."""
    trunk: str | None = None
    """Folder of a language model with the policy's tokenizer that the reward models start from; None: the policy."""
    layers: int | None = None
    """Layers that the reward models keep of it, from the embedding on: smaller ones. None: all (the policy has 3)."""
    wrap: Callable[[Env], Env] | None = None
    """A wrapper of your own over AlpacaFarm-PPO-v0, whose reward is the one that the members make. It decides the
    reward in training; responses are scored by stepping it."""
    oracle: Callable[[Cell], RewardOracle] | None = None
    """An oracle of your own, instead of the members' combined score; made anew in every process. Without members
    PPO's value model starts from the SFT policy, with them from the first one."""

    def __post_init__(self) -> None:
        def require(holds: bool, field: str, expected: str) -> None:
            if not holds:
                raise ValueError(f"Treatment {self.name!r}: {field} must be {expected}, got {getattr(self, field)!r}")

        require(bool(self.name) and not set(self.name) & set(":,/"), "name", "a text without ':', ',' and '/'")
        require(0 <= self.flip <= 0.5, "flip", "from 0 to 0.5")
        require(self.num_labels >= 1, "num_labels", "1 or more")
        require(self.layers is None or self.layers >= 1, "layers", "1 or more, or None")
        require(self.combine in ("mean", "min", "uwo"), "combine", "'mean', 'min' or 'uwo'")
        require(self.level_samples >= 0, "level_samples", "0 or more")
        require(0 <= self.uwo_weight < math.inf, "uwo_weight", "0 or more")
        require(self.members >= (self.oracle is None), "members", "1 or more (0 only with an oracle of your own)")

    def labels(self, most: int | None = None) -> Labels:
        """What its reward models learn from; `most` labels at most."""
        return Labels(self.judge, self.flip, min(self.num_labels, most or self.num_labels), self.trunk, self.layers)

    def settings(self) -> dict[str, Any]:
        """All that decides its reward, JSON-able; of callables whether there is one, of a reward model its content."""
        left_out = {"title", *(() if self.members > 1 else ("combine", "uwo_weight", "level_samples"))}
        values = {field.name: getattr(self, field.name) for field in fields(self) if field.name not in left_out}
        values["trunk"] = self.trunk and _marked(self.trunk)
        values |= {name: getattr(self, name) is not None for name in ("wrap", "oracle")}
        return values | ({"oracle": self.oracle.content} if isinstance(self.oracle, _Given) else {})

    def reward(self, cell: Cell) -> RewardOracle:
        """The reward before `wrap`."""
        if self.oracle is not None:
            return self.oracle(cell)
        members: list[RewardOracle] = [RewardModel(x, name=f"member_{i}") for i, x in enumerate(cell.reward_models)]
        if len(members) == 1:
            return members[0]
        if self.level_samples:
            from .sft import answers

            level = partial(answers, num_samples=self.level_samples)
            members = [BaselineSubtracted(member, level) for member in members]
        return Ensemble(members, self.combine, self.uwo_weight if self.combine == "uwo" else None)

    def env(self, cell: Cell, num_envs: int, split: str = "unlabeled") -> Env:
        """AlpacaFarm-PPO-v0 with this treatment's reward."""
        env = gym.make_vec(
            "AlpacaFarm-PPO-v0",
            num_envs=num_envs,
            dataset="sandbox",
            split=split,
            oracle=self.reward(cell),
            on_unscored="truncate",
            autoreset_mode=AutoresetMode.DISABLED,
        )
        return env if self.wrap is None else self.wrap(env)

    def proxy(self, cell: Cell) -> RewardOracle:
        """What is maximised, as an oracle of responses to instructions of eval."""
        if self.wrap is None:
            return self.reward(cell)
        return EnvOracle(self.name, lambda num_envs: self.env(cell, num_envs, "eval"))


class EnvOracle(NoDeepCopy):
    """The reward of a (wrapped) environment as an oracle: asks it the instructions by id and steps it.

    Args:
        name: The oracle's name.
        make: An environment of so many slots, without autoreset.
        slots: Most responses of one step.
    """

    def __init__(self, name: str, make: Callable[[int], Env], *, slots: int = SLOTS) -> None:
        self.name = name
        self._make, self._slots = make, slots
        self._envs: dict[int, Env] = {}

    def score(self, instructions: Sequence[str], responses: Sequence[str]) -> NDArray[np.float64]:
        """The environment's reward for each response, [B]; NaN where it has no verdict."""
        return self.judge(instructions, responses).scores

    def judge(self, instructions: Sequence[str], responses: Sequence[str]) -> Verdicts:
        """Rewards, and the detail "disagreement" where the environment's oracle is an ensemble.

        Args:
            instructions: `Instruction`s of the environment's split, [B].
            responses: [B].
        """
        rewards, spread = np.empty(len(responses)), np.full(len(responses), np.nan)
        for first in range(0, len(responses), self._slots):
            rows = slice(first, first + self._slots)
            ids = [each.id for each in instructions[rows] if isinstance(each, Instruction)]
            env = self._env(len(responses[rows]))
            env.reset(options={"instruction_ids": ids})
            _, found, _, _, infos = env.step(responses[rows])
            rewards[rows] = checked(f"The reward of {self.name!r} (its wrapper's step)", found, len(ids))
            spread[rows] = infos.get(DISAGREEMENT, math.nan)
        return Verdicts(rewards, {} if np.isnan(spread).all() else {DISAGREEMENT: spread})

    def _env(self, num_envs: int) -> Env:
        if num_envs not in self._envs:
            self._envs[num_envs] = self._make(num_envs)
        return self._envs[num_envs]


@dataclass(frozen=True)
class _Given:
    """An oracle that is there already, for any cell."""

    oracle: RewardOracle

    def __call__(self, cell: Cell) -> RewardOracle:
        return self.oracle

    @property
    def content(self) -> Content | bool:
        """Of a reward model what its files are; of any other oracle that there is one."""
        return hash_model(self.oracle.path) if isinstance(self.oracle, RewardModel) else True


def _greedy_utility(cell: Cell) -> RewardOracle:
    from .sft import StandardizedOracle

    return StandardizedOracle(sandbox.utility_oracle("sim_gpt4"))


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
    Treatment("gpt4_utility", "the greedy annotator's own utility", members=0, oracle=_greedy_utility),
)
"""The sweep: noise, label counts, model sizes, ensembles, and an annotator without a reward model."""


def find_treatment(name: str) -> Treatment:
    """A treatment by its name, or by `module:attribute` any `Treatment`, oracle (or its class) or wrapper.

    An oracle scores as it is and needs no labels. A wrapper (a class over batched environments, or a function of one)
    goes over the reward model of 25 % flips, under its attribute's name.

    Raises:
        UnknownNameError: There is no such treatment, module or attribute, or it is none of the three.
    """
    if ":" not in name:
        by_name = {treatment.name: treatment for treatment in TREATMENTS}
        if name not in by_name:
            raise did_you_mean("treatment", name, by_name)
        return by_name[name]
    found, attribute = find_attribute("Treatment", name), name.partition(":")[2]
    if isinstance(found, Treatment):
        return found
    wraps = issubclass(found, VectorWrapper) if isinstance(found, type) else callable(found)
    if callable(getattr(found, "score", None)):
        oracle = make_oracle(name, dataset=sandbox.SANDBOX)
        return Treatment(attribute, oracle.name, members=0, oracle=_Given(oracle))
    if wraps:
        return Treatment(attribute, f"25 % flips, {attribute}", flip=0.25, wrap=found)
    raise UnknownNameError(
        f"Treatment {name!r}: expected a Treatment, an oracle (an object with name and score) or a wrapper of batched "
        f"environments (gymnasium.vector.VectorWrapper; a gymnasium.Wrapper is of one environment), got {found!r}"
    )
