"""Reward models of the sandbox: trained from the SFT policy, calibrated so that 0 is an SFT response's mean score."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from ...agents import LanguageModel, RewardModeling, RewardModelingConfig
from ...agents.loop import keyed_generator
from ...agents.processes import Processes
from ...instructions import Instruction, Preference
from ...sandbox import dataset as texts
from .fresh_pairs import MAX_RESPONSE_TOKENS

LAST_FILE: Final = "tokenizer_config.json"
"""Of a saved model's folder: files are put in place in the order of their names, so with this one all are there."""


def sample(
    model: LanguageModel, instructions: Sequence[Instruction], key: str, num_samples: int = 1
) -> tuple[str, ...]:
    """Responses at temperature 1, keyed by the sandbox's seed; those to one instruction follow each other."""
    generator = keyed_generator(texts.SEED, "build", key)
    return model.generate(instructions, generator=generator, num_samples=num_samples).texts


def fit(
    policy: Path,
    preferences: Sequence[Preference],
    target: Path,
    *,
    val: Sequence[Instruction],
    config: RewardModelingConfig,
    seed: int,
    out: Path,
    sft: Path | None = None,
    num_samples: int = 1,
    on_progress: Callable[[float], None] = lambda share: None,
) -> dict[str, float]:
    """Trains a reward model from a policy's trunk, calibrates it and saves it.

    Args:
        policy: Folder of the SFT policy.
        preferences: Settled pairs.
        target: Where the model goes.
        val: Instructions whose sampled answers set the scale.
        config: Settings of the training.
        seed: Of the training.
        out: Folder for metrics and checkpoints.
        sft: Folder of the policy whose answers set the scale, if it is another one.
        num_samples: Of its answers to each instruction. With 2 or more a unit of reward is their standard deviation
            within an instruction; with 1, that of all answers.
        on_progress: Called with the share of the steps that is done.

    Returns:
        The last step's metrics, and the mean and standard deviation of SFT responses' scores before the calibration.
    """
    agent = RewardModeling(policy, preferences, config=config, seed=seed, out=out)
    metrics: dict[str, float] = {}
    for metrics in agent.updates():
        on_progress(metrics["step"] / agent.num_steps)
    answering = LanguageModel.from_pretrained(sft or policy, max_response_tokens=MAX_RESPONSE_TOKENS)
    answers = sample(answering, val, "calibration", num_samples)
    asked = [instruction for instruction in val for _ in range(num_samples)]
    mean, std = agent.calibrate(asked, answers, num_samples=num_samples)
    world = Processes()
    if world.is_main:
        agent.save(target)
    world.wait()
    return {**metrics, "sft/mean": mean, "sft/std": std}
