"""Masked statistics: hand-computed numbers, padding, and that two processes normalise like one."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from torch import Tensor, distributed, multiprocessing

from alpacafarm_env.agents.losses import gae, place_scores, ppo_policy_loss, ppo_value_loss
from alpacafarm_env.agents.masked import masked_mean, masked_moments, scale_to_unit_std, whiten, zero_outside

finite = st.floats(-100, 100, width=32)
rows = npst.arrays(np.float32, st.tuples(st.integers(1, 5), st.integers(1, 6)), elements=finite)


def lengths_to_mask(lengths: list[int], width: int) -> Tensor:
    return torch.arange(width)[None] < torch.tensor(lengths)[:, None]


def test_whiten_golden() -> None:
    # mean 2.5, biased variance 1.25: (1 - 2.5) / sqrt(1.25) = -1.3416408, (2 - 2.5) / sqrt(1.25) = -0.4472136
    expected = torch.tensor([-1.3416408, -0.4472136, 0.4472136, 1.3416408])
    torch.testing.assert_close(whiten(torch.tensor([1.0, 2.0, 3.0, 4.0])), expected, atol=1e-6, rtol=0)


def test_whiten_without_shifting_the_mean_puts_it_back() -> None:
    x = torch.tensor([1.0, 2.0, 3.0, 4.0])
    torch.testing.assert_close(whiten(x, shift_mean=False), whiten(x) + 2.5, atol=1e-6, rtol=0)


def test_moments_count_only_what_is_real() -> None:
    x = torch.tensor([[1.0, 3.0, math.nan], [5.0, math.nan, math.inf]])
    mask = torch.tensor([[True, True, False], [True, False, False]])
    mean, variance = masked_moments(x, mask)
    assert mean.item() == pytest.approx(3.0, abs=1e-12)
    assert variance.item() == pytest.approx(8 / 3, abs=1e-12)  # (4 + 0 + 4) / 3: biased
    assert masked_mean(mask, torch.ones_like(mask)).item() == 0.5  # three of six: bools are numbers
    assert masked_mean(mask).item() == 0.5


def test_nothing_to_count_and_nothing_to_spread_give_no_nan() -> None:
    x = torch.tensor([[2.0, 2.0]])
    assert masked_mean(x, torch.zeros(1, 2, dtype=torch.bool)).item() == 0.0
    assert whiten(x).tolist() == [[0.0, 0.0]]
    assert scale_to_unit_std(x).tolist() == [[2.0, 2.0]]  # no spread, no scale


def test_scaling_divides_by_the_std_and_leaves_zeros_alone() -> None:
    # mean 1, biased variance (1 + 1 + 4 + 4) / 4 = 2.5
    x = torch.tensor([0.0, 2.0, -1.0, 3.0])
    torch.testing.assert_close(scale_to_unit_std(x), x / math.sqrt(2.5), atol=1e-6, rtol=0)
    assert scale_to_unit_std(x)[0].item() == 0.0


@settings(max_examples=50, deadline=None)
@given(rows, st.integers(0, 4), st.integers(0, 4), st.data())
def test_whitened_has_mean_0_and_variance_1_however_it_is_padded(
    x: np.ndarray, left: int, right: int, data: st.DataObject
) -> None:
    lengths = data.draw(st.lists(st.integers(1, x.shape[1]), min_size=len(x), max_size=len(x)))
    mask = lengths_to_mask(lengths, x.shape[1])
    white = whiten(torch.tensor(x), mask)
    mean, variance = masked_moments(white, mask)
    assert abs(mean.item()) < 1e-4  # float32 output
    if masked_moments(torch.tensor(x), mask)[1] > 1e-4:
        assert variance.item() == pytest.approx(1, abs=1e-3)
    assert (white[~mask] == 0).all()
    pad = (left, right)
    wider = whiten(torch.nn.functional.pad(torch.tensor(x), pad, value=math.nan), torch.nn.functional.pad(mask, pad))
    torch.testing.assert_close(wider[:, left : left + x.shape[1]], white, atol=1e-6, rtol=0)


@pytest.mark.parametrize("score", [1.0, -1.0])
def test_equal_scores_give_equal_returns_at_any_length_when_only_scaled(score: float) -> None:
    """Masked whitening without the mean shift rewards length; scaling does not. (No KL here.)"""
    mask = lengths_to_mask([50, 250], 300)
    scores = torch.tensor([score, score])
    rewards = place_scores(scores, mask)
    _, returns = gae(scale_to_unit_std(rewards, mask), torch.zeros_like(rewards), mask)
    assert returns[0, 0].item() == returns[1, 0].item()
    assert returns[0, 0].item() * score > 0
    _, biased = gae(whiten(rewards, mask, shift_mean=False), torch.zeros_like(rewards), mask)
    assert (biased[0, 0] - biased[1, 0]).item() * score > 5  # the trap this guards against


def test_a_mask_of_another_shape_is_refused() -> None:
    with pytest.raises(ValueError, match=r"x \(2, 3\), mask \(2, 4\)"):
        zero_outside(torch.zeros(2, 3), torch.ones(2, 4, dtype=torch.bool))


# Two processes. Rows are dealt unevenly (5 and 3, then 8 and 0), so a mean of rank means would be wrong.


def rollout() -> dict[str, Tensor]:
    """Eight ragged rows of six slots, and a linear policy's features."""
    generator = torch.Generator().manual_seed(3)
    lengths = [1, 6, 3, 2, 5, 4, 6, 1]
    return {
        "rewards": torch.randn(8, 6, generator=generator),
        "features": torch.randn(8, 6, 4, generator=generator),
        "tokens": torch.randint(0, 5, (8, 6), generator=generator),
        "mask": lengths_to_mask(lengths, 6),
    }


def normalised_step(batch: dict[str, Tensor], reduce=None) -> dict[str, Tensor]:  # type: ignore[no-untyped-def]
    """Whitened advantages, and the summed gradient of the PPO loss divided by the global token count."""
    total = reduce or (lambda x: x)
    weights = torch.linspace(-1, 1, 20).reshape(5, 4).requires_grad_()
    head = torch.linspace(0, 1, 4).requires_grad_()
    logprobs = (batch["features"] @ weights.T).log_softmax(-1).gather(-1, batch["tokens"][..., None]).squeeze(-1)
    values, mask = batch["features"] @ head, batch["mask"]
    advantages, returns = gae(scale_to_unit_std(batch["rewards"], mask, reduce=reduce), values, mask, lam=0.95)
    advantages = whiten(advantages, mask, reduce=reduce)
    losses = ppo_policy_loss(logprobs, logprobs.detach() + 0.1, advantages)
    losses = losses + 0.1 * ppo_value_loss(values, values.detach() - 0.1, returns)
    (zero_outside(losses, mask).sum() / total(mask.sum())).backward()
    assert weights.grad is not None
    assert head.grad is not None
    gradient = total(torch.cat((weights.grad.flatten(), head.grad)))
    return {"advantages": advantages, "gradient": gradient, "mean": masked_mean(batch["rewards"], mask, reduce=reduce)}


def one_rank(rank: int, folder: str, split: int) -> None:
    distributed.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)

    def reduce(x: Tensor) -> Tensor:
        distributed.all_reduce(x)
        return x

    mine = slice(0, split) if rank == 0 else slice(split, 8)
    results = normalised_step({name: value[mine] for name, value in rollout().items()}, reduce)
    np.savez(f"{folder}/rank{rank}.npz", **{name: value.detach().numpy() for name, value in results.items()})
    distributed.destroy_process_group()


@pytest.mark.parametrize("split", [5, 8])
def test_two_processes_normalise_and_step_like_one(tmp_path: Path, split: int) -> None:
    multiprocessing.spawn(one_rank, args=(str(tmp_path), split), nprocs=2)
    ranks = [np.load(tmp_path / f"rank{rank}.npz") for rank in (0, 1)]
    alone = {name: value.detach().numpy() for name, value in normalised_step(rollout()).items()}
    advantages = np.concatenate([rank["advantages"] for rank in ranks])
    np.testing.assert_allclose(advantages, alone["advantages"], atol=1e-6, rtol=0)
    for rank in ranks:
        np.testing.assert_allclose(rank["gradient"], alone["gradient"], atol=1e-6, rtol=0)
        np.testing.assert_allclose(rank["mean"], alone["mean"], atol=1e-12, rtol=0)
