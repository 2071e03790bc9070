"""Runs the cells of the over-optimization study: PPO and best-of-n here, what they need beside it.

In order: reward models (`reward_models`), samples of the SFT policy (`samples`), then PPO and best-of-n on each
treatment. All treatments of a seed see the same prompts, the same samples and the same draws (common random numbers).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ... import sandbox
from ...agents import PPO, LanguageModel, PPOConfig, Rollouts, best_of_k, best_of_n_kl, checkpoints
from ...agents.losses import exact_kl
from ...agents.rollouts import micro_batches, segment_sum
from ...data.files import write_atomic
from ...errors import DataError
from ...oracles.base import RewardOracle, judge
from ..harness.evaluation import SCORES, WIN_RATES, answer, evaluate, judges_of
from ..harness.reward_models import MAX_RESPONSE_TOKENS
from ..harness.runner import ProgressFn, ProgressUpdate, quiet
from ..harness.stored import Shape, cell_file, check_settings, read_stored
from ..harness.study import Row
from .curves import COLUMNS, REQUIRED, place_text
from .plans import TEMPERATURE, Plan, Sizes
from .reward_models import run_reward_model
from .samples import Samples, ShareFn, jsonable, read_samples, run_samples
from .treatments import DISAGREEMENT

EVALUATED: Mapping[str, Shape] = {"row": dict, "responses": list}
"""What is kept of an evaluation, and its shape."""

Array = NDArray[np.float64]


def run_cell(plan: Plan, on_progress: ProgressFn) -> list[Row]:
    """Runs a cell in its folder and returns its rows: of PPO and best-of-n those of `COLUMNS`, one an evaluation.

    Raises:
        CheckpointError: The folder was made with other settings.
        DataError: What the cell needs is not there.
    """
    quiet()
    plan.folder.mkdir(parents=True, exist_ok=True)
    extra = {"ppo": asdict(ppo_config(plan.sizes))} if plan.kind == "ppo" else {}
    check_settings(plan.folder, {**plan.settings(), **extra})
    runners = {"reward_model": run_reward_model, "samples": run_samples, "ppo": run_ppo, "best_of_n": run_best_of_n}
    rows, told = runners[plan.kind](plan, lambda share: on_progress(ProgressUpdate(plan.cell, int(share * plan.units))))
    on_progress(ProgressUpdate(plan.cell, plan.units, f"{plan.cell}: {told}"))
    return rows


# ---------------------------------------------------------------------------------------------------------------- PPO


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


def run_ppo(plan: Plan, on_share: ShareFn) -> tuple[list[Row], str]:
    """Trains past the peak of gold, and evaluates every few steps on one set of prompts.

    Each evaluation is a file, written when it is done, and PPO keeps checkpoints: a run that was interrupted
    continues, and its numbers are those of a run that was not.
    """
    treatment, cell, config, sizes = plan.found, plan.trained(), ppo_config(plan.sizes), plan.sizes
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
        on_share(step / (sizes.ppo_steps + 1))
        if step in sizes.evaluated_steps and not plan.evaluation_file(step).exists():
            evaluate_policy(plan, agent, proxy, step)
    rows = [read_evaluation(plan, step)["row"] for step in sizes.evaluated_steps]
    return rows, describe(rows)


def completed_steps(agent: PPO, plan: Plan) -> Iterator[int]:
    """Steps as they are completed, beginning with the one training starts from: 0, or that of a resumed checkpoint.

    A step is evaluated before the next one is made, so of a resumed run only the checkpoint's own may be missing.
    """
    yield max(checkpoints.steps(plan.folder), default=0)
    for metrics in agent.updates():
        yield int(metrics["step"])


def evaluate_policy(plan: Plan, agent: PPO, proxy: RewardOracle, step: int) -> None:
    """Answers the study's instructions of eval, with equal draws at every step and treatment of a seed; stores it."""
    chosen = plan.sizes.instructions(plan.sizes.num_eval)
    rollouts = answer(agent, chosen, seed=plan.seed, split="eval", temperature=TEMPERATURE)
    judges = judges_of(sandbox.SANDBOX, proxy=None)
    found = evaluate(chosen, rollouts.texts, judges, finished=rollouts.finished.cpu().numpy())
    scores, spread = ask(proxy, chosen, rollouts.texts)
    found = replace(found, scores={**found.scores, "proxy": scores})
    kl = exact_response_kl(agent.policy, rollouts)
    means = {**found.means(), DISAGREEMENT: known_mean(spread)}
    row = make_row(plan, step=step, kl=math.fsum(kl.tolist()) / len(kl), means=means)
    columns = {**found.scores, DISAGREEMENT: spread, "finished": found.finished, "kl_exact": kl}
    write_evaluation(plan, step, row, chosen, rollouts.texts, columns)


@torch.no_grad()
def exact_response_kl(policy: LanguageModel, rollouts: Rollouts, *, max_tokens: int = 8192) -> Array:
    """[B] sum over a response's tokens of KL(policy || reference) at that place, over the whole vocabulary; nats, >= 0.

    Its mean over responses sampled from the policy is an unbiased estimate of the KL of the two distributions over
    responses (chain rule), with less variance than log p - log p_ref of the sampled tokens. Both at `TEMPERATURE`.
    """
    kl = torch.zeros(len(rollouts), dtype=torch.float64)
    for rows in micro_batches(rollouts.total_lengths, max_tokens):
        part = rollouts[rows]
        ours, theirs = (policy.logits(part, role=role, temperature=TEMPERATURE) for role in ("policy", "reference"))
        kl[rows] = segment_sum(exact_kl(ours, theirs), part.lengths).double().cpu()
    found: Array = kl.numpy()
    return found


# ---------------------------------------------------------------------------------------------------------- best-of-n


def run_best_of_n(plan: Plan, on_share: ShareFn) -> tuple[list[Row], str]:
    """Asks the treatment's reward about all samples of its seed; rows for n = 1, 2, 4 ... and the largest.

    Each is the mean over instructions of the unbiased estimator from all samples that the reward has a verdict on
    (`best_of_k`; an instruction with fewer than n of them counts with its best of the largest n that it reaches); the
    KL is the upper bound log n - (n - 1) / n. Stored beside each is what is chosen of the first n samples.
    """
    on_share(0)
    samples = read_samples(Plan("samples", plan.seed, plan.out, plan.sizes))
    scores, spread = ask(plan.found.proxy(plan.trained()), samples.asked, samples.texts)
    measures = {"proxy": scores, **samples.measures, DISAGREEMENT: spread}
    rows = best_rows(plan, samples.index, measures)
    for n, row in zip(plan.sizes.ns, rows, strict=True):
        chosen = choose(samples, scores, n)
        columns = {name: values[chosen] for name, values in measures.items()}
        write_evaluation(plan, n, row, samples.instructions, [samples.texts[i] for i in chosen], columns)
    return rows, describe(rows)


def best_rows(plan: Plan, index: NDArray[np.int64], measures: Mapping[str, Array]) -> list[Row]:
    """The rows, from the measures [D] of the distinct responses, and which of them each sample [P, N] is."""
    ns, scores = plan.sizes.ns, measures["proxy"][index]
    # Every n is a mean over the same instructions: one with fewer scored samples stays at the largest n it reaches.
    last = np.searchsorted(ns, (~np.isnan(scores)).sum(axis=1), side="right") - 1
    places = np.minimum(np.arange(len(ns))[:, None], last.clip(0))

    def worth(name: str) -> list[float | None]:
        found = np.take_along_axis(best_of_k(scores, measures[name][index], ns), places, axis=0)
        means = [known_mean(row) for row in found]
        return [mean if mean is None or name not in WIN_RATES else 100 * mean for mean in means]

    means = {name: worth(name) for name in (*SCORES, "length", DISAGREEMENT)}
    return [
        make_row(plan, n=n, kl=best_of_n_kl(n), means={name: values[place] for name, values in means.items()})
        for place, n in enumerate(ns)
    ]


def choose(samples: Samples, scores: Array, n: int) -> NDArray[np.int64]:
    """[P], which distinct response is the best of the first n samples of each instruction; the first of equals."""
    pool = samples.index[:, :n]
    known = np.where(np.isnan(scores[pool]), -np.inf, scores[pool])
    best: NDArray[np.int64] = pool[np.arange(len(pool)), known.argmax(axis=1)]
    return best


# ------------------------------------------------------------------------------------------------- rows and their files


def ask(proxy: RewardOracle, instructions: Sequence[str], responses: Sequence[str]) -> tuple[Array, Array]:
    """The proxy's scores [B], and how far an ensemble's members are apart [B] (NaN where one model decides)."""
    verdicts = judge(proxy, instructions, responses)
    spread = verdicts.details.get(DISAGREEMENT, np.full(len(responses), np.nan))
    return verdicts.scores, np.asarray(spread, np.float64)


def known_mean(values: Array) -> float | None:
    """Mean of what is known; None where nothing is."""
    known = values[~np.isnan(values)]
    return math.fsum(known.tolist()) / len(known) if len(known) else None


def make_row(
    plan: Plan, *, kl: float, means: Mapping[str, float | None], step: int | None = None, n: int | None = None
) -> Row:
    """A row of `COLUMNS`.

    Raises:
        DataError: Its KL, proxy or gold is not a finite number: nothing can be said of a curve with a gap, so that the
            cell fails and not the report of all others.
    """
    facts = {"treatment": plan.found.name, "method": plan.kind, "seed": plan.seed, "step": step, "n": n, "kl_exact": kl}
    row: Row = {name: {**means, **facts}[name] for name in COLUMNS}
    for name in REQUIRED:
        if row[name] is None or not math.isfinite(row[name]):
            where = place_text(plan.kind, step if n is None else n)
            raise DataError(f"{plan.cell}, {where}: expected a {name} of one response at least, got none.")
    return row


def write_evaluation(
    plan: Plan,
    number: int,
    row: Row,
    instructions: Sequence[str],
    responses: Sequence[str],
    columns: Mapping[str, Array],
) -> None:
    """Stores the row of an evaluation with its B responses and what is known of each, columns of [B]."""
    file = plan.evaluation_file(number)
    file.parent.mkdir(parents=True, exist_ok=True)
    content = {"row": row, "instructions": list(instructions), "responses": list(responses), **jsonable(columns)}
    write_atomic(file, json.dumps(content) + "\n")


def read_evaluation(plan: Plan, number: int) -> dict[str, Any]:
    """What `write_evaluation` stored: "row", and columns of one value a response.

    Raises:
        CheckpointError: It is gone or damaged.
    """
    cell = cell_file(plan.out, plan.cell)
    remedy = f"To run the cell anew remove {plan.folder} and, if it is there, {cell}, and call again."
    return read_stored(plan.evaluation_file(number), *EVALUATED, shape=EVALUATED, remedy=remedy)


def describe(rows: Sequence[Row]) -> str:
    """One line about a finished run: gold at its start, peak and end, proxy, KL."""
    first, peak, last = rows[0], max(rows, key=lambda row: float(row["gold"])), rows[-1]
    where = place_text(peak["method"], peak["step"] if peak["n"] is None else peak["n"])
    gold = f"gold {first['gold']:.2f}, peak {peak['gold']:.2f} at {where}, end {last['gold']:.2f}"
    return f"{gold}; proxy {first['proxy']:.2f} to {last['proxy']:.2f}; KL {last['kl_exact']:.2f}"
