"""A reward model of one's own: trained from a policy on the preferences of a dataset, tested on held-out ones."""

from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from ... import agents
from ...errors import DataError
from ...instructions import Preference
from ...seeding import keyed_rng
from ..methods.job import Job
from .runs import Form, complete_card, state_of, tracked

HELD_OUT, MOST_HELD_OUT = 0.05, 500
"""Share, and most, of the instructions whose pairs test the model and do not train it."""


def hold_out(preferences: Sequence[Preference]) -> tuple[list[Preference], list[Preference]]:
    """Pairs to train on and pairs to test on, of other instructions; the same in every run.

    Raises:
        DataError: There are pairs of one instruction only.
    """
    by_instruction: dict[str, list[Preference]] = {}
    for preference in preferences:
        by_instruction.setdefault(str(preference.instruction), []).append(preference)
    if len(by_instruction) < 2:
        raise DataError(f"Expected preferences on 2 or more instructions, got them on {len(by_instruction)}.")
    number = min(max(1, round(HELD_OUT * len(by_instruction))), MOST_HELD_OUT)
    chosen = set(keyed_rng(0, "held-out instructions").permutation(len(by_instruction))[:number].tolist())
    parts: tuple[list[list[Preference]], list[list[Preference]]] = [], []
    for place, found in enumerate(by_instruction.values()):
        parts[place in chosen].append(found)
    train, test = (list(chain.from_iterable(part)) for part in parts)
    return train, test


def make_reward_modeling(job: Job, pairs: Sequence[Preference]) -> agents.RewardModeling:
    """The untrained agent."""
    import torch

    return agents.RewardModeling(
        job.policy_folder,
        pairs,
        config=job.config(agents.RewardModelingConfig, epochs=1),
        seed=job.seed,
        out=job.folder,
        template=job.template,
        lora=job.adapter("SEQ_CLS"),
        dtype=getattr(torch, job.dtype or "float32"),
    )


def train_reward_model(
    job: Job, target: Path, tell: Callable[[float, str], None], form: Form, trackers: Sequence[str] = ()
) -> dict[str, Any]:
    """Trains a model and saves it in `target`; accuracy, loss (nats) and margin on the `num_test` pairs held out.

    Raises:
        DataError: There are no preferences, or too few.
    """
    from ...agents.processes import Processes

    train, test = hold_out(job.preferences())
    agent = make_reward_modeling(job, train)
    for metrics in tracked(agent, trackers):
        tell(metrics["step"] / agent.num_steps, state_of(metrics, agent.num_steps))
    found = agent.evaluate(test)
    world = Processes()
    if world.is_main:
        agent.save(target, merged=form == "merged")
        complete_card(target, agent, agent.model, job.dataset, found)
    world.wait()
    return {"num_train": len(train) - agent.num_left_out, "num_test": len(test), **found}
