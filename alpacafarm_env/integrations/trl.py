"""Prompts and a reward function for TRL's online trainers (GRPO, RLOO ...). Source: TRL 1.16, `GRPOTrainer`.

GRPOTrainer(model, reward_funcs=reward_function("surrogate"), train_dataset=prompts("unlabeled"), args=...)
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..data.forms import row_of
from ..data.load import load_dataset
from ..errors import DataError
from . import scorer


def prompts(split: str = "unlabeled", *, dataset: str = "sandbox") -> Any:
    """A split as a `datasets.Dataset`: `prompt`, one user's message, and `instruction`, which the reward reads."""
    from datasets import Dataset

    instructions = load_dataset(dataset).instructions(split)
    return Dataset.from_list([{**row_of(each, "trl"), "instruction": str(each)} for each in instructions])


def reward_function(
    oracle: str | Mapping[str, Any] = "surrogate", *, dataset: str = "sandbox", seed: int = 0
) -> Callable[..., list[float]]:
    """One of `reward_funcs`: an oracle's score of each completion; UnscoredError where it has none."""
    score = scorer(dataset=dataset, oracle=oracle, seed=seed)

    def alpacafarm(*, completions: Sequence[Any], instruction: Sequence[str] = (), **more: Any) -> list[float]:
        if len(instruction) != len(completions):
            raise DataError(f"expected the data's column `instruction`, as `prompts` has it, got {', '.join(more)}.")
        return score(instruction, [_text(completion) for completion in completions])

    return alpacafarm


def _text(completion: Any) -> str:
    """A completion's text: that of a conversation is in its messages."""
    return completion if isinstance(completion, str) else "".join(message["content"] or "" for message in completion)
