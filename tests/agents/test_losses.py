"""Losses against hand-computed numbers and Stable-Baselines3."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from stable_baselines3.common.buffers import RolloutBuffer
from torch import Tensor

from alpacafarm_env.agents.losses import (
    KL_ESTIMATORS,
    adaptive_kl_coef,
    exact_kl,
    gae,
    kl_estimate,
    masked_mean,
    missing_eos_penalty,
    nll_loss,
    pairwise_loss,
    place_scores,
    policy_clipped,
    ppo_policy_loss,
    ppo_value_loss,
    shape_rewards,
    value_clipped,
    whiten,
)

LN2 = 0.69314718
logit_rows = npst.arrays(np.float64, st.integers(2, 6).map(lambda size: (2, size)), elements=st.floats(-5, 5))


def close(actual: Tensor, expected: object, atol: float = 1e-6) -> None:
    torch.testing.assert_close(actual, torch.as_tensor(expected, dtype=actual.dtype), atol=atol, rtol=0)


def gradient(loss: Callable[[Tensor], Tensor], at: list[float]) -> list[float]:
    x = torch.tensor(at, requires_grad=True)
    return torch.autograd.grad(loss(x).sum(), x)[0].tolist()


# ------------------------------------------------------------------------------------------------------------------- KL


def test_kl_estimates_by_hand() -> None:
    logprobs, ref_logprobs = torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -1.0])  # d = 0.5, -1
    for kind, expected in {
        "k1": [0.5, -1.0],
        "k2": [0.125, 0.5],
        "k3": [0.1065307, 0.7182818],  # e^-0.5 - 1 + 0.5, e - 1 - 1
        "clamped_k1": [0.5, 0.0],
    }.items():
        close(kl_estimate(logprobs, ref_logprobs, kind), expected)


@pytest.mark.parametrize("kind", KL_ESTIMATORS)
def test_equal_policies_have_no_kl_and_no_penalty(kind: str) -> None:
    logprobs, mask = torch.tensor([[-0.3, -7.1, -2.2]]), torch.tensor([[True, True, True]])
    assert kl_estimate(logprobs, logprobs, kind).tolist() == [[0, 0, 0]]
    rewards, kl = shape_rewards(torch.tensor([0.7]), logprobs, logprobs, mask, kl_coef=0.5, kind=kind)
    close(rewards, [[0, 0, 0.7]], atol=0)
    assert not kl.any()


def test_estimators_of_a_gaussian_log_ratio() -> None:
    """d ~ N(σ²/2, σ), σ = 0.1: the KL is σ²/2 = .005; the clamp's mean is σφ(σ/2) + σ²/2 Φ(σ/2) = .0424."""
    num, sigma = 400_000, 0.1
    ratio = sigma**2 / 2 + sigma * torch.randn(num, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    zeros = torch.zeros_like(ratio)
    for kind, mean, std in (
        ("k1", 0.005, 0.1),
        ("k3", 0.005, 0.0071),
        ("k2", 0.0050, 0.0072),
        ("clamped_k1", 0.0424, 0.06),
    ):
        estimate = kl_estimate(ratio, zeros, kind)
        assert estimate.mean().item() == pytest.approx(mean, abs=4 * std / math.sqrt(num) + 5e-5), kind
        assert estimate.std().item() == pytest.approx(std, rel=0.05), kind


@settings(max_examples=60, deadline=None)
@given(logit_rows)
def test_k1_and_k3_have_the_exact_kl_as_their_expectation(logits: np.ndarray) -> None:
    pi, ref = torch.tensor(logits)
    log_pi, log_ref = pi.log_softmax(-1), ref.log_softmax(-1)
    kl = exact_kl(pi, ref)
    assert kl.item() >= -1e-12
    for kind in ("k1", "k3"):
        close((log_pi.exp() * kl_estimate(log_pi, log_ref, kind)).sum(), kl, atol=1e-10)
    for kind in ("k2", "k3", "clamped_k1"):
        assert (kl_estimate(log_pi.float(), log_ref.float(), kind) >= 0).all()


def test_sampled_k1_and_k3_agree_with_the_exact_kl() -> None:
    generator = torch.Generator().manual_seed(1)
    logits, ref_logits = torch.randn(2, 50, generator=generator, dtype=torch.float64)
    tokens = torch.multinomial(logits.softmax(-1), 20_000, replacement=True, generator=generator)
    sampled, ref = logits.log_softmax(-1)[tokens], ref_logits.log_softmax(-1)[tokens]
    for kind in ("k1", "k3"):
        estimate = kl_estimate(sampled, ref, kind)
        standard_error = estimate.std().item() / math.sqrt(len(tokens))
        assert estimate.mean().item() == pytest.approx(exact_kl(logits, ref_logits).item(), abs=4 * standard_error)


def test_exact_kl_golden_and_forbidden_tokens() -> None:
    logits = torch.tensor([[1.0, 0.0, -1.0]], requires_grad=True)
    close(exact_kl(logits, torch.tensor([[0.5, 0.5, -1.0]])), [0.1015666])
    never = torch.tensor([[1.0, 0.0, -1.0, -torch.inf]], requires_grad=True)
    kl = exact_kl(never, torch.tensor([[0.5, 0.5, -1.0, -torch.inf]]))
    close(kl, [0.1015666])
    assert torch.autograd.grad(kl.sum(), never)[0].isfinite().all()


def test_adaptive_kl_coef() -> None:
    assert adaptive_kl_coef(0.2, 12, target=6, step_size=0.1) == pytest.approx(0.204, abs=1e-12)
    assert adaptive_kl_coef(0.204, 3, target=6, step_size=0.1) == pytest.approx(0.19992, abs=1e-12)
    assert adaptive_kl_coef(1.0, 12, target=6, step_size=512 / 10_000) == pytest.approx(1.01024, abs=1e-12)
    assert adaptive_kl_coef(1.0, 6.6, target=6, step_size=0.1) == pytest.approx(1.01, abs=1e-12)  # inside the clip
    with pytest.raises(ValueError, match="positive KL"):
        adaptive_kl_coef(0.2, 1.0, target=0, step_size=0.1)


def test_unknown_kl_estimator_is_named() -> None:
    with pytest.raises(ValueError, match=r"k4.*k1"):
        kl_estimate(torch.zeros(1), torch.zeros(1), "k4")


# ----------------------------------------------------------------------------------------------------- rewards, returns


def test_scores_land_on_the_last_real_token_whichever_side_is_padded() -> None:
    mask = torch.tensor([[True, True, False], [False, True, True], [True, False, False]])
    assert place_scores(torch.tensor([1.0, 2.0, 3.0]), mask).tolist() == [[0, 1, 0], [0, 0, 2], [3, 0, 0]]


def test_a_process_without_rows_has_nothing_to_do_and_does_not_fail() -> None:
    nothing, mask = torch.zeros(0, 0), torch.zeros(0, 0, dtype=torch.bool)
    rewards, _ = shape_rewards(torch.zeros(0), nothing, nothing, mask, kl_coef=0.1)
    advantages, _ = gae(rewards, nothing, mask)
    assert whiten(advantages, mask).shape == (0, 0)


def test_rewards_that_cannot_be_placed_are_refused() -> None:
    mask = torch.tensor([[True, True], [False, False]])
    with pytest.raises(ValueError, match=r"rows \[1\]"):
        place_scores(torch.tensor([1.0, 2.0]), mask)
    with pytest.raises(ValueError, match=r"NaN.*rows \[0\]"):
        place_scores(torch.tensor([math.nan, 2.0]), mask)
    with pytest.raises(ValueError, match=r"scores \[B\]"):
        place_scores(torch.zeros(3), mask)


def test_what_stands_at_pads_does_not_matter() -> None:
    mask = torch.tensor([[True, True, False]])
    logprobs, ref_logprobs = torch.tensor([[-1.0, -2.0, math.nan]]), torch.tensor([[-1.5, -1.0, -math.inf]])
    rewards, kl = shape_rewards(torch.tensor([2.0]), logprobs, ref_logprobs, mask, kl_coef=0.1)
    close(kl, [[0.5, -1.0, 0]])
    close(rewards, [[-0.05, 2.1, 0]])
    advantages, returns = gae(rewards, torch.tensor([[1.0, 1.0, math.nan]]), mask)
    close(returns, [[2.05, 2.1, 0]])
    close(advantages, [[1.05, 1.1, 0]])


def test_missing_eos_penalty_sets_or_subtracts_and_keeps_the_unscored() -> None:
    scores, finished = torch.tensor([1.0, 2.0, math.nan]), torch.tensor([True, False, False])
    for how, value, expected in (("set", -1.0, -1.0), ("subtract", 1.5, 0.5)):
        penalised = missing_eos_penalty(scores, finished, value=value, how=how)  # type: ignore[arg-type]
        assert penalised[:2].tolist() == [1.0, expected]
        assert penalised[2].isnan()
    with pytest.raises(ValueError, match="subtract"):
        missing_eos_penalty(scores, finished, value=1.0, how="substract")  # type: ignore[arg-type]


def test_gae_golden() -> None:
    advantages, returns = gae(torch.tensor([[0.0, 0, 1]]), torch.tensor([[0.5, 0.4, 0.3]]), gamma=1.0, lam=0.95)
    close(advantages, [[0.43675, 0.565, 0.7]])
    close(returns, [[0.93675, 0.965, 1.0]])


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (1.0, 0.95), (0.99, 0.9)])
def test_gae_equals_stable_baselines3(gamma: float, lam: float) -> None:
    """Rows of 1 to 12 tokens laid end to end in SB3's buffer are our ragged rows; same operations, no difference."""
    generator = torch.Generator().manual_seed(7)
    lengths = [12, 1, 5, 3, 12, 7]
    rewards, values = torch.randn(2, 6, 12, generator=generator)
    mask = torch.arange(12)[None] < torch.tensor(lengths)[:, None]
    buffer = RolloutBuffer(sum(lengths), Box(0, 1, (1,)), Discrete(2), "cpu", gae_lambda=lam, gamma=gamma)
    buffer.rewards[:, 0], buffer.values[:, 0] = rewards[mask].numpy(), values[mask].numpy()
    buffer.episode_starts[np.cumsum([0, *lengths[:-1]]), 0] = 1
    buffer.compute_returns_and_advantage(torch.zeros(1), np.ones(1))
    advantages, returns = gae(rewards, values, mask, gamma=gamma, lam=lam)
    assert np.abs(advantages[mask].numpy() - buffer.advantages[:, 0]).max() == 0.0
    assert np.abs(returns[mask].numpy() - buffer.returns[:, 0]).max() == 0.0


@settings(max_examples=40, deadline=None)
@given(npst.arrays(np.float64, st.integers(1, 8).map(lambda t: (2, 1, t)), elements=st.floats(-10, 10)), st.data())
def test_gae_limits_and_padding(x: np.ndarray, data: st.DataObject) -> None:
    rewards, values = torch.tensor(x)
    to_go = rewards.flip(1).cumsum(1).flip(1)
    close(gae(rewards, values, gamma=1.0, lam=1.0)[0], to_go - values, atol=1e-9)
    following = torch.nn.functional.pad(values[:, 1:], (0, 1))
    close(gae(rewards, values, gamma=0.9, lam=0.0)[0], rewards + 0.9 * following - values, atol=1e-9)
    # pads anywhere, between tokens too, change nothing
    places = data.draw(st.permutations(range(12)))[: rewards.shape[1]]
    mask = torch.zeros(1, 12, dtype=torch.bool)
    mask[0, places] = True
    wide_rewards, wide_values = torch.full((2, 1, 12), math.nan, dtype=torch.float64)
    wide_rewards[mask], wide_values[mask] = rewards[0], values[0]
    padded = gae(wide_rewards, wide_values, mask, gamma=0.9, lam=0.8)
    for wide, narrow in zip(padded, gae(rewards, values, gamma=0.9, lam=0.8), strict=True):
        assert torch.equal(wide[mask], narrow[0])
        assert not wide[~mask].any()


# --------------------------------------------------------------------------------------------------------------- losses


def test_ppo_policy_loss_golden() -> None:
    logprobs, advantages = torch.tensor([1.3, 0.7, 1.0]).log(), torch.tensor([1.0, -1.0, 2.0])
    close(ppo_policy_loss(logprobs, torch.zeros(3), advantages, clip=0.2), [-1.2, 0.8, -2.0])
    clipped = policy_clipped(logprobs, torch.zeros(3), advantages, clip=0.2)
    assert clipped.tolist() == [True, True, False]
    close(masked_mean(clipped), 2 / 3)
    close(ppo_policy_loss(logprobs, torch.zeros(3), advantages, clip=math.inf), [-1.3, 0.7, -2.0])


def test_first_minibatch_has_ratio_1() -> None:
    generator = torch.Generator().manual_seed(2)
    logprobs = -torch.rand(4, 5, generator=generator)
    mask = torch.arange(5)[None] < torch.tensor([5, 2, 1, 4])[:, None]
    advantages = whiten(torch.randn(4, 5, generator=generator), mask)
    loss = ppo_policy_loss(logprobs, logprobs, advantages)
    close(masked_mean(loss, mask), 0.0)  # -mean(A), and A is whitened
    assert torch.equal(loss, -advantages)
    assert not policy_clipped(logprobs, logprobs, advantages).any()
    assert not kl_estimate(logprobs, logprobs, "k3").any()


def test_policy_gradient_at_ratio_1_is_that_of_the_score_function() -> None:
    logits, advantages = torch.randn(6, 9, generator=torch.Generator().manual_seed(4)), torch.linspace(-2, 2, 6)

    def logprobs(x: Tensor) -> Tensor:
        return x.log_softmax(-1)[:, 3]

    x = logits.clone().requires_grad_()
    old = logprobs(logits)
    ppo = torch.autograd.grad(ppo_policy_loss(logprobs(x), old, advantages).mean(), x)[0]
    reinforce = torch.autograd.grad(-(advantages * logprobs(x)).mean(), x)[0]
    torch.testing.assert_close(ppo, reinforce, atol=1e-7, rtol=0)


def test_policy_gradient_signs_and_where_the_clip_stops_it() -> None:
    def slope(ratio: float, advantage: float) -> float:
        old, gain = torch.zeros(1), torch.tensor([advantage])
        return gradient(lambda x: ppo_policy_loss(x, old, gain, clip=0.2), [math.log(ratio)])[0]

    assert slope(1.0, 1.0) == pytest.approx(-1.0, abs=1e-6)  # descending raises a good token's logprob
    assert slope(1.0, -1.0) == pytest.approx(1.0, abs=1e-6)
    assert slope(1.3, 1.0) == 0.0  # already raised enough
    assert slope(0.7, -1.0) == 0.0
    assert slope(1.3, -1.0) == pytest.approx(1.3, abs=1e-6)  # moved the wrong way: the clip must not save it
    assert slope(0.7, 1.0) == pytest.approx(-0.7, abs=1e-6)


def test_ppo_value_loss_by_hand() -> None:
    values, old_values, returns = torch.tensor([0.1, 0.5, 0.5]), torch.zeros(3), torch.tensor([1.0, 1.0, 0.0])
    # inside the clip: .5 * .81; clipped to .2: .5 * max(.25, .64); away from the return: .5 * max(.25, .04)
    close(ppo_value_loss(values, old_values, returns, clip=0.2), [0.405, 0.32, 0.125])
    assert value_clipped(values, old_values, returns, clip=0.2).tolist() == [False, True, False]
    slopes = gradient(lambda x: ppo_value_loss(x, old_values, returns, clip=0.2), [0.1, 0.5, 0.5])
    assert slopes == pytest.approx([-0.9, 0.0, 0.5], abs=1e-6)


def test_value_loss_of_a_zero_head_is_half_the_mean_squared_return() -> None:
    returns, zeros = torch.tensor([15.0, -3.0, 1.0]), torch.zeros(3)
    close(ppo_value_loss(zeros, zeros, returns).mean(), (225 + 9 + 1) / 6, atol=1e-5)
    assert not value_clipped(zeros, zeros, returns).any()


def test_pairwise_loss_by_hand() -> None:
    zeros = torch.zeros(2)
    close(pairwise_loss(zeros, zeros), [LN2, LN2])  # a zero head, or equal texts
    close(pairwise_loss(torch.tensor([2.0]), torch.tensor([1.0])), [0.3132617])  # log(1 + e^-1)
    close(pairwise_loss(torch.tensor([2.0]), torch.tensor([1.0]), torch.tensor([0.75])), [0.5632617])  # + .25 * 1
    assert pairwise_loss(torch.tensor([-200.0]), torch.tensor([200.0])).item() == 400.0  # no overflow
    assert gradient(lambda x: pairwise_loss(x, torch.zeros(1)), [0.0]) == [-0.5]
    assert gradient(lambda x: pairwise_loss(torch.zeros(1), x), [0.0]) == [0.5]


@settings(max_examples=60, deadline=None)
@given(st.floats(-20, 20), st.floats(-20, 20), st.floats(0, 1))
def test_pairwise_loss_is_symmetric_and_least_at_the_target(a: float, b: float, target: float) -> None:
    chosen, rejected, targets = (torch.tensor([x], dtype=torch.float64) for x in (a, b, target))
    loss = pairwise_loss(chosen, rejected, targets)
    close(loss, pairwise_loss(rejected, chosen, 1 - targets), atol=1e-9)
    # softplus drops its tail of exp(-20) = 2e-9 beyond 20
    close(pairwise_loss(chosen, rejected), pairwise_loss(chosen, rejected, torch.ones_like(targets)), atol=3e-9)
    entropy = torch.special.entr(targets) + torch.special.entr(1 - targets)
    assert loss.item() >= entropy.item() - 1e-9  # equal where σ(Δ) = target
    if 0.01 < target < 0.99:
        close(pairwise_loss(torch.special.logit(targets), torch.zeros_like(targets), targets), entropy, atol=1e-9)


def test_pairwise_targets_are_probabilities() -> None:
    with pytest.raises(ValueError, match=r"\[0, 1\].*2\.0"):
        pairwise_loss(torch.zeros(2), torch.zeros(2), torch.tensor([1.0, 2.0]))


def test_nll_of_an_untrained_model_is_ln_of_its_vocabulary() -> None:
    logprobs = torch.zeros(3, 2048).log_softmax(-1)[:, 5]
    close(nll_loss(logprobs).mean(), 7.6246190, atol=1e-5)  # ln 2048
    assert gradient(nll_loss, [-1.0, -2.0]) == [-1.0, -1.0]


@pytest.mark.parametrize(
    "call",
    [
        kl_estimate,
        lambda x, y: ppo_policy_loss(x, y, y),
        lambda x, y: ppo_value_loss(x, x, y),
        lambda x, y: pairwise_loss(x[0], y[0]),
        gae,
        exact_kl,
    ],
)
def test_tensors_that_would_broadcast_are_refused(call: Callable[[Tensor, Tensor], object]) -> None:
    with pytest.raises(ValueError, match="one shape"):
        call(torch.zeros(2, 3), torch.zeros(2, 1))


# --------------------------------------------------------------------------------------- invariance to the micro-batch


def test_gradients_do_not_depend_on_the_micro_batch() -> None:
    """Sixteen ragged rows through a linear policy and value head, padded to each micro-batch's longest row."""
    generator = torch.Generator().manual_seed(5)
    lengths = torch.randint(1, 9, (16,), generator=generator)
    features = torch.randn(16, 8, 6, generator=generator)
    tokens = torch.randint(0, 10, (16, 8), generator=generator)
    advantages, returns, noise = torch.randn(3, 16, 8, generator=generator)

    def step(size: int) -> Tensor:
        weights = torch.linspace(-1, 1, 66).reshape(11, 6).requires_grad_()
        for rows in torch.arange(16).split(size):
            width = int(lengths[rows].max())
            mask = torch.arange(width)[None] < lengths[rows, None]
            crop = (rows, slice(0, width))
            outputs = features[crop] @ weights.T
            values = outputs[..., 10]
            logprobs = outputs[..., :10].log_softmax(-1).gather(-1, tokens[crop][..., None]).squeeze(-1)
            losses = ppo_policy_loss(logprobs, logprobs.detach() + 0.2 * noise[crop], advantages[crop])
            losses = losses + 0.1 * ppo_value_loss(values, values.detach() + 0.2 * noise[crop], returns[crop])
            (losses + nll_loss(logprobs))[mask].sum().div(lengths.sum()).backward()
        assert weights.grad is not None
        return weights.grad

    whole = step(16)
    assert whole.abs().max() > 0.01
    for size in (1, 2, 4):
        close(step(size), whole)
