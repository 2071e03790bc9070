"""Masked statistics: hand-computed numbers, padding, and that two processes normalise like one."""

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from torch import Tensor

from alpacafarm_env.agents.losses import (
    gae,
    masked_mean,
    masked_moments,
    place_scores,
    scale_to_unit_std,
    whiten,
    zero_outside,
)

finite = st.floats(-100, 100, width=32)
rows = npst.arrays(np.float32, st.tuples(st.integers(1, 5), st.integers(1, 6)), elements=finite)


def close(actual: Tensor, expected: Tensor, atol: float = 1e-6) -> None:
    torch.testing.assert_close(actual, expected, atol=atol, rtol=0)


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
    assert masked_mean(mask).item() == 0.5  # three of six: bools are numbers
    with pytest.raises(ValueError, match=r"x \(2, 3\), mask \(2, 4\)"):
        zero_outside(x, torch.ones(2, 4, dtype=torch.bool))


def test_nothing_to_count_and_nothing_to_spread_give_no_nan() -> None:
    x = torch.tensor([[2.0, 2.0]])
    assert masked_mean(x, torch.zeros(1, 2, dtype=torch.bool)).item() == 0.0
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
    for found in on_two_processes(lambda r, reduce: masked_mean(wide[mine[r]], wide_mask[mine[r]], reduce=reduce)):
        close(found, masked_mean(values, mask), atol=1e-12)


@pytest.mark.parametrize("score", [1.0, -1.0])
def test_equal_scores_give_equal_returns_at_any_length_when_only_scaled(score: float) -> None:
    """Masked whitening without the mean shift rewards length; scaling does not. (No KL here.)"""
    mask = lengths_to_mask([50, 250], 300)
    rewards = place_scores(torch.tensor([score, score]), mask)
    _, returns = gae(scale_to_unit_std(rewards, mask), torch.zeros_like(rewards), mask)
    assert returns[0, 0].item() == returns[1, 0].item()
    assert returns[0, 0].item() * score > 0
    _, biased = gae(whiten(rewards, mask, shift_mean=False), torch.zeros_like(rewards), mask)
    assert (biased[0, 0] - biased[1, 0]).item() * score > 5  # the trap this guards against
