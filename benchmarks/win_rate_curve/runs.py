"""One seed of the win-rate curve: trains PPO and, every few steps, evaluates the policy on val and eval.

Each evaluation is a file of the run's folder, written when it is done; PPO keeps a checkpoint at the same steps. A run
that was interrupted therefore continues where it stopped, and its numbers are those of a run that was not.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import chain
from typing import Any

import gymnasium as gym
from gymnasium.vector import AutoresetMode

from ... import agents
from ...data.files import write_atomic
from ..harness.evaluation import Judges, answer, describe, evaluate, judges_of, sequence_kl, subset
from ..harness.own_judge import has_references
from ..harness.runner import ProgressFn, ProgressUpdate, quiet
from ..harness.stored import cell_file, read_stored
from ..harness.study import Row
from .inputs import prompt_limit, prompt_room
from .plan import NAME, SPLITS, RunPlan
from .summary import MEASURES


def run_seed(plan: RunPlan, on_progress: ProgressFn) -> list[Row]:
    """Trains and evaluates; rows of `COLUMNS` and "split", for val and eval at each evaluated step.

    In a world of processes all train and answer together; the main one alone judges, writes and has rows.
    """
    from ...agents import checkpoints
    from ...agents.processes import Processes

    quiet()
    world = Processes()
    plan.evaluation_file(0).parent.mkdir(parents=True, exist_ok=True)
    agent = make_agent(plan)
    judges = judges_of(plan.dataset, proxy=plan.proxy, own=plan.judge) if world.is_main else Judges()
    # A checkpoint is written before its step is evaluated, so the evaluation of a resumed step may be missing still;
    # those before it are not, since checkpoints are written at evaluated steps only.
    resumed = max(checkpoints.steps(plan.run_folder), default=0)
    for step in chain([resumed], (int(metrics["step"]) for metrics in agent.updates())):
        due = world.from_main(step in plan.evaluated_steps and not plan.evaluation_file(step).exists())
        on_progress(ProgressUpdate(plan.cell, plan.units_done(step) - due * plan.evaluation_units))
        if due:
            on_progress(ProgressUpdate(plan.cell, plan.units_done(step), evaluate_policy(plan, agent, judges, step)))
    steps = plan.evaluated_steps if world.is_main else ()
    return [row for step in steps for row in read_evaluation(plan, step)["rows"]]


def make_agent(plan: RunPlan) -> agents.PPO:
    """PPO on AlpacaFarm-PPO-v0 of the plan's data, with the plan's policy and reward model."""
    from ...agents.processes import Processes, default_device

    config = plan.ppo_config()
    env = gym.make_vec(
        "AlpacaFarm-PPO-v0",
        num_envs=config.rollout_batch_size // Processes().count,
        dataset=plan.dataset,
        oracle=plan.proxy,
        autoreset_mode=AutoresetMode.DISABLED,
    )
    folder, reward_model = plan.model_folders
    policy = agents.LanguageModel.from_pretrained(
        folder,
        device=default_device(),
        template=plan.policy_template,
        max_prompt_tokens=prompt_limit(plan),
        max_response_tokens=plan.max_response_tokens,
    )
    agent = agents.PPO(env, policy, value_init=reward_model, config=config, seed=plan.seed, out=plan.run_folder)
    policy.max_prompt_tokens = prompt_room(plan)  # what training leaves out is settled; evaluations ask all
    return agent


def evaluate_policy(plan: RunPlan, agent: agents.PPO, judges: Judges, step: int) -> str:
    """Evaluates on val and eval, writes the evaluation's file and returns a line about eval for the progress report.

    Each process answers its share; the main one alone judges and writes, the others return no line.
    """
    import torch

    from ...agents.processes import Processes

    world = Processes(agent.policy.device)
    dataset = plan.dataset
    rows: list[Row] = []
    unscored: dict[str, dict[str, int]] = {}
    for split, wanted in zip(SPLITS, (plan.num_val, plan.num_eval), strict=True):
        instructions = dataset.instructions(split)
        chosen = [instructions[index] for index in subset(len(instructions), wanted)]
        mine = slice(world.rank, None, world.count)
        rollouts = answer(agent, chosen, seed=plan.seed, split=split, temperature=plan.temperature, rows=mine)
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
    """What `evaluate_policy` wrote.

    Raises:
        CheckpointError: It is gone or damaged.
    """
    cell = cell_file(plan.folder(NAME), plan.cell)
    remedy = f"To run the seed anew remove {plan.run_folder} and, if it is there, {cell}, and call again."
    shape = {
        "rows": [dict.fromkeys(("split", "seed", "step", *MEASURES), object)],
        "unscored": dict,
        "eval": dict.fromkeys(("instructions", "responses", "finished"), list),
    }
    return read_stored(plan.evaluation_file(step), *shape, shape=shape, remedy=remedy)
