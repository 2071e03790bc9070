"""One seed of the win-rate curve: trains PPO and, every few steps, evaluates the policy on val and eval.

Each evaluation is a file of the run's folder, and PPO keeps a checkpoint at the same steps, so an interrupted run
continues where it stopped, with the same numbers. What a user brings is checked before anything is written.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import chain
from typing import Any

from ... import agents, pretrained
from ...bases import base_of
from ...chat_templates import load_template
from ...data.files import write_atomic
from ...errors import DataError
from ...folders import check_model
from ..experiment.evaluation import Judges, describe, evaluate, judges_of, subset
from ..experiment.own_judge import has_references, make_own_judge, refuse_trained_on
from ..harness.runner import ProgressFn, ProgressUpdate, quiet
from ..harness.stored import cell_file, read_stored
from ..harness.study import Row
from .plan import NAME, SPLITS, RunPlan
from .summary import MEASURES

UNKNOWN_POSITIONS = 2048
"""Taken for a model whose configuration does not say how many positions it knows."""


def check_inputs(plan: RunPlan) -> None:
    """Reads the splits, the judge and the models' configurations, and measures every prompt.

    Raises:
        DataError: One of them is faulty, a prompt is too long, or micro-batches are too small.
        CheckpointError: A model is not there or cannot be used.
    """
    from ...agents.prompts import check_budget, prompt_lengths

    job, folder = plan.job, str(plan.job.policy_folder)
    instructions = {split: job.data.instructions(split) for split in ("unlabeled", *SPLITS)}
    plan.sources["--policy"]()  # fetches it if it is on the hub
    job.oracle()
    if plan.judge is not None:
        make_own_judge(plan.judge, job.data)
        refuse_trained_on(plan.judge, plan.sources["--reward-model"]())
    tokenizer = load_tokenizer(folder)
    room, limit = prompt_limits(plan)
    template = load_template(folder, tokenizer, None if plan.policy == "sandbox" else plan.template)
    lengths = {split: prompt_lengths(tokenizer, template, asked) for split, asked in instructions.items()}
    for split in SPLITS:
        _check_prompts(plan, split, lengths[split], room)
    if not (trained := [length for length in lengths["unlabeled"] if length <= limit]):
        _check_prompts(plan, "unlabeled", lengths["unlabeled"], limit)  # PPO leaves out some by itself, with a warning
    longest = max(trained) + plan.max_response_tokens
    check_budget(plan.ppo_config().micro_batch_tokens, longest, who="--micro-batch-tokens")


def prompt_limits(plan: RunPlan) -> tuple[int, int]:
    """The most tokens of a prompt that can be answered, and of one that is trained on; a DataError if none fit.

    Policy and value model (it starts from the reward model) both read prompt and response, so the one that knows fewer
    positions decides.
    """
    positions = min(num_positions(str(folder)) for folder in (plan.job.policy_folder, plan.job.reward_model))
    width = plan.max_response_tokens
    room = positions - width
    if room < 1:
        raise DataError(
            f"--policy and --reward-model: expected more than {width} positions, the longest response of --preset "
            f"{plan.preset}, got {positions} (max_position_embeddings); choose another --preset or larger models"
        )
    limit = plan.max_prompt_tokens or room
    if limit > room:
        raise DataError(
            f"--max-prompt-tokens: expected at most {room} (the models' positions, less {width} of the longest "
            f"response), got {limit}"
        )
    return room, limit


def num_positions(folder: str) -> int:
    """Positions that a model knows, by its configuration (of a LoRA adapter: its base model's)."""
    config = pretrained.load_config(base_of(folder)).get_text_config()
    return int(getattr(config, "max_position_embeddings", None) or UNKNOWN_POSITIONS)


def load_tokenizer(folder: str) -> Any:
    """The policy's tokenizer, which must have an end-of-sequence token."""
    from ...agents.special_tokens import check_eos

    check_model(folder)
    tokenizer = pretrained.load_tokenizer(folder)
    with pretrained.reading(folder, "a language model's tokenizer"):
        check_eos(tokenizer)
    return tokenizer


def _check_prompts(plan: RunPlan, split: str, lengths: list[int], limit: int) -> None:
    if too_long := [length for length in lengths if length > limit]:
        raise DataError(
            f"{plan.data}: expected prompts of at most {limit} tokens, but {len(too_long)} of {len(lengths)} in "
            f"{split} have more, the longest {max(too_long)}. Leave them out of the data (a prompt is never cut), or "
            "take models of more positions or, to train on them, a larger --max-prompt-tokens; the default is the "
            "models' positions less the longest response"
        )


def run_seed(plan: RunPlan, on_progress: ProgressFn) -> list[Row]:
    """Trains and evaluates; rows of `COLUMNS` and "split", for val and eval at each evaluated step.

    In a world of processes all train and answer together; only the main one judges, writes and has rows.
    """
    from ...agents import checkpoints
    from ...agents.processes import Processes

    quiet()
    world = Processes()
    plan.evaluation_file(0).parent.mkdir(parents=True, exist_ok=True)
    agent, job = make_agent(plan), plan.job
    judges = judges_of(job.data, proxy=job.reward_spec, own=plan.judge) if world.is_main else Judges()
    # A checkpoint is written before its step is evaluated: the evaluation of a resumed step may be missing, but not
    # those before it, since checkpoints are written at evaluated steps only.
    resumed = max(checkpoints.steps(plan.job.folder), default=0)
    for step in chain([resumed], (int(metrics["step"]) for metrics in agent.updates())):
        due = world.from_main(step in plan.evaluated_steps and not plan.evaluation_file(step).exists())
        done = plan.units_done(step)
        on_progress(ProgressUpdate(plan.cell, done - due * (plan.num_val + plan.num_eval)))
        if due:
            on_progress(ProgressUpdate(plan.cell, done, evaluate_policy(plan, agent, judges, step)))
    steps = plan.evaluated_steps if world.is_main else ()
    return [row for step in steps for row in read_evaluation(plan, step)["rows"]]


def make_agent(plan: RunPlan) -> agents.PPO:
    """PPO on AlpacaFarm-PPO-v0 of the plan's data, with the plan's policy and reward model."""
    job, config = plan.job, plan.ppo_config()
    room, limit = prompt_limits(plan)
    policy = job.policy(max_prompt_tokens=limit, max_response_tokens=plan.max_response_tokens)
    env = job.env(config.rollout_batch_size, policy)
    agent = agents.PPO(env, policy, value_init=job.reward_model, config=config, seed=plan.seed, out=plan.job.folder)
    policy.max_prompt_tokens = room  # what training leaves out is settled; evaluations ask all
    return agent


def evaluate_policy(plan: RunPlan, agent: agents.PPO, judges: Judges, step: int) -> str:
    """Evaluates on val and eval, writes the evaluation's file and returns a line about eval for the progress report.

    Each process answers its share; only the main one judges and writes, the others return no line.
    """
    import torch

    from ...agents.evaluation import answer, sequence_kl
    from ...agents.processes import Processes

    world, dataset = Processes(agent.policy.device), plan.job.data
    rows: list[Row] = []
    unscored: dict[str, dict[str, int]] = {}
    for split in SPLITS:
        instructions = dataset.instructions(split)
        chosen = [instructions[index] for index in subset(len(instructions), getattr(plan, f"num_{split}"))]
        mine = slice(world.rank, None, world.count)
        rollouts = answer(
            agent.policy,
            chosen,
            seed=plan.seed,
            split=split,
            temperature=plan.temperature,
            batch_size=agent.config.sampling_batch_size,
            rows=mine,
        )
        with agent.whole():  # processes have other numbers of passes
            kl = sequence_kl(agent.policy, rollouts, plan.temperature)
        numbers = range(len(chosen))[mine]
        parts = world.gather(list(zip(numbers, rollouts.texts, rollouts.finished.tolist(), kl.tolist(), strict=True)))
        if not world.is_main:
            continue
        _, texts, finished, kls = zip(*sorted(chain.from_iterable(parts)), strict=True)
        asked = judges if has_references(dataset, split) else replace(judges, win_rate=None)
        found = evaluate(chosen, texts, asked, finished=finished)
        means = {**found.means(), "kl": float(torch.tensor(kls).mean())}
        measured = {name: means.get(name, math.nan) for name in MEASURES}
        rows.append({"split": split, "seed": plan.seed, "step": step, **measured})
        unscored[split] = found.unscored()
    if not world.is_main:
        return ""
    content = {"rows": rows, "unscored": unscored, "eval": found.per_response()}
    write_atomic(plan.evaluation_file(step), json.dumps(content) + "\n")
    return f"{plan.cell}, step {step} of {plan.steps}: {describe(rows[-1])}"


def read_evaluation(plan: RunPlan, step: int) -> dict[str, Any]:
    """What `evaluate_policy` wrote; a CheckpointError if it is gone or damaged."""
    cell = cell_file(plan.folder(NAME), plan.cell)
    remedy = f"To run the seed anew remove {plan.job.folder} and, if it is there, {cell}, and call again."
    shape = {
        "rows": [dict.fromkeys(("split", "seed", "step", *MEASURES), object)],
        "unscored": dict,
        "eval": dict.fromkeys(("instructions", "responses", "finished"), list),
    }
    return read_stored(plan.evaluation_file(step), *shape, shape=shape, remedy=remedy)
