"""What the tests of expert iteration share: oracles that are counted or picky, small runs, and what a run leaves."""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tiny_worlds import ASCII, TEXTS, Share, load_policy

from alpacafarm_env.agents.expert_iteration import ExpertIteration, ExpertIterationConfig
from alpacafarm_env.agents.language_model import LanguageModel
from alpacafarm_env.agents.sft import SFTConfig
from alpacafarm_env.instructions import Instruction

INSTRUCTIONS = tuple(Instruction(text, id=10 + i) for i, text in enumerate(TEXTS))
DEADLINE_S = 300
LAST_POLICY = "round-1/sft/checkpoint-4/policy/model.safetensors"


class Counting(Share):
    """Counts the instructions it is shown: each is scored when it is sampled, and then only."""

    def __init__(self) -> None:
        super().__init__(ASCII)
        self.asked: list[str] = []

    def score(self, instructions: Sequence[str], responses: Sequence[str]) -> NDArray[np.float64]:
        self.asked += dict.fromkeys(instructions)
        return super().score(instructions, responses)


class Odd(Share):
    """Gives a verdict on every other response only."""

    def score(self, instructions: Sequence[str], responses: Sequence[str]) -> NDArray[np.float64]:
        return np.where([self.judges(text) for text in responses], super().score(instructions, responses), np.nan)

    @staticmethod
    def judges(response: str) -> bool:
        return sum(map(ord, response)) % 2 == 1


class Silent(Share):
    """Gives no verdict on anything said to one instruction, or to all."""

    def __init__(self, *about: str) -> None:
        super().__init__(ASCII)
        self.about = about or TEXTS

    def score(self, instructions: Sequence[str], responses: Sequence[str]) -> NDArray[np.float64]:
        silent = np.array([instruction in self.about for instruction in instructions])
        return np.where(silent, np.nan, super().score(instructions, responses))


def small(**changes: Any) -> ExpertIterationConfig:
    """Two rounds of three chunks and four updates."""
    sft = SFTConfig(epochs=2, batch_size=3, learning_rate=3e-3, save_every=2)
    settings: dict[str, Any] = {"num_samples": 4, "num_rounds": 2, "instructions_per_step": 2, "sft": sft}
    return ExpertIterationConfig(**{**settings, **changes})


def make(policy: LanguageModel | Path, out: Path | None = None, **changes: Any) -> ExpertIteration:
    if isinstance(policy, Path):
        policy = load_policy(policy)
    settings = {"instructions": INSTRUCTIONS, "oracle": Share(ASCII), "config": small(), "seed": 3, **changes}
    return ExpertIteration(policy, settings.pop("instructions"), settings.pop("oracle"), out=out, **settings)


def train(policy_folder: Path, out: Path) -> None:
    """A run that may be killed, slow enough that it will be."""
    for _ in make(policy_folder, out).updates():
        time.sleep(0.05)


def read(out: Path, number: int = 1) -> list[dict[str, Any]]:
    """All best responses of a round, in order."""
    files = sorted((out / f"round-{number}").glob("chunk-*/best.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text().split("\n") if line]


def result(out: Path) -> dict[str, bytes]:
    """Everything a finished run leaves that sampling and training decide."""
    kept = [
        path for path in out.rglob("*") if path.suffix in (".safetensors", ".jsonl") and path.name != "timing.jsonl"
    ]
    return {str(path.relative_to(out)): path.read_bytes() for path in kept}


def weights(agent: ExpertIteration) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in agent.policy.model.named_parameters()}
