"""Prompts that are too long for a model are left out of training: counted at the start, not met after hours."""

import json
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest
from gymnasium.vector import AsyncVectorEnv, AutoresetMode
from tiny_worlds import (
    ASCII,
    DEMONSTRATIONS,
    TEMPLATE,
    TEXTS,
    Share,
    TinyDataset,
    build_llama,
    load_policy,
    make_env,
    small_ppo,
)

from alpacafarm_env.agents import (
    DPO,
    PPO,
    SFT,
    BinaryFeedME,
    BinaryRewardConditioning,
    ExpertIteration,
    LanguageModel,
    PolicyActor,
    Quark,
)
from alpacafarm_env.agents.dpo import DPOConfig
from alpacafarm_env.agents.expert_iteration import ExpertIterationConfig
from alpacafarm_env.agents.prompts import fit_limits
from alpacafarm_env.agents.quark import QuarkConfig
from alpacafarm_env.agents.reward_modeling import RewardModeling, RewardModelingConfig
from alpacafarm_env.agents.sft import SFTConfig
from alpacafarm_env.envs.instruction import InstructionEnv
from alpacafarm_env.errors import DataError
from alpacafarm_env.instructions import Demonstration, Preference

LIMIT = 32
"""Tokens of a prompt: of the five texts one has more."""
LONG = 2
KEPT = [number for number in range(len(TEXTS)) if number != LONG]
TOLD = r"(1 of 5|2 of 10) prompts \(20\.0%\) have more than 3\d tokens, the longest 46"
PREFERENCES = TinyDataset().preferences()
FEEDBACK: dict[str, Sequence[Demonstration] | Sequence[Preference]] = {
    "SFT": DEMONSTRATIONS,
    "BinaryFeedME": PREFERENCES,
    "BinaryRewardConditioning": PREFERENCES,
    "DPO": PREFERENCES,
    "RewardModeling": PREFERENCES,
}


def make(name: str, folder: Path, data: Sequence[Any] | None = None, *, budget: int = 16384, **kwargs: Any) -> Any:
    """An agent whose policy reads prompts of up to LIMIT tokens."""
    if name == "RewardModeling":
        config = RewardModelingConfig(max_length=LIMIT + 1, micro_batch_tokens=budget)
        return RewardModeling(folder, PREFERENCES if data is None else data, config=config, device="cpu", **kwargs)
    policy = load_policy(folder, max_prompt_tokens=LIMIT, max_response_tokens=16)
    if name == "PPO":
        return PPO(make_env(4), policy, config=replace(small_ppo(), micro_batch_tokens=budget))
    if name == "Quark":
        quark = QuarkConfig(rollout_batch_size=4, minibatch_size=4, micro_batch_tokens=budget)
        return Quark(make_env(4), policy, config=quark)
    if name == "ExpertIteration":
        expert = ExpertIterationConfig(num_samples=2, sft=SFTConfig(micro_batch_tokens=budget))
        return ExpertIteration(policy, TinyDataset().instructions("unlabeled"), Share(ASCII), config=expert)
    agent, config = {
        "DPO": (DPO, DPOConfig),
        "SFT": (SFT, SFTConfig),
        "BinaryFeedME": (BinaryFeedME, SFTConfig),
        "BinaryRewardConditioning": (BinaryRewardConditioning, SFTConfig),
    }[name]
    return agent(policy, FEEDBACK[name] if data is None else data, config=config(micro_batch_tokens=budget), **kwargs)


@pytest.mark.parametrize("name", [*FEEDBACK, "PPO", "Quark", "ExpertIteration"])
@pytest.mark.filterwarnings("ignore:.* lose their middle", "ignore:.* left out")
def test_micro_batches_that_are_too_small_are_told_before_training(policy_folder: Path, name: str) -> None:
    """With the tokens that they need at least; and these are enough."""
    with pytest.raises(DataError, match="micro_batch_tokens=5") as told:
        make(name, policy_folder, budget=5)
    (number,) = re.findall(r"at least (\d+)", str(told.value))
    make(name, policy_folder, budget=int(number))
    with pytest.raises(DataError, match=number):
        make(name, policy_folder, budget=int(number) - 1)


@pytest.mark.parametrize("name", FEEDBACK)
@pytest.mark.filterwarnings("ignore:.* lose their middle")
def test_training_goes_on_without_them(policy_folder: Path, tmp_path: Path, name: str) -> None:
    """As if they had never been in the data; and a resumed run knows that they were."""
    data = FEEDBACK[name]
    with pytest.warns(UserWarning, match=TOLD):
        agent = make(name, policy_folder, data, out=tmp_path / "run")
    other = make(name, policy_folder, [data[number] for number in KEPT], out=tmp_path / "other")
    left_out = 2 if name == "BinaryRewardConditioning" else 1  # which trains on both responses
    assert (agent.num_left_out, other.num_left_out) == (left_out, 0)
    assert agent.learn() == other.learn()
    settings = [json.loads(next((tmp_path / run).rglob("config.json")).read_text()) for run in ("run", "other")]
    assert [each["left_out"] for each in settings] == [left_out, 0]


@pytest.mark.parametrize("name", FEEDBACK)
def test_nothing_left_is_an_error(policy_folder: Path, name: str) -> None:
    with pytest.raises(DataError, match="nothing to train on"):
        make(name, policy_folder, [FEEDBACK[name][LONG]])
    with pytest.raises(ValueError, match="got none"):
        make(name, policy_folder, [])


def quark(**changes: Any) -> QuarkConfig:
    return QuarkConfig(total_steps=2, rollout_batch_size=16, minibatch_size=8, num_quantiles=2, **changes)


AGENTS: dict[str, Callable[[Any, LanguageModel], PPO | Quark]] = {
    "ppo": lambda env, policy: PPO(env, policy, config=small_ppo()),
    "quark": lambda env, policy: Quark(env, policy, config=quark()),
    "quark_all": lambda env, policy: Quark(env, policy, config=quark(best_quantile_only=False)),
}


def single() -> InstructionEnv:
    return InstructionEnv(TinyDataset(), oracle=Share(ASCII))


class Watched(gym.vector.VectorWrapper):  # type: ignore[type-arg]
    """Remembers what was asked."""

    asked: frozenset[str] = frozenset()

    def reset(self, **kwargs: Any) -> Any:
        observations, infos = self.env.reset(**kwargs)
        self.asked |= set(observations)
        return observations, infos


@pytest.mark.parametrize("agent", ["ppo", "quark_all"])
def test_agents_on_one_environment_each_leave_out_their_own(policy_folder: Path, agent: str) -> None:
    """And none what another has left out, whichever is made or trained first; what the user left out stays out."""
    env, first, second = make_env(16), {}, {}
    for found, limit in ((first, LIMIT), (second, None)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore" if limit else "error")
            found["watched"] = Watched(env)
            found["agent"] = AGENTS[agent](found["watched"], load_policy(policy_folder, max_prompt_tokens=limit))
    assert (first["agent"].num_left_out, second["agent"].num_left_out) == (1, 0)
    for found in (second, first):
        found["agent"].learn()
    assert first["watched"].asked == {TEXTS[number] for number in KEPT}
    assert second["watched"].asked == set(TEXTS)
    env.leave_out([0])
    third = Watched(env)
    with pytest.warns(UserWarning, match="1 of 4 prompts"):
        made = AGENTS[agent](third, load_policy(policy_folder, max_prompt_tokens=LIMIT))
    made.learn()
    assert third.asked == {TEXTS[number] for number in KEPT if number != 0}


def test_a_response_that_would_not_fit_behind_a_prompt_counts(policy_folder: Path) -> None:
    """The model has 256 positions; a prompt of 46 tokens and a response of 220 are more."""
    with pytest.warns(UserWarning, match="max_response_tokens"):
        agent = PPO(make_env(16), load_policy(policy_folder), config=small_ppo(max_response_tokens=220))
    assert agent.num_left_out == 1
    with pytest.raises(DataError, match="max_response_tokens"):
        PPO(make_env(16), load_policy(policy_folder), config=small_ppo(max_response_tokens=250))


def test_where_instructions_cannot_be_seen_the_draw_says_what_to_do(policy_folder: Path) -> None:
    env = AsyncVectorEnv([single] * 2, shared_memory=False, autoreset_mode=AutoresetMode.DISABLED, context="fork")
    try:
        policy = load_policy(policy_folder, max_prompt_tokens=LIMIT)
        with pytest.raises(ValueError, match=r"max_prompt_tokens.*leave_out"):
            PPO(env, policy, config=small_ppo(total_steps=50, rollout_batch_size=16)).learn()
    finally:
        env.close()


def test_what_is_to_be_answered_is_refused_before_anything_is_sampled(policy_folder: Path) -> None:
    policy = load_policy(policy_folder, max_prompt_tokens=LIMIT)
    policy.model.forward = None
    agent = PolicyActor(policy)
    with pytest.raises(ValueError, match="max_prompt_tokens"):
        agent.act(TEXTS)


@pytest.mark.parametrize("positions", [4, 100, 256, 257, 400, 491, 492, 4096, float("inf")])
def test_defaults_fit_and_are_alpacafarms_from_492_positions(positions):
    prompt, response = fit_limits(None, None, positions)
    assert min(prompt, response) >= 1
    assert prompt + response == min(positions, 192 + 300)
    assert response >= min(int(min(positions, 1200) / 4), 300)
    # What is asked for is kept, and the other gives way.
    assert fit_limits(2, None, positions) == (2, min(300, positions - 2))
    assert fit_limits(None, 2, positions) == (min(192, positions - 2), 2)


@pytest.mark.parametrize("asked", [(200, 57), (256, None), (None, 256), (0, None), (None, 0), (-1, 5)])
def test_what_does_not_fit_is_an_error_at_once(tokenizer, asked):
    model = build_llama(len(tokenizer))  # 256 positions
    with pytest.raises(ValueError, match="max_prompt_tokens and max_response_tokens"):
        LanguageModel(model, tokenizer, TEMPLATE, max_prompt_tokens=asked[0], max_response_tokens=asked[1])
