import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from agent_worlds import gradients, prepared
from agent_worlds import small_quark as small
from tiny_worlds import ASCII, TEXTS, First, Picky, Share, assert_near, build_tokenizer, make_env, move
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from alpacafarm_env.agents.collecting import places
from alpacafarm_env.agents.language_model import LanguageModel
from alpacafarm_env.agents.prompts import control_tokens, own_control_token
from alpacafarm_env.agents.quark import Quark, quantile_labels, quark_sums, without_eos
from alpacafarm_env.agents.rollouts import Rollouts


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    """A fresh one for each test: control tokens are added to it."""
    return build_tokenizer()


def truth(policy: LanguageModel, prompt: list[int], response: list[int]) -> Tensor:
    """Log-probabilities [T] of a response behind a prompt: one row, no pad, the model called by hand."""
    with torch.no_grad():
        logits = policy.model(input_ids=torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
    logits = logits.index_fill(-1, torch.tensor(control_tokens(policy.model), dtype=torch.long), -torch.inf)
    return logits.log_softmax(-1)[torch.arange(len(response)), response]


@pytest.mark.parametrize(
    ("scores", "num_quantiles", "labels"),
    [
        # AlpacaFarm's pool, run by hand: the best of four quantiles holds items 5 and 9, the last takes the remainder.
        ([0.3, 0.9, -1, 0.5, 0.9, 2, 0.1, 0, -2, 1.5], 4, [2, 1, 3, 2, 1, 0, 3, 3, 3, 0]),
        ([0, 0, 0, 0, 0, 0], 3, [0, 0, 1, 1, 2, 2]),  # equal scores go by position
        ([1, 2, 1, 2], 2, [1, 0, 1, 0]),
        ([1, 1, 2, 1], 2, [0, 1, 0, 1]),
    ],
)
def test_quantiles_by_hand(scores: list[float], num_quantiles: int, labels: list[int]) -> None:
    assert quantile_labels(torch.tensor(scores), num_quantiles).tolist() == labels


def test_scores_that_cannot_be_sorted_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\(2,\) with 1 NaN"):
        quantile_labels(torch.tensor([1.0, math.nan]), 2)


@pytest.mark.parametrize(("minibatch_size", "sizes"), [(2, [2, 2, 2, 2]), (3, [2, 2, 2, 2]), (256, [4, 4])])
def test_an_update_takes_a_minibatch_at_most(
    llama: LanguageModel, monkeypatch: pytest.MonkeyPatch, minibatch_size: int, sizes: list[int]
) -> None:
    agent, _, _, pool, _ = prepared(llama, minibatch_size=minibatch_size)
    taken = []
    update = agent._loop.update

    def watched(micro: list[Tensor], sums: Any, *, count: float) -> dict[str, float]:
        rows = torch.cat(micro)
        assert count == int(pool.read.lengths[rows].sum())
        taken.append(len(rows))
        return update(micro, sums, count=count)

    monkeypatch.setattr(agent._loop, "update", watched)
    next(agent.updates())
    assert taken == sizes


@pytest.mark.parametrize("best_quantile_only", [True, False])
def test_the_loss_is_nll_plus_exact_kl_of_unpadded_rows(
    language_model: LanguageModel, best_quantile_only: bool
) -> None:
    """By hand: one row at a time, no pads, the reference without a control token, the KL a sum over the vocabulary."""
    agent, _, _, pool, _ = prepared(language_model, best_quantile_only=best_quantile_only, kl_coef=0.3)
    move(agent.policy)
    rows = torch.from_numpy(pool.trained)
    assert len(set(pool.read.total_lengths[rows].tolist())) > 1  # so a batch of them has pads
    assert len(set(pool.read.prompt_lengths[rows].tolist())) > 1
    nll, kl = 0.0, 0.0
    words = [v for v in range(len(agent.policy.tokenizer)) if v not in control_tokens(agent.policy.model)]
    for row in rows.tolist():
        one, plain = pool.read[[row]], pool.plain[[row]]
        response = one.tokens.tolist()
        ids = [torch.cat((r.prompt_tokens, r.tokens))[None] for r in (one, plain)]
        assert agent.policy.reference is not None
        with torch.no_grad():
            logits = agent.policy.model(input_ids=ids[0]).logits[0, -len(response) - 1 : -1][:, words]
            ref_logits = agent.policy.reference(input_ids=ids[1]).logits[0, -len(response) - 1 : -1][:, words]
        p, q = logits.double().softmax(-1), ref_logits.double().softmax(-1)
        nll -= float(p[torch.arange(len(response)), response].log().sum())
        kl += float((p * (p / q).log()).sum())
    with torch.no_grad():
        sums = quark_sums(agent.policy, pool, rows, agent.config)
    assert float(sums["loss/nll"]) == pytest.approx(nll, rel=1e-5)
    assert float(sums["loss/kl"]) == pytest.approx(kl, rel=1e-4)
    assert kl > 0.01
    assert float(sums["loss"]) == pytest.approx(nll + 0.3 * kl, rel=1e-5)


@pytest.mark.parametrize("train_eos", [True, False])
def test_eos_is_a_target_unless_it_is_switched_off(llama: LanguageModel, train_eos: bool) -> None:
    agent, rollouts, _, pool, _ = prepared(llama, num_quantiles=1, train_eos=train_eos)
    assert set(rollouts.finished.tolist()) == {True, False}
    rows = [i for i in pool.trained.tolist() if rollouts.finished[i]]
    expected, num_tokens = 0.0, 0
    for row in rows:
        one = rollouts[[row]]
        tokens = one.tokens.tolist()
        assert tokens[-1] == llama.tokenizer.eos_token_id
        logprobs = truth(llama, one.prompt_tokens.tolist(), tokens)
        kept = logprobs if train_eos else logprobs[:-1]
        expected, num_tokens = expected - float(kept.sum()), num_tokens + len(kept)
    found = quark_sums(agent.policy, pool, torch.tensor(rows), agent.config)["loss/nll"]
    assert float(found.detach()) == pytest.approx(expected, rel=1e-5)
    assert int(pool.read.lengths[rows].sum()) == num_tokens
    cut = without_eos(rollouts)
    assert not cut.finished.any()
    for row, finished in enumerate(rollouts.finished.tolist()):
        whole = rollouts[[row]].tokens.tolist()
        less = whole[:-1] if finished else whole
        assert cut[[row]].tokens.tolist() == less
        assert pool.read[[row]].tokens.tolist() == (whole if train_eos else less)


def test_responses_that_say_nothing_cannot_be_learned_without_eos(llama: LanguageModel) -> None:
    eos = llama.tokenizer.eos_token_id
    agent, rollouts, scores, _, _ = prepared(llama, train_eos=False)
    silent = replace(
        rollouts,
        tokens=torch.full((16,), eos),
        lengths=torch.ones(16, dtype=torch.int64),
        logprobs=torch.zeros(16),
        finished=torch.ones(16, dtype=torch.bool),
    )
    with pytest.raises(ValueError, match="Step 7.*train_eos=False"):
        agent._prepare(7, silent, scores, np.arange(16))
    one_word = Rollouts.cat([rollouts[[3]], silent[list(range(15))]])
    pool, _ = agent._prepare(7, one_word, torch.ones(16), np.arange(16))
    assert pool.trained.tolist() == [0]  # of the best four, three are empty


@pytest.mark.parametrize("best_quantile_only", [True, False])
def test_gradients_do_not_depend_on_micro_batches_nor_on_a_kl_of_zero(
    llama: LanguageModel, best_quantile_only: bool
) -> None:
    agent, _, _, pool, metrics = prepared(llama, best_quantile_only=best_quantile_only, num_quantiles=2, kl_coef=100.0)
    if best_quantile_only:  # before training the policy is the reference: there is nothing to pull
        pulled, means = gradients(agent, pool)
        agent.config = replace(agent.config, kl_coef=0.0)
        assert means["loss/kl"] == pytest.approx(0, abs=1e-6)
        assert abs(metrics["kl/k1"]) < 1e-5
        assert_near(pulled, gradients(agent, pool)[0], atol=1e-4)
    agent.config = replace(agent.config, kl_coef=0.05)
    move(agent.policy)
    whole, means = gradients(agent, pool)
    parts, summed = gradients(agent, pool, micro_batch_tokens=int(pool.read.total_lengths.max()))
    assert_near(parts, whole, atol=1e-6)
    assert summed == pytest.approx(means, rel=1e-5)


def test_every_quantile_is_read_behind_its_token_and_the_reference_reads_none(llama: LanguageModel) -> None:
    plain_prompts = {text: llama.encode_prompts([text])[0] for text in TEXTS}
    agent, rollouts, scores, pool, _ = prepared(llama, best_quantile_only=False)
    tokens, bos = agent._tokens, llama.tokenizer.bos_token_id
    assert llama.tokenizer.convert_ids_to_tokens(list(tokens)) == [f"<reward_{k}>" for k in range(4)]
    assert own_control_token(llama.model) == tokens[0]
    assert pool.trained.tolist() == list(range(16))
    labels = quantile_labels(scores, 4).tolist()
    assert sorted(set(labels)) == [0, 1, 2, 3]
    for row, (text, label) in enumerate(zip(rollouts.instructions, labels, strict=True)):
        plain = plain_prompts[text]
        assert pool.plain[[row]].prompt_tokens.tolist() == plain
        assert pool.read[[row]].prompt_tokens.tolist() == [bos, tokens[label], *plain[1:]]
        assert rollouts[[row]].prompt_tokens.tolist() == [bos, tokens[0], *plain[1:]]  # sampled as the best
    assert torch.equal(pool.read.tokens, pool.plain.tokens)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_asked_for_the_best_quantile_it_answers_so(llama: LanguageModel, seed: int) -> None:
    """Trained on all quantiles alike, so what rises has been learned behind <reward_0>."""
    sizes = {"total_steps": 4, "rollout_batch_size": 64, "minibatch_size": 64, "max_response_tokens": 1}
    quantiles = {"num_quantiles": 2, "num_epochs": 8, "best_quantile_only": False}
    config = small(**sizes, **quantiles, learning_rate=1e-2, schedule="constant", kl_coef=0.0)
    updates = list(Quark(make_env(64, Share(ASCII, size=1)), llama, config=config, seed=seed).updates())
    assert updates[0]["score/mean"] < 0.55
    assert updates[-1]["score/mean"] > updates[0]["score/mean"] + 0.25


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
    rollouts, scores, numbers, metrics = agent._collector.collect(agent._loop, 1)
    pool, _ = agent._prepare(1, rollouts, scores, numbers)
    assert 0 < metrics["score/unscored"] < 1
    assert len(pool.trained) == len(scores) // 4
    assert all(len(rollouts.texts[row]) % 2 for row in places(pool.numbers, pool.trained))
    assert [m["step"] for m in agent.updates()] == [1, 2]
    oracle = First(ASCII)
    oracle.num_scored = 2  # fewer than there are quantiles leave the best one
    agent = Quark(make_env(16, oracle, on_unscored="truncate"), llama, config=small())
    rollouts, scores, numbers, _ = agent._collector.collect(agent._loop, 1)
    pool, _ = agent._prepare(1, rollouts, scores, numbers)
    assert pool.trained.tolist() == [int(scores.argmax())]
