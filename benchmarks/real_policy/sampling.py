"""The policy's answers, and its hidden states on its own and on recorded texts.

A block of samples is drawn by itself, with random numbers keyed by (seed, instruction, block): it is the same whatever
else is drawn with it, in whatever order.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ...oracles.reward_model import num_positions
from ..harness.runner import ProgressFn, ProgressUpdate, quiet
from ..harness.study import Row
from .plan import Array, Plan, world_of, write_array

if TYPE_CHECKING:
    from ...agents import LanguageModel
    from ...agents.precision import Precision

RECORDED_AT_ONCE = 64
"""Recorded texts between two reports of progress."""


@cache
def load_policy(path: str, tokens: int, precision: Precision) -> LanguageModel:
    """The policy, with room for prompts of up to 512 tokens."""
    from ...agents import LanguageModel

    policy = LanguageModel.from_pretrained(path, max_response_tokens=tokens)
    policy.precision = precision
    policy.max_prompt_tokens = int(min(512, num_positions(policy.model.config) - tokens))
    return policy


def draw_answers(plan: Plan, key: str, blocks: Sequence[tuple[int, int]], on_progress: ProgressFn) -> list[Row]:
    """Draws some blocks of samples; those that are stored already are kept."""
    from ...agents.loop import keyed_generator

    quiet()
    on_progress(ProgressUpdate(key, 0))
    policy, world = load_policy(plan.policy, plan.sizes.tokens, plan.precision), world_of(plan)
    for done, (block, place) in enumerate(blocks, start=1):
        if not plan.answers_file(block, place).is_file():
            instruction = world.at(place)
            generator = keyed_generator(plan.seed, "real policy", str(instruction), block)
            drawn = policy.generate([instruction], generator=generator, num_samples=plan.sizes.block)
            plan.write_answers(block, place, list(drawn.texts))
        on_progress(ProgressUpdate(key, done))
    return []


def read_states(plan: Plan, key: str, blocks: Sequence[tuple[int, int]], on_progress: ProgressFn) -> list[Row]:
    """Stores the policy's states on some blocks of its samples."""
    quiet()
    on_progress(ProgressUpdate(key, 0))
    world = world_of(plan)
    for done, (block, place) in enumerate(blocks, start=1):
        if not (file := plan.states_file(block, place)).is_file():
            size = plan.sizes.block
            texts = plan.texts(place, (block + 1) * size)[block * size :]
            states = pooled_states(plan, [world.at(place)] * len(texts), texts, plan.sizes.tokens)
            write_array(file, states.astype(np.float16))
        on_progress(ProgressUpdate(key, done / 2))
    return []


def read_recorded_states(plan: Plan, key: str, model: int | None, on_progress: ProgressFn) -> list[Row]:
    """Stores the policy's states on all texts of a recorded model, or of the reference."""
    quiet()
    on_progress(ProgressUpdate(key, 0))
    world = world_of(plan)
    texts = world.judged.references if model is None else world.judged.outputs[model]
    parts = range(0, len(texts), RECORDED_AT_ONCE)
    states = []
    for first in parts:
        rows = slice(first, first + RECORDED_AT_ONCE)
        states.append(pooled_states(plan, world.instructions[rows], texts[rows], plan.sizes.recorded_tokens))
        on_progress(ProgressUpdate(key, 4 * len(states) / len(parts)))
    write_array(recorded_file(plan, model), np.concatenate(states).astype(np.float16))
    return []


def recorded_file(plan: Plan, model: int | None) -> Path:
    """Where the states on a recorded model's texts are; None is the reference."""
    return plan.out / "states" / f"recorded-{'reference' if model is None else format(model, '03')}.npy"


def pooled_states(plan: Plan, instructions: Sequence[str], texts: Sequence[str], tokens: int) -> Array:
    """The last hidden states of the policy, averaged over the first tokens of B responses: [B, width].

    NaN where the prompt is too long for the policy.
    """
    from ...agents.prompts import prompt_lengths

    policy = load_policy(plan.policy, tokens, plan.precision)
    lengths = prompt_lengths(policy.tokenizer, policy.template, instructions)
    fits = np.array(lengths) <= policy.max_prompt_tokens
    kept = np.flatnonzero(fits).tolist()
    rollouts = policy.as_rollouts([instructions[i] for i in kept], [texts[i] for i in kept])
    states = np.full((len(texts), policy.model.config.hidden_size), np.nan)
    states[kept] = policy.states(rollouts).cpu().numpy()
    return states
