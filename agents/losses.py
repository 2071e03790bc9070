"""The arithmetic of RLHF as pure tensor functions: KL estimates, shaped rewards, returns, losses, masked statistics.

Conventions:

- B rows (responses), T response tokens, V vocabulary. A `mask` is True where a token counts; padding may be on either
  side. Nothing outside a mask, NaN included, reaches a result; results are 0 there.
- Losses come back per token (or pair), unreduced. Divide their sum by the number of real tokens of the *global*
  minibatch: the gradient then depends neither on padding, micro-batch size nor the number of processes.
- Statistics take `reduce`, which adds a tensor up over all processes; None: there is one.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from ..errors import did_you_mean

Reduce = Callable[[Tensor], Tensor]
"""This process's sums -> the sums over all processes."""

EPSILON = 1e-8  # keeps a division by a spread of 0 finite

KL_ESTIMATORS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda log_ratio: log_ratio,
    "k2": lambda log_ratio: log_ratio.square() / 2,
    # expm1 keeps the digits of a small log ratio, where exp(−d) − 1 + d would cancel to noise below 0.
    "k3": lambda log_ratio: torch.expm1(-log_ratio) + log_ratio,
    "clamped_k1": lambda log_ratio: log_ratio.clamp(min=0),
}
"""Estimators of KL(π ‖ ref) from d = log π − log ref of tokens sampled from π."""


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, kind: str = "k1") -> Tensor:
    """Per-token estimate of KL(π ‖ ref) in nats, from tokens sampled from π; d = log π − log ref.

    | kind | value | under π |
    |---|---|---|
    | k1 | d | unbiased, either sign |
    | k2 | d²/2 | biased, ≥ 0 |
    | k3 | exp(−d) − 1 + d | unbiased, ≥ 0 |
    | clamped_k1 | max(d, 0) | far too large near 0 (8.5 x at σ(d) = 0.1); what AlpacaFarm's released code penalises |

    To penalise or to log: as a *loss* the gradient of k1 is not that of the KL.
    Source: Schulman 2020, "Approximating KL divergence" (joschu.net/blog/kl-approx.html).
    """
    check_shapes(logprobs=logprobs, ref_logprobs=ref_logprobs)
    if kind not in KL_ESTIMATORS:
        raise did_you_mean("KL estimator", kind, KL_ESTIMATORS)
    return KL_ESTIMATORS[kind](logprobs - ref_logprobs)


def exact_kl(logits: Tensor, ref_logits: Tensor) -> Tensor:
    """KL(π ‖ ref) = Σ_v π(v) (log π(v) − log ref(v)) in nats, differentiable; logits [..., V] -> [...].

    Logits are already divided by the temperature. A token that π forbids by −inf contributes 0.
    """
    check_shapes(logits=logits, ref_logits=ref_logits)
    log_pi, log_ref = logits.log_softmax(-1), ref_logits.log_softmax(-1)
    # 0 · (−inf) is NaN: a token that both forbid is taken out before the product.
    return (log_pi.exp() * (log_pi - log_ref).masked_fill(log_pi == -torch.inf, 0)).sum(-1)


def adaptive_kl_coef(kl_coef: float, kl: float, *, target: float, step_size: float) -> float:
    """The next KL coefficient: β · (1 + step_size · clip(kl / target − 1, ±0.2)), KL and target in nats per *sequence*.

    Source: Ziegler et al. 2019 (arXiv:1909.08593), sec. 2.2, where step_size = rollouts / horizon = 512 / 10000;
    AlpacaFarm's k_beta is 0.1.
    """
    if not target > 0:
        raise ValueError(f"target must be a positive KL in nats per sequence, got {target!r}")
    return kl_coef * (1 + step_size * min(max(kl / target - 1, -0.2), 0.2))


def missing_eos_penalty(scores: Tensor, finished: Tensor, *, value: float) -> Tensor:
    """Scores [B], with `value` for responses that are not `finished`; NaN (unscored) stays NaN.

    The EOS trick of Stiennon et al. 2020 (arXiv:2009.01325), AlpacaFarm's penalty_reward_value (−1).
    """
    check_shapes(scores=scores, finished=finished)
    return scores.masked_fill(~finished & ~scores.isnan(), value)


def place_scores(scores: Tensor, mask: Tensor) -> Tensor:
    """Token rewards [B, T]: each row's score [B] at its last real token (EOS, or where the limit cut), 0 elsewhere.

    ValueError if a score is NaN (leave unscored rows out first) or a row has no real token.
    """
    if scores.shape != mask.shape[:1] or mask.ndim != 2:
        raise ValueError(f"expected scores [B] and mask [B, T], got {tuple(scores.shape)} and {tuple(mask.shape)}")
    if scores.isnan().any():
        rows = scores.isnan().nonzero().flatten().tolist()
        raise ValueError(f"expected a score for every row, got NaN (no verdict) in rows {rows}; leave them out first")
    if not mask.any(-1).all():
        rows = (~mask.any(-1)).nonzero().flatten().tolist()
        raise ValueError(f"expected at least one real token a row (EOS is one), got none in rows {rows}")
    tokens_left = mask.flip(1).cumsum(1).flip(1)
    return torch.where(mask & (tokens_left == 1), scores[:, None], 0)


def shape_rewards(
    scores: Tensor, logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, *, kl_coef: float, kind: str = "k1"
) -> tuple[Tensor, Tensor]:
    """Token rewards r_t = −β · kl_t, plus the scores [B] at the last real tokens; and the kl_t: [B, T], detached.

    β is in score per nat. Source: Ziegler et al. 2019 (arXiv:1909.08593), eq. 2; AlpacaFarm, appendix B.
    """
    check_shapes(logprobs=logprobs, ref_logprobs=ref_logprobs, mask=mask)
    kl = zero_outside(kl_estimate(logprobs.detach(), ref_logprobs.detach(), kind), mask)
    return place_scores(scores.to(kl.dtype), mask) - kl_coef * kl, kl


def gae(
    token_rewards: Tensor, values: Tensor, mask: Tensor | None = None, *, gamma: float = 1.0, lam: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimates and returns A + V, [B, T] without gradient; V after the last real token is 0.

    δ_t = r_t + γ V_{t+1} − V_t,  A_t = δ_t + γ λ A_{t+1}, where V_t is the value of the state *before* token t. With
    γ = λ = 1, A_t = Σ_{s≥t} r_s − V_t. Masked tokens are stepped over: t + 1 is the next real one.
    Source: Schulman et al. 2016 (arXiv:1506.02438), eqs. 11-16.
    """
    mask = torch.ones_like(values, dtype=torch.bool) if mask is None else mask
    check_shapes(token_rewards=token_rewards, values=values, mask=mask)
    rewards, values = zero_outside(token_rewards.detach(), mask), zero_outside(values.detach(), mask)
    advantages = torch.zeros_like(values)
    # From the end, as A_t needs A_{t+1}: T steps over columns of B rows, each of them exact.
    advantage = next_value = values.new_zeros(len(values))
    for t in reversed(range(values.shape[1])):
        real = mask[:, t]
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        advantage = torch.where(real, delta + gamma * lam * advantage, advantage)
        next_value = torch.where(real, values[:, t], next_value)
        advantages[:, t] = torch.where(real, advantage, 0)
    return advantages, advantages + values


def ppo_policy_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, *, clip: float = 0.2, clip_high: float | None = None
) -> Tensor:
    """max(−A ρ, −A clip(ρ, 1 − ε, 1 + ε)) per token, with ρ = exp(log π − log π_old); tensors of one shape, any.

    `clip` is ε > 0; `math.inf` for none. `clip_high` is that above 1 where it is another one.
    Source: Schulman et al. 2017 (arXiv:1707.06347), eq. 7, negated.
    """
    return torch.maximum(*_surrogates(logprobs, old_logprobs, advantages, clip, clip_high or clip))


def policy_clipped(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, *, clip: float = 0.2) -> Tensor:
    """Where the clip decides `ppo_policy_loss` (its gradient is 0 there); bool."""
    unclipped, clipped = _surrogates(logprobs.detach(), old_logprobs, advantages, clip, clip)
    return clipped > unclipped  # strictly: inside the clip both are equal, and the gradient flows


def ppo_value_loss(values: Tensor, old_values: Tensor, returns: Tensor, *, clip: float = 0.2) -> Tensor:
    """½ max((V − R)², (V_old + clip(V − V_old, ±ε) − R)²) per token; ε in units of the return, `math.inf` for none.

    Source: OpenAI baselines' ppo2; Ziegler et al. 2019 and AlpacaFarm, released code.
    """
    return torch.maximum(*_squared_errors(values, old_values, returns, clip)) / 2


def value_clipped(values: Tensor, old_values: Tensor, returns: Tensor, *, clip: float = 0.2) -> Tensor:
    """Where the clip decides `ppo_value_loss`; bool."""
    unclipped, clipped = _squared_errors(values.detach(), old_values, returns, clip)
    return clipped > unclipped


def pairwise_loss(chosen: Tensor, rejected: Tensor, targets: Tensor | None = None) -> Tensor:
    """−p log σ(Δ) − (1 − p) log σ(−Δ) per pair [B], with Δ = chosen − rejected, two scores [B].

    The target p is the probability that the label is right, 1 − flip rate or a judge's own; None: 1. ValueError if one
    is outside [0, 1]. Source: Bradley and Terry 1952; Stiennon et al. 2020 (arXiv:2009.01325), eq. 1.
    """
    if targets is None:
        check_shapes(chosen=chosen, rejected=rejected)
        return nn.functional.softplus(rejected - chosen)  # −log σ(Δ), where log(sigmoid) would be −inf for large −Δ
    check_shapes(chosen=chosen, rejected=rejected, targets=targets)
    if not ((targets >= 0) & (targets <= 1)).all():
        raise ValueError(
            f"targets are probabilities in [0, 1], got {targets.min().item()!r} to {targets.max().item()!r}"
        )
    return nn.functional.binary_cross_entropy_with_logits(chosen - rejected, targets.to(chosen.dtype), reduction="none")


def implicit_rewards(logprobs: Tensor, ref_logprobs: Tensor, *, beta: float) -> Tensor:
    """β (log π(y | x) − log π_ref(y | x)): the reward that π is optimal for, up to a constant of the prompt.

    Log-probabilities are of whole responses: sums over tokens, EOS included. β is in reward units per nat.
    Source: Rafailov et al. 2023 (arXiv:2305.18290), eq. 5.
    """
    check_shapes(logprobs=logprobs, ref_logprobs=ref_logprobs)
    return beta * (logprobs - ref_logprobs)


def dpo_loss(
    logprobs_chosen: Tensor,
    logprobs_rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    *,
    beta: float,
    targets: Tensor | None = None,
) -> Tensor:
    """`pairwise_loss` of the `implicit_rewards`, [B] in nats, with its errors; ln 2 where π is the reference.

    Source: Rafailov et al. 2023 (arXiv:2305.18290), eq. 7; with targets below 1, Mitchell 2023, "A note on DPO with
    noisy preferences".
    """
    chosen = implicit_rewards(logprobs_chosen, ref_chosen, beta=beta)
    rejected = implicit_rewards(logprobs_rejected, ref_rejected, beta=beta)
    return pairwise_loss(chosen, rejected, targets)


def nll_loss(logprobs: Tensor) -> Tensor:
    """−log π(y_t) per token in nats: supervised fine-tuning, over response tokens only."""
    return -logprobs


def masked_moments(x: Tensor, mask: Tensor | None = None, *, reduce: Reduce | None = None) -> tuple[Tensor, Tensor]:
    """Mean and biased variance of `x` where `mask` is True, over all processes: float64 scalars, 0 of nothing.

    Two passes (sums, then squared deviations), so that splitting rows over processes or padding them further moves the
    result by rounding only. No mask counts pads too, as AlpacaFarm's released code does.
    """
    real = zero_outside(_wide(x), mask)
    entries = real.new_tensor(x.numel()) if mask is None else mask.sum()
    sums = torch.stack((real.sum(), entries.to(real.dtype)))
    total, count = (reduce(sums) if reduce else sums).unbind()
    mean = total / count.clamp(min=1)
    squares = zero_outside((real - mean).square(), mask).sum()
    return mean, (reduce(squares) if reduce else squares) / count.clamp(min=1)


def whiten(x: Tensor, mask: Tensor | None = None, *, shift_mean: bool = True, reduce: Reduce | None = None) -> Tensor:
    """(x − μ) / (σ + 1e-8), plus μ again if not `shift_mean`; μ, σ (biased) over the masked entries of all processes.

    `shift_mean=False` on *rewards* is AlpacaFarm's reward whitening: it turns every zero into μ(1 − 1/σ). Summed over
    real tokens only, that constant rewards or punishes length, so under a mask use `scale_to_unit_std` instead.
    Source: Ziegler et al. 2019 (arXiv:1909.08593) and AlpacaFarm (arXiv:2305.14387), released code.
    """
    mean, variance = masked_moments(x, mask, reduce=reduce)
    whitened = (_wide(x) - mean) / (variance.sqrt() + EPSILON)
    return zero_outside(whitened if shift_mean else whitened + mean, mask).to(x.dtype)


def scale_to_unit_std(x: Tensor, mask: Tensor | None = None, *, reduce: Reduce | None = None) -> Tensor:
    """Returns x / σ, with σ (biased) over the masked entries of all processes; zeros stay zeros.

    Equal scores then give equal returns at any length. Without spread (σ ≤ 1e-8) `x` comes back as it is.
    """
    std = masked_moments(x, mask, reduce=reduce)[1].sqrt()
    return zero_outside(_wide(x) / torch.where(std > EPSILON, std, 1.0), mask).to(x.dtype)


def returns_to_go(token_rewards: Tensor, mask: Tensor, *, reduce: Reduce | None = None) -> Tensor:
    """Sums of rewards [B, T] from each token on, less their mean and divided by their unbiased standard deviation."""
    returns = zero_outside(token_rewards, mask).flip(1).cumsum(1).flip(1)
    mean, spread = unbiased(returns, mask, reduce)
    return zero_outside((returns - mean) / (spread + EPSILON), mask).to(token_rewards.dtype)


def unbiased(values: Tensor, mask: Tensor, reduce: Reduce | None) -> tuple[Tensor, Tensor]:
    """Mean and unbiased standard deviation over the masked entries of all processes."""
    mean, variance = masked_moments(values, mask, reduce=reduce)
    count = mask.sum().to(variance.dtype)
    count = reduce(count) if reduce else count
    return mean, (variance * count / (count - 1).clamp(min=1)).sqrt()


def zero_outside(x: Tensor, mask: Tensor | None) -> Tensor:
    """`x`, with 0 where `mask` is False; unlike a product with the mask, this stops NaN."""
    if mask is None:
        return x
    check_shapes(x=x, mask=mask)
    return x.masked_fill(~mask, 0)


def check_shapes(**tensors: Tensor) -> None:
    """Raises ValueError, naming each tensor and its shape, unless all shapes are equal."""
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if len(set(shapes.values())) > 1:
        raise ValueError(f"expected tensors of one shape, got {', '.join(f'{k} {v}' for k, v in shapes.items())}")


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.float32 if x.device.type == "mps" else torch.float64)  # Apple's GPUs have no float64


def _surrogates(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, low: float, high: float
) -> tuple[Tensor, Tensor]:
    """(unclipped, clipped) negated surrogate objectives of PPO."""
    check_shapes(logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages)
    ratio = (logprobs - old_logprobs).exp()
    return -advantages * ratio, -advantages * ratio.clamp(1 - low, 1 + high)


def _squared_errors(values: Tensor, old_values: Tensor, returns: Tensor, clip: float) -> tuple[Tensor, Tensor]:
    """(unclipped, clipped) squared errors of the value."""
    check_shapes(values=values, old_values=old_values, returns=returns)
    clipped = old_values + (values - old_values).clamp(-clip, clip)
    return (values - returns).square(), (clipped - returns).square()


def equal_groups(rewards: Tensor, groups: Tensor) -> Tensor:
    """[B] bool, whether all rewards [B] of a row's group are the same number."""
    found, place = torch.unique(groups, return_inverse=True)
    ends = [
        rewards.new_zeros(len(found)).scatter_reduce(0, place, rewards, each, include_self=False)[place]
        for each in ("amin", "amax")
    ]
    return ends[0] == ends[1]
