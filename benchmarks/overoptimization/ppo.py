"""PPO of the over-optimization study: trained past the peak of gold, evaluated every few steps on one set of prompts.

Each evaluation is a file, written when it is done, and PPO keeps checkpoints: a run that was interrupted continues, and
its numbers are those of a run that was not.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, replace

import numpy as np
import torch
from numpy.typing import NDArray

from ... import sandbox
from ...agents import PPO, LanguageModel, PPOConfig, Rollouts, checkpoints
from ...agents.losses import exact_kl
from ...agents.rollouts import micro_batches, segment_sum
from ...oracles.base import RewardOracle
from ..harness.answers import answer
from ..harness.fresh_pairs import MAX_RESPONSE_TOKENS
from ..harness.runner import ProgressFn, ProgressUpdate, quiet
from ..harness.stored import check_settings
from ..harness.study import Row
from .plans import TEMPERATURE, PPOPlan, Sizes
from .runs import assess, describe, make_row, read_evaluation, write_evaluation


def ppo_config(sizes: Sizes) -> PPOConfig:
    """The sandbox's preset with the study's number of steps, rollouts and KL penalty, at a constant learning rate."""
    return replace(
        PPOConfig.sandbox(),
        total_steps=sizes.ppo_steps,
        max_response_tokens=MAX_RESPONSE_TOKENS,
        rollout_batch_size=sizes.rollouts,
        minibatch_size=min(PPOConfig.sandbox().minibatch_size, sizes.rollouts),
        kl_coef=sizes.kl_coef,
        schedule="constant",  # a rate that falls to 0 stops the policy where it is: near the peak
        save_every=10,
        keep_checkpoints=1,
    )


def run_ppo(plan: PPOPlan, on_progress: ProgressFn) -> list[Row]:
    """Trains and evaluates; a row of `COLUMNS` at each evaluated step."""
    quiet()
    plan.folder.mkdir(parents=True, exist_ok=True)
    config = ppo_config(plan.sizes)
    check_settings(plan.folder, {**plan.settings(), "ppo": asdict(config)})
    treatment, cell = plan.found, plan.trained()
    agent = PPO(
        treatment.env(cell, config.rollout_batch_size),
        LanguageModel.from_pretrained(sandbox.POLICY, max_response_tokens=MAX_RESPONSE_TOKENS),
        value_init=next(iter(cell.reward_models), None),
        config=config,
        seed=plan.seed,
        out=plan.folder,
    )
    proxy = treatment.proxy(cell)
    for step in completed_steps(agent, plan):
        on_progress(ProgressUpdate(plan.cell, int(plan.units * step / (plan.sizes.ppo_steps + 1))))
        if step in plan.sizes.evaluated_steps and not plan.evaluation_file(step).exists():
            evaluate_policy(plan, agent, proxy, step)
    rows = [read_evaluation(plan, step)["row"] for step in plan.sizes.evaluated_steps]
    on_progress(ProgressUpdate(plan.cell, plan.units, describe(plan.cell, rows)))
    return rows


def completed_steps(agent: PPO, plan: PPOPlan) -> Iterator[int]:
    """Steps as they are completed, beginning with the one training starts from: 0, or that of a resumed checkpoint.

    A step is evaluated before the next one is made, so of a resumed run only the checkpoint's own may be missing.
    """
    yield max(checkpoints.steps(plan.folder), default=0)
    for metrics in agent.updates():
        yield int(metrics["step"])


def evaluate_policy(plan: PPOPlan, agent: PPO, proxy: RewardOracle, step: int) -> None:
    """Answers the study's instructions of eval, with equal draws at every step and treatment of a seed; stores it."""
    chosen = plan.sizes.instructions(plan.sizes.num_eval)
    rollouts = answer(agent, chosen, seed=plan.seed, split="eval", temperature=TEMPERATURE)
    found = assess(chosen, rollouts.texts, proxy, finished=rollouts.finished.cpu().numpy())
    kl = sequence_kl(agent.policy, rollouts)
    row = make_row(plan, step=step, kl=math.fsum(kl.tolist()) / len(kl), means=found.means())
    write_evaluation(plan, step, row, {**found.content(), "kl_exact": kl.tolist()})


@torch.no_grad()
def sequence_kl(policy: LanguageModel, rollouts: Rollouts, *, max_tokens: int = 8192) -> NDArray[np.float64]:
    """[B] sum over a response's tokens of KL(policy || reference) at that place, over the whole vocabulary; nats, >= 0.

    Its mean over responses sampled from the policy is an unbiased estimate of the KL of the two distributions over
    responses (chain rule), with less variance than log p - log p_ref of the sampled tokens. Both at `TEMPERATURE`.
    """
    kl = torch.zeros(len(rollouts), dtype=torch.float64)
    for rows in micro_batches(rollouts.total_lengths, max_tokens):
        part = rollouts[rows]
        ours, theirs = (policy.logits(part, role=role, temperature=TEMPERATURE) for role in ("policy", "reference"))
        kl[rows] = segment_sum(exact_kl(ours, theirs), part.lengths).double().cpu()
    found: NDArray[np.float64] = kl.numpy()
    return found
