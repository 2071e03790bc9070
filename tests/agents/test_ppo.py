"""PPO: a bandit in closed form, its gradients and coefficients, and what agents take from an environment."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest
import torch
from gymnasium.vector import AutoresetMode
from gymnasium.wrappers.vector import DictInfoToList
from tiny_worlds import (
    ASCII,
    TEXTS,
    First,
    Picky,
    Share,
    finish,
    load_policy,
    make_env,
    small_ppo,
    start_world,
    train_with_few_scores,
)

from alpacafarm_env.agents.language_model import LanguageModel
from alpacafarm_env.agents.ppo import PPO, PPOConfig, ppo_sums
from alpacafarm_env.agents.rollouts import micro_batches
from alpacafarm_env.oracles import OracleError

# Learning --------------------------------------------------------------------------------------------------------


def test_in_bfloat16_the_first_ratio_is_one(policy_folder: Path) -> None:
    """Samples and updates round differently, so the old log-probabilities are the updates' own."""
    policy = load_policy(policy_folder, max_response_tokens=16)
    config = small_ppo(total_steps=1, num_epochs=1, minibatch_size=16, precision="bfloat16")  # a single update
    agent = PPO(make_env(), policy, config=config)
    (metrics,) = agent.updates()
    assert policy.precision == "bfloat16"
    assert metrics["kl/update"] == pytest.approx(0, abs=1e-6)


def test_a_bandit_converges_to_its_closed_form(policy_folder: Path) -> None:
    """One token, one state: E[r] − β KL(π ‖ ref) is largest at π ∝ ref · exp(r / β) (Ziegler et al. 2019, sec. 2)."""
    policy = load_policy(policy_folder, max_response_tokens=1)
    sizes = {"total_steps": 20, "rollout_batch_size": 256, "minibatch_size": 256, "max_response_tokens": 1}
    config = PPOConfig(**sizes, learning_rate=6e-3, kl_coef=0.5)
    env = make_env(256, Share(ASCII, size=1))
    prompt = policy.as_rollouts(TEXTS[1:2], [""])  # one token: EOS

    def distribution() -> torch.Tensor:
        with torch.no_grad():
            return policy.model(input_ids=prompt.prompt_tokens[None]).logits[0, -1].softmax(-1)

    class OneQuestion(gym.vector.VectorWrapper):  # type: ignore[type-arg]
        def reset(self, **kwargs):
            return self.env.reset(options={"instruction_ids": [1] * self.num_envs}, **kwargs)

    reference = distribution()
    letters = torch.tensor([policy.tokenizer.convert_tokens_to_ids(c) for c in ASCII])
    rewards = torch.zeros(len(reference)).index_fill(0, letters, 1.0)
    optimum = (reference.log() + rewards / config.kl_coef).softmax(-1)
    assert float(reference[letters].sum()) < float(optimum[letters].sum()) - 0.2
    PPO(OneQuestion(env), policy, config=config).learn()
    assert float(distribution()[letters].sum()) == pytest.approx(float(optimum[letters].sum()), abs=0.1)


def prepared(policy: LanguageModel, **changes):
    """An agent before its first update, its first responses and their metrics."""
    agent = PPO(make_env(16, Share(ASCII)), policy, config=small_ppo(**changes))
    rollouts, scores, _, collected = agent._collector.collect(agent._loop, 1)
    experience, metrics = agent._prepare(rollouts, scores)
    return agent, experience, {**collected, **metrics}


def all_sums(agent: PPO, experience: Any, rows: torch.Tensor) -> dict[str, torch.Tensor]:
    """The sums of all parts."""
    found: dict[str, torch.Tensor] = {}
    for part in ppo_sums(agent.policy, agent.value_model, experience, rows, agent.config):
        found |= {name: found.get(name, 0.0) + value for name, value in part.items()}
    return found


def test_before_training_the_policy_is_the_reference_and_the_ratio_one(language_model: LanguageModel) -> None:
    _, sampled, drawn = prepared(language_model, temperature=0.7)
    agent, experience, metrics = prepared(language_model, temperature=0.7, recompute_logprobs=True)
    torch.testing.assert_close(sampled.old_logprobs, experience.old_logprobs, rtol=0, atol=1e-5)
    assert abs(drawn["kl/k1"]) < 1e-5
    assert metrics["kl/k1"] == metrics["kl/k3"] == 0
    assert metrics["reward/mean"] == pytest.approx(metrics["score/mean"], abs=1e-7)
    assert not experience.old_values.any()
    sums = all_sums(agent, experience, torch.arange(16))
    num_tokens = len(experience.rollouts.tokens)
    assert float(sums["clip/policy"]) == 0
    assert float(sums["kl/update"]) / num_tokens == pytest.approx(0, abs=1e-6)
    # At ratio 1 the policy loss is −mean(A), and A is normalised over these very tokens.
    assert float(sums["loss/policy"].detach()) / num_tokens == pytest.approx(0, abs=1e-5)
    torch.testing.assert_close(sums["loss"], sums["loss/policy"] + 0.1 * sums["loss/value"])


def test_gradients_of_both_models_do_not_depend_on_micro_batches(language_model: LanguageModel) -> None:
    agent, experience, _ = prepared(language_model)
    total = experience.rollouts.total_lengths
    found = []
    for parts in ([torch.arange(16)], micro_batches(total, int(total.max()))):
        agent._loop.accumulate(
            parts,
            lambda rows: ppo_sums(agent.policy, agent.value_model, experience, rows, agent.config),
            count=len(experience.rollouts.tokens),
        )
        found.append({name: p.grad.clone() for name, p in agent._loop.parameters.items() if p.grad is not None})
        agent._loop._optimizer.zero_grad()
    whole, cut = found
    for name, gradient in whole.items():
        torch.testing.assert_close(cut[name], gradient, rtol=0, atol=1e-5)
    assert {name.split(".")[0] for name, gradient in whole.items() if gradient.abs().max() > 1e-3} == {
        "policy",
        "value",
    }


def test_with_a_zero_head_the_value_loss_is_half_the_mean_squared_return(llama: LanguageModel) -> None:
    agent, experience, _ = prepared(llama, value_clip=None)
    sums = all_sums(agent, experience, torch.arange(16))
    expected = experience.returns.square().sum() / 2
    torch.testing.assert_close(sums["loss/value"].detach(), expected, rtol=1e-5, atol=0)
    # And advantages are normalised over real tokens.
    mask = torch.arange(experience.advantages.shape[1]) < experience.rollouts.lengths[:, None]
    real = experience.advantages[mask]
    assert float(real.mean()) == pytest.approx(0, abs=1e-5)
    assert float(real.var(correction=0)) == pytest.approx(1, abs=1e-5)
    assert not experience.advantages[~mask].any()


def test_equal_scores_give_equal_returns_at_any_length(llama: LanguageModel) -> None:
    agent = PPO(make_env(16, Share("")), llama, config=small_ppo(kl_coef=0.0, whiten_rewards=True))
    rollouts, scores, *_ = agent._collector.collect(agent._loop, 1)
    assert len(set(rollouts.lengths.tolist())) > 1
    experience, _ = agent._prepare(rollouts, torch.ones_like(scores))
    assert len(set(experience.returns[:, 0].tolist())) == 1


def test_unfinished_responses_get_the_missing_eos_score(llama: LanguageModel) -> None:
    agent = PPO(make_env(16), llama, config=small_ppo(missing_eos_score=-3.0, kl_coef=0.0))
    rollouts, scores, *_ = agent._collector.collect(agent._loop, 1)
    experience, _ = agent._prepare(rollouts, scores)
    expected = torch.where(rollouts.finished, scores.float(), torch.tensor(-3.0))
    assert set(rollouts.finished.tolist()) == {True, False}
    torch.testing.assert_close(experience.returns[:, 0], expected)


def test_one_scored_response_is_one_minibatch(llama: LanguageModel) -> None:
    agent = PPO(make_env(16, First(ASCII), on_unscored="truncate"), llama, config=small_ppo(minibatch_size=1))
    updates = list(agent.updates())
    assert [metrics["score/unscored"] for metrics in updates] == [15 / 16, 15 / 16]
    assert all(math.isfinite(metrics["loss"]) for metrics in updates)


def test_processes_with_and_without_scores_stay_together(policy_folder: Path, tmp_path: Path) -> None:
    finish(start_world(train_with_few_scores, policy_folder, tmp_path, size=2))
    first, second = ((tmp_path / rank).read_text() for rank in "01")
    assert first == second
    trained, none, *quark = first.splitlines()
    assert none.startswith("Step 1: none of 16")
    assert all("'step': 2" in said for said in (trained, *quark))


def test_an_adaptive_coefficient_follows_the_measured_kl(llama: LanguageModel) -> None:
    config = small_ppo(kl_coef=0.1, target_kl=1e-3, adaptive_kl_step=0.5, total_steps=3, learning_rate=1e-2)
    first, second, third = PPO(make_env(), llama, config=config).updates()
    assert first["kl/coef"] == 0.1
    assert second["kl/coef"] == pytest.approx(0.09)  # KL 0 is below the target: the largest step down
    assert third["kl/coef"] == pytest.approx(0.099)


def test_an_adaptive_coefficient_rests_where_k1_is_the_target(policy_folder: Path) -> None:
    config = small_ppo(kl_coef=0.1, total_steps=3, learning_rate=1e-2, adaptive_kl_step=0.5)
    measured = [*PPO(make_env(), load_policy(policy_folder), config=config).updates()][1]
    config = replace(config, target_kl=measured["kl/k1"])  # in the first step there is no KL to weigh
    _, second, third = PPO(make_env(), load_policy(policy_folder), config=config).updates()
    assert third["kl/coef"] == pytest.approx(second["kl/coef"])


def test_two_rounds_of_an_environment_are_one_of_twice_its_size(llama: LanguageModel) -> None:
    agents = (PPO(make_env(num), llama, config=small_ppo()) for num in (16, 8))
    once, twice = (agent._collector.collect(agent._loop, 1)[0] for agent in agents)
    assert (once.instructions, once.texts) == (twice.instructions, twice.texts)


def test_all_parts_of_both_models_move_and_what_the_environment_reports_is_averaged(llama: LanguageModel) -> None:
    env = make_env()
    agent = PPO(env, llama, config=small_ppo())
    before = {name: p.detach().clone() for name, p in agent._loop.parameters.items()}
    with env.also_scored_by("gold_reward", Share("e")):
        for metrics in agent.updates():
            assert 0 <= metrics["info/gold_reward"] <= 1
            assert metrics["info/reward_components/share"] == pytest.approx(metrics["score/mean"])
            assert 0 <= metrics["finished"] <= 1
            assert 1 <= metrics["tokens/mean"] <= 16
    moved = [name for name, p in agent._loop.parameters.items() if not torch.equal(p, before[name])]
    assert all(any(name.startswith(part) for name in moved) for part in ("policy.", "value.trunk.", "value.head."))


def test_an_environment_that_does_not_fit_is_refused(llama: LanguageModel) -> None:
    with pytest.raises(ValueError, match="DISABLED.*SAME_STEP"):
        PPO(make_env(autoreset_mode=AutoresetMode.SAME_STEP), llama, config=small_ppo())
    with pytest.raises(ValueError, match="num_envs.* 5, got 16"):
        PPO(make_env(5), llama, config=small_ppo())


def test_unscored_responses_are_left_out_and_counted(llama: LanguageModel) -> None:
    env = make_env(16, Picky(ASCII), on_unscored="truncate")
    agent = PPO(env, llama, config=small_ppo())
    rollouts, scores, _, metrics = agent._collector.collect(agent._loop, 1)
    assert all(len(text) % 2 for text in rollouts.texts)
    assert len(rollouts) == len(scores) == 16 * (1 - metrics["score/unscored"])
    assert 0 < metrics["score/unscored"] < 1
    assert not scores.isnan().any()
    assert metrics["score/mean"] == pytest.approx(float(scores.mean()))
    assert [m["step"] for m in agent.updates()] == [1, 2]


def test_a_reward_for_all_is_not_taken_for_one_each(llama: LanguageModel) -> None:
    class Mean(gym.vector.VectorWrapper):  # type: ignore[type-arg]
        def step(self, actions):
            observations, rewards, *rest = self.env.step(actions)
            return observations, rewards.mean(), *rest

    agent = PPO(Mean(make_env(16, Share(ASCII))), llama, config=small_ppo())
    with pytest.raises(OracleError, match=r"16 rows .*\(\)"):
        next(agent.updates())


def test_a_wrapper_around_lists_of_infos_is_refused(llama: LanguageModel) -> None:
    with pytest.raises(ValueError, match="DictInfoToList"):
        PPO(gym.vector.VectorWrapper(DictInfoToList(make_env(16, Share(ASCII)))), llama, config=small_ppo())
