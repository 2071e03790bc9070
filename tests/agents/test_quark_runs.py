import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from quark_worlds import prepared, small, train_where_one_has_no_score
from tiny_models import build_tokenizer
from tiny_worlds import ASCII, First, Picky, Share, finish, load_policy, make_env, move, start_world
from transformers import PreTrainedTokenizerFast

from alpacafarm_env.agents.language_model import LanguageModel
from alpacafarm_env.agents.quark import Quark


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    """A fresh one for each test: control tokens are added to it."""
    return build_tokenizer()


# Runs ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_the_share_of_a_target_token_rises(llama: LanguageModel, seed: int) -> None:
    sizes = {"total_steps": 16, "rollout_batch_size": 64, "minibatch_size": 16, "max_response_tokens": 4}
    config = small(**sizes, learning_rate=1e-2, schedule="constant", kl_coef=0.0)
    updates = list(Quark(make_env(64, Share("e")), llama, config=config, seed=seed).updates())
    assert updates[0]["score/mean"] < 0.1
    assert updates[-1]["score/mean"] > updates[0]["score/mean"] + 0.5


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_asked_for_the_best_quantile_it_answers_so(llama: LanguageModel, seed: int) -> None:
    """Trained on all quantiles alike, so what rises has been learned behind <reward_0>."""
    sizes = {"total_steps": 4, "rollout_batch_size": 64, "minibatch_size": 64, "max_response_tokens": 1}
    quantiles = {"num_quantiles": 2, "num_epochs": 8, "best_quantile_only": False}
    config = small(**sizes, **quantiles, learning_rate=1e-2, schedule="constant", kl_coef=0.0)
    updates = list(Quark(make_env(64, Share(ASCII, size=1)), llama, config=config, seed=seed).updates())
    assert updates[0]["score/mean"] < 0.55
    assert updates[-1]["score/mean"] > updates[0]["score/mean"] + 0.25


def test_the_kl_term_holds_the_policy_back(policy_folder: Path) -> None:
    config = small(total_steps=6, rollout_batch_size=32, minibatch_size=8, learning_rate=5e-3, schedule="constant")
    drift = {}
    for kl_coef in (0.0, 2.0):
        agent = Quark(make_env(32), load_policy(policy_folder), config=replace(config, kl_coef=kl_coef))
        drift[kl_coef] = agent.learn()["kl/k3"]
    assert drift[2.0] < 0.5 * drift[0.0]


def test_metrics_are_those_of_ppo_where_they_exist(llama: LanguageModel) -> None:
    env = make_env()
    with env.also_scored_by("gold_reward", Share("e")):
        first, second = Quark(env, llama, config=small(learning_rate=1e-2)).updates()
    for name in ("score/std", "finished", "tokens/mean", "entropy", "grad_norm", "learning_rate", "info/gold_reward"):
        assert math.isfinite(first[name])
    assert first["loss"] == pytest.approx(first["loss/nll"] + 0.05 * first["loss/kl"])
    assert first["score/best_quantile"] > first["score/mean"]
    assert first["kl/k1"] == pytest.approx(0, abs=1e-5)
    assert second["kl/k3"] > 0
    assert second["loss/kl"] > 0


def test_drift_is_the_sum_over_each_response(llama: LanguageModel) -> None:
    agent, rollouts, _, _, metrics = prepared(llama, micro_batch_tokens=128)
    move(agent.policy, 1.1)
    with torch.no_grad():
        now = agent.policy.logprobs(rollouts)
        reference = agent.policy.logprobs(rollouts, role="reference")
        drift = agent._drift(replace(rollouts, logprobs=now))
    assert metrics["kl/k1"] == pytest.approx(0, abs=1e-5)
    assert drift["kl/k1"] == pytest.approx(float((now - reference).double().sum()) / 16, rel=1e-4)
    assert drift["entropy"] == pytest.approx(-float(now.double().mean()), rel=1e-5)


def test_unscored_responses_are_no_part_of_the_pool(llama: LanguageModel) -> None:
    agent = Quark(make_env(16, Picky(ASCII), on_unscored="truncate"), llama, config=small())
    rollouts, scores, numbers, metrics = agent._collector.collect(1)
    pool, _ = agent._prepare(1, rollouts, scores, numbers)
    assert 0 < metrics["score/unscored"] < 1
    assert len(pool.trained) == len(scores) // 4
    assert all(len(rollouts.texts[row]) % 2 for row in pool.own(pool.trained))
    assert [m["step"] for m in agent.updates()] == [1, 2]
    oracle = First(ASCII)
    oracle.num_scored = 2  # fewer than there are quantiles leave the best one
    agent = Quark(make_env(16, oracle, on_unscored="truncate"), llama, config=small())
    rollouts, scores, numbers, _ = agent._collector.collect(1)
    pool, _ = agent._prepare(1, rollouts, scores, numbers)
    assert pool.trained.tolist() == [int(scores.argmax())]


# Processes -------------------------------------------------------------------------------------------------------


def test_a_process_without_scores_takes_part(policy_folder: Path, tmp_path: Path) -> None:
    finish(start_world(train_where_one_has_no_score, policy_folder, tmp_path, size=2))
    first, second = ((tmp_path / rank).read_text() for rank in "01")
    assert first == second
    assert first.count("'step': 2") == 2
