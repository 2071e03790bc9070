"""Losses against hand-computed numbers and plain formulas of single numbers."""

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from torch import Tensor

from alpacafarm_env.agents.losses import (
    adaptive_kl_coef,
    dpo_loss,
    exact_kl,
    gae,
    implicit_rewards,
    kl_estimate,
    masked_moments,
    missing_eos_penalty,
    pairwise_loss,
    place_scores,
    policy_clipped,
    ppo_policy_loss,
    ppo_value_loss,
    scale_to_unit_std,
    shape_rewards,
    value_clipped,
    whiten,
    zero_outside,
)

LN2 = math.log(2)
SOFT1 = math.log(1 + math.exp(-1))  # −log σ(1)
logit_rows = npst.arrays(np.float64, st.integers(2, 6).map(lambda size: (2, size)), elements=st.floats(-5, 5))


def close(actual: Tensor, expected: Any, atol: float = 1e-6) -> None:
    torch.testing.assert_close(actual, torch.as_tensor(expected, dtype=actual.dtype), atol=atol, rtol=0)


def gradient(loss: Callable[[Tensor], Tensor], at: list[float]) -> list[float]:
    x = torch.tensor(at, requires_grad=True)
    return torch.autograd.grad(loss(x).sum(), x)[0].tolist()


@pytest.mark.parametrize(
    ("kind", "expected"),
    {
        "k1": [0.5, -1.0, 0],
        "k2": [0.125, 0.5, 0],
        "k3": [0.1065307, 0.7182818, 0],  # e^-0.5 - 1 + 0.5, e - 1 - 1
        "clamped_k1": [0.5, 0.0, 0],
    }.items(),
)
def test_kl_estimates_and_the_rewards_they_shape(kind: str, expected: list[float]) -> None:
    logprobs, ref_logprobs = torch.tensor([[-1.0, -2, -7]]), torch.tensor([[-1.5, -1, -7]])  # d = 0.5, -1, 0
    rewards, kl = shape_rewards(
        torch.tensor([0.7]), logprobs, ref_logprobs, torch.ones(1, 3, dtype=torch.bool), kl_coef=0.5, kind=kind
    )
    close(kl, [expected])
    close(rewards, torch.tensor([[0, 0, 0.7]]) - 0.5 * kl)
    with pytest.raises(ValueError, match=r"k4.*k1"):
        kl_estimate(logprobs, ref_logprobs, "k4")


@settings(max_examples=60)
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


def test_a_token_that_both_forbid_changes_neither_the_exact_kl_nor_its_gradient() -> None:
    logits, ref_logits = torch.tensor([[1.0, 0, -1]], requires_grad=True), torch.tensor([[0.5, 0.5, -1]])
    plain = exact_kl(logits, ref_logits)
    forbidden = exact_kl(*(torch.nn.functional.pad(x, (0, 1), value=-torch.inf) for x in (logits, ref_logits)))
    close(plain, [0.1015666])
    close(forbidden, plain)
    close(torch.autograd.grad(forbidden, logits)[0], torch.autograd.grad(plain, logits)[0])


def test_adaptive_kl_coef() -> None:
    for before, kl, step, after in ((0.2, 12, 0.1, 0.204), (0.204, 3, 0.1, 0.19992), (1, 6.6, 0.1, 1.01)):
        assert adaptive_kl_coef(before, kl, target=6, step_size=step) == pytest.approx(after, abs=1e-12)
    with pytest.raises(ValueError, match="target"):
        adaptive_kl_coef(0.2, 1.0, target=0, step_size=0.1)


def test_rewards_that_cannot_be_placed_are_refused() -> None:
    mask = torch.tensor([[True, True], [False, False]])
    for scores, told in (([1.0, 2], r"rows \[1\]"), ([math.nan, 2], r"NaN.*rows \[0\]"), ([0.0] * 3, r"scores \[B\]")):
        with pytest.raises(ValueError, match=told):
            place_scores(torch.tensor(scores), mask)


def test_a_process_without_rows_has_nothing_to_do_and_does_not_fail() -> None:
    nothing, mask = torch.zeros(0, 0), torch.zeros(0, 0, dtype=torch.bool)
    rewards, _ = shape_rewards(torch.zeros(0), nothing, nothing, mask, kl_coef=0.1)
    assert whiten(gae(rewards, nothing, mask)[0], mask).shape == (0, 0)


def test_missing_eos_penalty_keeps_the_unscored() -> None:
    scores, finished = torch.tensor([1.0, 2.0, math.nan]), torch.tensor([True, False, False])
    penalised = missing_eos_penalty(scores, finished, value=-1.0)
    assert penalised[:2].tolist() == [1.0, -1.0]
    assert penalised[2].isnan()


@settings(max_examples=60)
@given(
    npst.arrays(np.float64, st.integers(1, 8).map(lambda t: (4, t)), elements=st.floats(-10, 10)),
    st.permutations(range(12)),
    st.sampled_from([0.0, 0.9, 1.0]),
    st.sampled_from([0.0, 0.8, 1.0]),
)
def test_shaped_rewards_and_gae_are_their_sums_wherever_the_pads_are(
    columns: np.ndarray, places: list[int], gamma: float, lam: float
) -> None:
    """Pads (of NaN) before, between and behind the tokens; A_t = Σ_k (γλ)^k (r + γ V' − V)_{t+k}, as in the paper."""
    size = columns.shape[1]
    mask = torch.zeros(1, 12, dtype=torch.bool)
    mask[0, places[:size]] = True
    logprobs, ref_logprobs, values = (torch.full((1, 12), math.nan, dtype=torch.float64) for _ in range(3))
    for wide, column in zip((logprobs, ref_logprobs, values), columns, strict=False):
        wide[mask] = torch.from_numpy(column)
        wide.requires_grad_()
    score = torch.tensor([columns[3, 0]])
    rewards, kl = shape_rewards(score, logprobs, ref_logprobs, mask, kl_coef=0.1)
    plain = -0.1 * (columns[0] - columns[1])
    plain[-1] += columns[3, 0]
    close(rewards[mask], plain, atol=1e-9)
    deltas = plain + gamma * np.append(columns[2][1:], 0) - columns[2]
    expected = [sum((gamma * lam) ** k * d for k, d in enumerate(deltas[t:])) for t in range(size)]
    advantages, returns = gae(rewards, values, mask, gamma=gamma, lam=lam)
    close(advantages[mask], expected, atol=1e-9)
    close(returns[mask], expected + columns[2], atol=1e-9)
    assert not any(wide[~mask].any() or wide.requires_grad for wide in (rewards, kl, advantages, returns))


def test_ppo_policy_loss_by_hand() -> None:
    logprobs, advantages = torch.tensor([1.3, 0.7, 1.0]).log(), torch.tensor([1.0, -1.0, 2.0])
    close(ppo_policy_loss(logprobs, torch.zeros(3), advantages, clip=0.2), [-1.2, 0.8, -2.0])
    assert policy_clipped(logprobs, torch.zeros(3), advantages, clip=0.2).tolist() == [True, True, False]
    close(ppo_policy_loss(logprobs, torch.zeros(3), advantages, clip=math.inf), [-1.3, 0.7, -2.0])


@pytest.mark.parametrize(
    ("ratio", "advantage", "slope"),
    [
        (1.0, 1.0, -1.0),  # descending raises a good token's logprob
        (1.0, -1.0, 1.0),
        (1.3, 1.0, 0.0),  # already raised enough
        (0.7, -1.0, 0.0),
        (1.3, -1.0, 1.3),  # moved the wrong way: the clip must not save it
        (0.7, 1.0, -0.7),
    ],
)
def test_policy_gradient_signs_and_where_the_clip_stops_it(ratio: float, advantage: float, slope: float) -> None:
    found = gradient(lambda x: ppo_policy_loss(x, torch.zeros(1), torch.tensor([advantage])), [math.log(ratio)])
    assert found == [pytest.approx(slope, abs=1e-6)]


def test_ppo_value_loss_by_hand() -> None:
    values, old_values, returns = torch.tensor([0.1, 0.5, 0.5]), torch.zeros(3), torch.tensor([1.0, 1.0, 0.0])
    # inside the clip: .5 * .81; clipped to .2: .5 * max(.25, .64); away from the return: .5 * max(.25, .04)
    close(ppo_value_loss(values, old_values, returns, clip=0.2), [0.405, 0.32, 0.125])
    assert value_clipped(values, old_values, returns, clip=0.2).tolist() == [False, True, False]
    slopes = gradient(lambda x: ppo_value_loss(x, old_values, returns, clip=0.2), [0.1, 0.5, 0.5])
    assert slopes == pytest.approx([-0.9, 0.0, 0.5], abs=1e-6)


def test_pairwise_loss_by_hand() -> None:
    close(pairwise_loss(torch.tensor([2.0, 0]), torch.tensor([1.0, 0])), [SOFT1, LN2])
    close(pairwise_loss(torch.tensor([2.0]), torch.tensor([1.0]), torch.tensor([0.75])), [SOFT1 + 0.25])
    assert pairwise_loss(torch.tensor([-200.0]), torch.tensor([200.0])).item() == 400.0  # no overflow
    assert gradient(lambda x: pairwise_loss(x, torch.zeros(1)), [0.0]) == [-0.5]
    with pytest.raises(ValueError, match=r"\[0, 1\].*2\.0"):
        pairwise_loss(torch.zeros(2), torch.zeros(2), torch.tensor([1.0, 2.0]))


def test_dpo_loss_by_hand() -> None:
    chosen, rejected = torch.tensor([-3.0, -5.0]), torch.tensor([-4.0, -2.0])
    ref_chosen, ref_rejected = torch.tensor([-4.0, -4.0]), torch.tensor([-3.0, -1.0])
    # log-ratios 1 and -1, so a margin of 0.5 x 2; then -1 and -1, a margin of 0
    close(dpo_loss(chosen, rejected, ref_chosen, ref_rejected, beta=0.5), [SOFT1, LN2])
    close(dpo_loss(rejected, chosen, ref_rejected, ref_chosen, beta=0.5), [SOFT1 + 1, LN2])
    smoothed = dpo_loss(chosen, rejected, ref_chosen, ref_rejected, beta=0.5, targets=torch.full((2,), 0.9))
    close(smoothed, [SOFT1 + 0.1, LN2])
    assert implicit_rewards(chosen, ref_chosen, beta=0.5).tolist() == [0.5, -0.5]


@pytest.mark.parametrize(
    "call",
    [
        kl_estimate,
        lambda x, y: ppo_policy_loss(x, y, y),
        lambda x, y: ppo_value_loss(x, x, y),
        lambda x, y: pairwise_loss(x[0], y[0]),
        lambda x, y: dpo_loss(x, x, y, x, beta=0.1),
        gae,
        exact_kl,
    ],
)
def test_tensors_that_would_broadcast_are_refused(call: Callable[[Tensor, Tensor], object]) -> None:
    with pytest.raises(ValueError, match=r"\(2, 1\)|\(1,\)"):
        call(torch.zeros(2, 3), torch.zeros(2, 1))


@pytest.fixture
def alpaca_farm() -> dict[str, Tensor]:
    """Eight rows of three slots; the even rows end with a pad, where both logprobs are 0."""
    row, slot = torch.arange(8.0)[:, None], torch.arange(3.0)[None]
    pad = (row % 2 == 0) & (slot == 2)
    return {
        "logprobs": -(1 + 0.1 * row + 0.2 * slot).masked_fill(pad, 0),
        "ref_logprobs": -(1.3 + 0.05 * row + 0.25 * slot).masked_fill(pad, 0),
        "scores": torch.linspace(-1, 1, 8),
        "values": 0.1 * row - 0.05 * slot,
        "mask": ~pad,
    }


def alpaca_farm_rewards(batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    inputs = (batch[name] for name in ("scores", "logprobs", "ref_logprobs", "mask"))
    return shape_rewards(*inputs, kl_coef=0.02, kind="clamped_k1")


def test_alpaca_farm_shaped_rewards(alpaca_farm: dict[str, Tensor]) -> None:
    rewards, kl = alpaca_farm_rewards(alpaca_farm)
    close(kl[[0, 7]], [[0.3, 0.35, 0], [0, 0, 0.05]])
    close(rewards[[0, 7]], [[-0.006, -1.007, 0], [0, 0, 0.999]])
    mean, variance = masked_moments(rewards)  # no mask: pads count, as in the released code
    close(mean, -0.0027083, atol=1e-7)
    close(variance.sqrt(), 0.3792299, atol=1e-7)


def test_alpaca_farm_whitened_rewards_returns_and_advantages(alpaca_farm: dict[str, Tensor]) -> None:
    rewards = whiten(alpaca_farm_rewards(alpaca_farm)[0], shift_mean=False)
    close(rewards[[0, 7]], [[-0.0113882, -2.6509480, 0.0044333], [0.0044333, 0.0044333, 2.6387193]])
    advantages, returns = gae(rewards, alpaca_farm["values"], gamma=1.0, lam=1.0)
    close(returns[[0, 7]], [[-2.6579030, -2.6465147, 0.0044333], [2.6475861, 2.6431527, 2.6387193]])
    expected = [[-1.7503567, -1.7058785, 0.2510650], [1.5865020, 1.6195168, 1.6525316]]
    close(whiten(advantages)[[0, 7]], expected)


finite = st.floats(-100, 100, width=32)
rows = npst.arrays(np.float32, st.tuples(st.integers(1, 5), st.integers(1, 6)), elements=finite)


def lengths_to_mask(lengths: list[int], width: int) -> Tensor:
    return torch.arange(width)[None] < torch.tensor(lengths)[:, None]


def test_normalised_by_hand() -> None:
    # mean 2.5, biased variance 1.25: (1 - 2.5) / sqrt(1.25) = -1.3416408, (2 - 2.5) / sqrt(1.25) = -0.4472136
    x, expected = torch.tensor([1.0, 2, 3, 4]), torch.tensor([-1.3416408, -0.4472136, 0.4472136, 1.3416408])
    close(whiten(x), expected)
    close(whiten(x, shift_mean=False), expected + 2.5)
    # mean 1, biased variance (1 + 1 + 4 + 4) / 4 = 2.5; zeros stay zeros
    x = torch.tensor([0.0, 2, -1, 3])
    close(scale_to_unit_std(x), x / math.sqrt(2.5))


def test_moments_count_only_what_is_real() -> None:
    x = torch.tensor([[1.0, 3.0, math.nan], [5.0, math.nan, math.inf]])
    mask = torch.tensor([[True, True, False], [True, False, False]])
    mean, variance = masked_moments(x, mask)
    assert mean.item() == pytest.approx(3.0, abs=1e-12)
    assert variance.item() == pytest.approx(8 / 3, abs=1e-12)  # (4 + 0 + 4) / 3: biased
    assert masked_moments(mask)[0].item() == 0.5  # three of six: bools are numbers
    with pytest.raises(ValueError, match=r"x \(2, 3\), mask \(2, 4\)"):
        zero_outside(x, torch.ones(2, 4, dtype=torch.bool))


def test_nothing_to_count_and_nothing_to_spread_give_no_nan() -> None:
    x = torch.tensor([[2.0, 2.0]])
    assert masked_moments(x, torch.zeros(1, 2, dtype=torch.bool))[0].item() == 0.0
    assert whiten(x).tolist() == [[0.0, 0.0]]
    assert scale_to_unit_std(x).tolist() == [[2.0, 2.0]]  # no spread, no scale


def on_two_processes(work: Callable[[int, Callable[[Tensor], Tensor]], Tensor]) -> list[Tensor]:
    """What `work(rank, reduce)` gives on two threads that stand for processes; `reduce` adds up over both."""
    parts, barrier = [torch.zeros(0)] * 2, Barrier(2, timeout=60)

    def run(rank: int) -> Tensor:
        def reduce(sums: Tensor) -> Tensor:
            parts[rank] = sums
            barrier.wait()
            total = parts[0] + parts[1]
            barrier.wait()
            return total

        return work(rank, reduce)

    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(run, range(2)))


@settings(max_examples=50)
@given(rows, st.integers(0, 4), st.integers(0, 4), st.data())
def test_normalised_alike_however_it_is_padded_and_dealt_out(
    x: np.ndarray, left: int, right: int, data: st.DataObject
) -> None:
    """Rows are dealt unevenly, to one process none perhaps, so a mean of the processes' means would be wrong."""
    lengths = data.draw(st.lists(st.integers(1, x.shape[1]), min_size=len(x), max_size=len(x)))
    mask, values = lengths_to_mask(lengths, x.shape[1]), torch.tensor(x)
    white = whiten(values, mask)
    mean, variance = masked_moments(white, mask)
    assert abs(mean.item()) < 1e-4  # float32 output
    if masked_moments(values, mask)[1] > 1e-4:
        assert variance.item() == pytest.approx(1, abs=1e-3)
    assert (white[~mask] == 0).all()
    pad = (left, right)
    wide, wide_mask = torch.nn.functional.pad(values, pad, value=math.nan), torch.nn.functional.pad(mask, pad)
    cut = data.draw(st.integers(0, len(x)))
    mine = (slice(0, cut), slice(cut, len(x)))
    for normalise in (whiten, scale_to_unit_std):
        whole = normalise(values, mask)
        dealt = on_two_processes(lambda r, reduce, f=normalise: f(wide[mine[r]], wide_mask[mine[r]], reduce=reduce))
        close(torch.cat(dealt)[:, left : left + x.shape[1]], whole)
    whole = masked_moments(values, mask)
    for dealt in on_two_processes(lambda r, reduce: masked_moments(wide[mine[r]], wide_mask[mine[r]], reduce=reduce)):
        close(torch.stack(dealt), torch.stack(whole), atol=1e-12)
