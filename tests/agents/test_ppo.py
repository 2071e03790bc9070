from __future__ import annotations

import copy
import math
import re
from dataclasses import replace
from pathlib import Path

import gymnasium as gym
import peft
import pytest
import torch
from gymnasium.vector import AutoresetMode
from tiny_worlds import (
    ASCII,
    TEXTS,
    First,
    Share,
    load_policy,
    make_env,
    small_ppo,
    start_world,
    train_with_few_scores,
)

from alpacafarm_env.agents.language_model import LanguageModel
from alpacafarm_env.agents.ppo import PPO, PPOConfig, ppo_sums
from alpacafarm_env.errors import CheckpointError, UnknownNameError

LEARN = small_ppo(
    total_steps=16,
    rollout_batch_size=64,
    minibatch_size=32,
    learning_rate=6e-3,
    schedule="constant",
    kl_coef=0.0,
    max_response_tokens=4,
)


def learned(policy: LanguageModel, oracle: Share, *, seed: int) -> tuple[float, float]:
    """Mean score at the first and at the last of 16 steps."""
    updates = list(PPO(make_env(64, oracle), policy, config=LEARN, seed=seed).updates())
    return updates[0]["score/mean"], updates[-1]["score/mean"]


# Learning --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_share_of_a_target_token_rises_by_more_than_half(llama: LanguageModel, seed: int) -> None:
    first, last = learned(llama, Share("e"), seed=seed)
    assert first < 0.1
    assert last > first + 0.5


def test_with_the_sign_flipped_the_share_falls(llama: LanguageModel) -> None:
    first, last = learned(llama, Share(ASCII, sign=-1), seed=0)
    assert -first > 0.25  # about a third of an untrained policy's bytes are printable
    assert -last < -first / 4


def test_a_bandit_converges_to_its_closed_form(policy_folder: Path) -> None:
    """One token, one state: E[r] − β KL(π ‖ ref) is largest at π ∝ ref · exp(r / β) (Ziegler et al. 2019, sec. 2)."""
    policy = load_policy(policy_folder, max_response_tokens=1)
    config = PPOConfig(
        total_steps=20,
        rollout_batch_size=256,
        minibatch_size=256,
        learning_rate=6e-3,
        kl_coef=0.5,
        max_response_tokens=1,
    )
    env = make_env(256, Share(ASCII, size=1))
    prompt = policy.as_rollouts(TEXTS[:1], [""])  # one token: EOS

    def distribution() -> torch.Tensor:
        with torch.no_grad():
            return policy.model(input_ids=prompt.prompt_tokens[None]).logits[0, -1].softmax(-1)

    class OneQuestion(gym.vector.VectorWrapper):  # type: ignore[type-arg]
        def reset(self, **kwargs):
            return self.env.reset(options={"instruction_ids": [0] * self.num_envs}, **kwargs)

    reference = distribution()
    letters = torch.tensor([policy.tokenizer.convert_tokens_to_ids(c) for c in ASCII])
    rewards = torch.zeros(len(reference)).index_fill(0, letters, 1.0)
    optimum = (reference.log() + rewards / config.kl_coef).softmax(-1)
    assert float(reference[letters].sum()) < float(optimum[letters].sum()) - 0.2
    PPO(OneQuestion(env), policy, config=config).learn()
    assert float(distribution()[letters].sum()) == pytest.approx(float(optimum[letters].sum()), abs=0.1)


# The first step --------------------------------------------------------------------------------------------------


def prepared(policy: LanguageModel, **changes):
    """An agent before its first update, its first responses and their metrics."""
    agent = PPO(make_env(16, Share(ASCII)), policy, config=small_ppo(**changes))
    rollouts, scores, _, collected = agent._collector.collect(1)
    experience, metrics = agent._prepare(rollouts, scores)
    return agent, experience, {**collected, **metrics}


def test_before_training_the_policy_is_the_reference(language_model: LanguageModel) -> None:
    _, experience, metrics = prepared(language_model, recompute_logprobs=True)
    assert metrics["kl/k1"] == metrics["kl/k3"] == 0
    assert metrics["reward/mean"] == pytest.approx(metrics["score/mean"], abs=1e-7)
    assert torch.equal(experience.old_values, torch.zeros_like(experience.old_values))


def test_the_sampler_agrees_with_the_scorer(language_model: LanguageModel) -> None:
    _, experience, metrics = prepared(language_model)
    _, recomputed, _ = prepared(language_model, recompute_logprobs=True)
    torch.testing.assert_close(experience.old_logprobs, recomputed.old_logprobs, rtol=0, atol=1e-5)
    assert abs(metrics["kl/k1"]) < 1e-5


def test_at_the_first_minibatch_the_ratio_is_one(language_model: LanguageModel) -> None:
    agent, experience, _ = prepared(language_model, temperature=0.7)
    rows = torch.arange(16)
    sums = ppo_sums(agent.policy, agent.value_model, experience, rows, agent.config)
    num_tokens = len(experience.rollouts.tokens)
    assert float(sums["clip/policy"]) == 0
    assert float(sums["kl/update"]) / num_tokens == pytest.approx(0, abs=1e-6)
    # At ratio 1 the policy loss is −mean(A), and A is normalised over these very tokens.
    assert float(sums["loss/policy"].detach()) / num_tokens == pytest.approx(0, abs=1e-5)


def test_with_a_zero_head_the_value_loss_is_half_the_mean_squared_return(llama: LanguageModel) -> None:
    agent, experience, _ = prepared(llama, value_clip=None)
    sums = ppo_sums(agent.policy, agent.value_model, experience, torch.arange(16), agent.config)
    expected = experience.returns.square().sum() / 2
    torch.testing.assert_close(sums["loss/value"].detach(), expected, rtol=1e-5, atol=0)


def test_advantages_are_normalised_over_real_tokens(llama: LanguageModel) -> None:
    _, experience, _ = prepared(llama)
    mask = torch.arange(experience.advantages.shape[1]) < experience.rollouts.lengths[:, None]
    real = experience.advantages[mask]
    assert float(real.mean()) == pytest.approx(0, abs=1e-5)
    assert float(real.var(correction=0)) == pytest.approx(1, abs=1e-5)
    assert torch.equal(experience.advantages[~mask], torch.zeros(int((~mask).sum())))


def test_equal_scores_give_equal_returns_at_any_length(llama: LanguageModel) -> None:
    agent = PPO(make_env(16, Share("")), llama, config=small_ppo(kl_coef=0.0, whiten_rewards=True))
    rollouts, scores, *_ = agent._collector.collect(1)
    assert len(set(rollouts.lengths.tolist())) > 1
    experience, _ = agent._prepare(rollouts, torch.ones_like(scores))
    assert len(set(experience.returns[:, 0].tolist())) == 1


# Options ---------------------------------------------------------------------------------------------------------


def test_unfinished_responses_get_the_missing_eos_score(llama: LanguageModel) -> None:
    agent = PPO(make_env(16), llama, config=small_ppo(missing_eos_score=-3.0, kl_coef=0.0))
    rollouts, scores, *_ = agent._collector.collect(1)
    experience, _ = agent._prepare(rollouts, scores)
    expected = torch.where(rollouts.finished, scores.float(), torch.tensor(-3.0))
    assert set(rollouts.finished.tolist()) == {True, False}
    torch.testing.assert_close(experience.returns[:, 0], expected)


def test_one_scored_response_is_one_minibatch(llama: LanguageModel) -> None:
    agent = PPO(make_env(16, First(ASCII), on_unscored="truncate"), llama, config=small_ppo(minibatch_size=1))
    updates = list(agent.updates())
    assert [metrics["score/unscored"] for metrics in updates] == [15 / 16, 15 / 16]
    assert all(math.isfinite(metrics["loss"]) for metrics in updates)


@pytest.mark.parametrize(
    ("num_scored", "said"),
    [((1, 0), r"\[\{.*'step': 2.*\}\]"), ((0, 0), "Step 1: none of 16 responses has a score .*")],
)
def test_processes_with_and_without_scores_stay_together(
    policy_folder: Path, tmp_path: Path, num_scored: tuple[int, int], said: str
) -> None:
    processes = start_world(train_with_few_scores, policy_folder, tmp_path, num_scored, size=2)
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0, 0]
    first, second = ((tmp_path / rank).read_text() for rank in "01")
    assert first == second
    assert re.fullmatch(said, first)


def test_clamped_k1_penalises_more_than_k1(llama: LanguageModel) -> None:
    """Away from the reference, the clamp drops the negative terms of the penalty (AlpacaFarm's released code)."""
    agent, experience, _ = prepared(llama, kl_coef=1.0)
    with torch.no_grad():
        for parameter in agent.policy.model.parameters():
            parameter.mul_(1.05)
    returns = {}
    for kind in ("k1", "clamped_k1"):
        agent.config = replace(agent.config, kl_estimator=kind, recompute_logprobs=True)
        scores = torch.zeros(16, dtype=torch.float64)
        returns[kind] = agent._prepare(experience.rollouts, scores)[0].returns[:, 0]
    assert (returns["clamped_k1"] <= returns["k1"] + 1e-6).all()
    assert float(returns["clamped_k1"].mean()) < float(returns["k1"].mean()) - 1e-3
    assert (returns["clamped_k1"] <= 0).all()


def test_an_adaptive_coefficient_follows_the_measured_kl(llama: LanguageModel) -> None:
    config = small_ppo(kl_coef=0.1, target_kl=1e-3, adaptive_kl_step=0.5, total_steps=3, learning_rate=1e-2)
    first, second, third = PPO(make_env(), llama, config=config).updates()
    assert first["kl/coef"] == 0.1
    assert second["kl/coef"] == pytest.approx(0.09)  # KL 0 is below the target: the largest step down
    assert third["kl/coef"] == pytest.approx(0.099)


def test_two_rounds_of_an_environment_are_one_of_twice_its_size(llama: LanguageModel) -> None:
    once = PPO(make_env(16), llama, config=small_ppo())._collector.collect(1)[0]
    twice = PPO(make_env(8), llama, config=small_ppo())._collector.collect(1)[0]
    assert (once.instructions, once.texts) == (twice.instructions, twice.texts)


def test_steps_ask_different_instructions(llama: LanguageModel) -> None:
    collector = PPO(make_env(), llama, config=small_ppo(), seed=1)._collector
    assert collector.collect(1)[0].instructions != collector.collect(2)[0].instructions


# Models ----------------------------------------------------------------------------------------------------------


def test_two_steps_on_both_architectures(language_model: LanguageModel, tmp_path: Path) -> None:
    before = copy.deepcopy(language_model.model.state_dict())
    agent = PPO(make_env(), language_model, config=small_ppo(), out=tmp_path)
    updates = list(agent.updates())
    assert len(updates) == 2
    assert all(math.isfinite(value) for metrics in updates for value in metrics.values())
    assert any(not torch.equal(before[name], tensor) for name, tensor in language_model.model.state_dict().items())
    assert len(agent.act(TEXTS)) == len(TEXTS)
    assert agent.act(TEXTS) == agent.act(TEXTS)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft asks transformers for it
def test_lora_trains_its_adapter_and_the_value_model_only(policy_folder: Path, tmp_path: Path) -> None:
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    policy = load_policy(policy_folder, lora=lora)
    frozen = {name: p.clone() for name, p in policy.model.named_parameters() if not p.requires_grad}
    agent = PPO(make_env(), policy, config=small_ppo(recompute_logprobs=True), out=tmp_path / "run")
    updates = list(agent.updates())
    assert updates[0]["kl/k1"] == 0
    assert updates[1]["kl/k1"] != 0
    assert all(torch.equal(p, frozen[name]) for name, p in policy.model.named_parameters() if name in frozen)
    saved = tmp_path / "run" / "checkpoint-2" / "policy"
    assert (saved / "adapter_model.safetensors").is_file()
    assert not (saved / "model.safetensors").exists()
    resumed = PPO(
        make_env(),
        load_policy(policy_folder, lora=lora),
        config=small_ppo(recompute_logprobs=True),
        out=tmp_path / "run",
    )
    assert resumed.act(TEXTS) == agent.act(TEXTS)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_a_trained_adapter_is_its_own_reference(policy_folder: Path, tmp_path: Path) -> None:
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    load_policy(policy_folder, lora=lora).save(tmp_path / "adapter")
    config = small_ppo(recompute_logprobs=True, total_steps=3, save_every=2)
    PPO(make_env(), load_policy(tmp_path / "adapter"), config=config, out=tmp_path / "whole").learn()
    agent = PPO(make_env(), load_policy(tmp_path / "adapter"), config=config, out=tmp_path / "parts")
    assert all("lora_" in name for name in agent._loop.parameters if name.startswith("policy."))
    updates = agent.updates()
    assert next(updates)["kl/k1"] == 0
    assert next(updates)["kl/k1"] != 0
    updates.close()  # type: ignore[attr-defined]
    PPO(make_env(), load_policy(tmp_path / "adapter"), config=config, out=tmp_path / "parts").learn()
    whole, parts = ((tmp_path / out / "metrics.jsonl").read_bytes() for out in ("whole", "parts"))
    assert whole == parts  # after resuming, the reference is the starting point still
    with pytest.raises(CheckpointError, match="Changed: policy_sha256"):
        PPO(make_env(), load_policy(tmp_path / "parts/checkpoint-3/policy"), config=config, out=tmp_path / "parts")


def test_the_value_model_starts_from_the_reward_models_trunk(llama: LanguageModel, reward_model_folder: Path) -> None:
    from safetensors.torch import load_file

    agent = PPO(make_env(), llama, value_init=reward_model_folder, config=small_ppo())
    weights = load_file(reward_model_folder / "model.safetensors")
    trunk = agent.value_model.trunk.state_dict()
    assert all(torch.equal(trunk[name.removeprefix("model.")], weights[name]) for name in weights if "layers" in name)
    assert next(agent.updates())["loss/value"] > 0


def test_a_checkpoints_policy_is_a_model_folder(llama: LanguageModel, tmp_path: Path) -> None:
    agent = PPO(make_env(), llama, config=small_ppo(), out=tmp_path)
    agent.learn()
    loaded = load_policy(tmp_path / "checkpoint-2" / "policy", max_response_tokens=16)
    for name, tensor in llama.model.state_dict().items():
        assert torch.equal(loaded.model.state_dict()[name], tensor)


# Config ----------------------------------------------------------------------------------------------------------


def test_metrics_of_the_environment_are_logged(llama: LanguageModel) -> None:
    env = make_env()
    agent = PPO(env, llama, config=small_ppo())
    with env.also_scored_by("gold_reward", Share("e")):
        metrics = next(agent.updates())
    assert 0 <= metrics["info/gold_reward"] <= 1
    assert metrics["info/reward_components/share"] == pytest.approx(metrics["score/mean"])
    assert metrics["info/response_length"] > 1
    assert 0 <= metrics["finished"] <= 1
    assert 1 <= metrics["tokens/mean"] <= 16


def test_paper_preset_is_appendix_b() -> None:
    config = PPOConfig.paper()
    assert (config.rollout_batch_size, config.minibatch_size, config.num_epochs, config.total_steps) == (
        512,
        256,
        2,
        390,
    )
    assert (config.learning_rate, config.adam_eps, config.schedule, config.weight_decay) == (1e-5, 1e-5, "linear", 0)
    assert (config.gamma, config.lam, config.clip, config.value_clip, config.value_coef) == (1, 1, 0.2, 0.2, 0.1)
    assert (config.kl_coef, config.target_kl, config.max_grad_norm, config.temperature) == (0.002, None, 1, 1)
    assert (config.max_response_tokens, config.act_temperature) == (300, 0.7)
    human = PPOConfig.paper(kl_coef=0.02, kl_estimator="clamped_k1")
    assert (human.kl_coef, human.kl_estimator) == (0.02, "clamped_k1")


def test_bad_settings_are_named() -> None:
    with pytest.raises(ValueError, match="minibatch_size must be a divisor of rollout_batch_size=512, got 100"):
        PPOConfig(minibatch_size=100)
    with pytest.raises(ValueError, match="PPOConfig.temperature must be above 0, got 0"):
        PPOConfig(temperature=0)
    with pytest.raises(UnknownNameError, match="Did you mean 'k3'"):
        PPOConfig(kl_estimator="k33")


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("total_steps", 2.5, "an integer"),
        ("num_epochs", True, "an integer"),
        ("save_every", "2", "an integer"),
        ("max_response_tokens", 1.5, "an integer"),
        ("max_response_tokens", 0, "1 or more, or None"),
        ("kl_coef", math.inf, "a finite number"),
        ("learning_rate", math.nan, "a finite number"),
        ("missing_eos_score", math.nan, "a finite number"),
        ("target_kl", "6", "a finite number"),
        ("gamma", None, "a finite number"),
    ],
)
def test_settings_that_are_no_integer_or_not_finite_are_refused(field: str, value: object, expected: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"PPOConfig.{field} must be {expected}, got {value!r}")):
        small_ppo(**{field: value})


def test_an_environment_that_does_not_fit_is_refused(llama: LanguageModel) -> None:
    with pytest.raises(ValueError, match="expected AutoresetMode.DISABLED, got .*SAME_STEP"):
        PPO(make_env(autoreset_mode=AutoresetMode.SAME_STEP), llama, config=small_ppo())
    with pytest.raises(ValueError, match="a multiple of num_envs x processes = 5, got 16"):
        PPO(make_env(5), llama, config=small_ppo())
