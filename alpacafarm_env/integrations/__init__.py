"""For other libraries: an oracle as a function. A module imports its own library, and nothing here imports any.

TRL's online trainers (GRPO, RLOO ...). Source: TRL 1.16, `GRPOTrainer`:

GRPOTrainer(model, reward_funcs=reward_function("surrogate"), train_dataset=prompts("unlabeled"), args=...)

verl. Source: verl 0.9, `NaiveRewardManager`:

reward.custom_reward_function.path=pkg://alpacafarm_env.integrations
+reward.custom_reward_function.reward_kwargs.oracle=surrogate
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from ..data.dataset import Dataset
from ..data.forms import row_of
from ..data.load import load_dataset
from ..errors import DataError
from ..oracles import make_oracle
from ..oracles.base import rewards_of, shorten
from ..oracles.batched import MicroBatched

_batched: dict[int, MicroBatched] = {}


def scorer(
    *, dataset: str | Dataset = "sandbox", oracle: str | Mapping[str, Any], seed: int = 0
) -> Callable[[Sequence[str], Sequence[str]], list[float]]:
    """A function of instructions and responses that asks an oracle; threads that call it together ask it once.

    It raises UnscoredError where the oracle gives no verdict, as trainers would make a number of it.
    """
    made = make_oracle(oracle, dataset=load_dataset(dataset), seed=seed)  # the same object for the same names
    return partial(rewards_of, _batched.setdefault(id(made), MicroBatched(made)))


def instruction_of(row: Mapping[str, Any] | None) -> str:
    """The instruction in a row's `extra_info`; DataError if there is none."""
    instruction = None if row is None else row.get("instruction")
    if not isinstance(instruction, str):
        source = "as `alpacafarm export --format verl` writes it"
        raise DataError(f"extra_info: expected the text `instruction`, {source}, got {shorten(str(row))}.")
    return instruction


def prompts(split: str = "unlabeled", *, dataset: str = "sandbox") -> Any:
    """A split for TRL: `prompt`, one user's message, and `instruction`, which the reward reads."""
    import datasets

    instructions = load_dataset(dataset).instructions(split)
    return datasets.Dataset.from_list([{**row_of(each, "trl"), "instruction": str(each)} for each in instructions])


def reward_function(
    oracle: str | Mapping[str, Any] = "surrogate", *, dataset: str = "sandbox", seed: int = 0
) -> Callable[..., list[float]]:
    """One of TRL's `reward_funcs`: an oracle's score of each completion; UnscoredError where it has none."""
    score = scorer(dataset=dataset, oracle=oracle, seed=seed)

    def alpacafarm(*, completions: Sequence[Any], instruction: Sequence[str] = (), **more: Any) -> list[float]:
        if len(instruction) != len(completions):
            raise DataError(f"expected the data's column `instruction`, as `prompts` has it, got {', '.join(more)}.")
        return score(instruction, [_text(completion) for completion in completions])

    return alpacafarm


def _text(completion: Any) -> str:
    """A completion's text: that of a conversation is in its messages."""
    return completion if isinstance(completion, str) else "".join(message["content"] or "" for message in completion)


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: Mapping[str, Any],
    *,
    oracle: str | Mapping[str, Any] = "surrogate",
    dataset: str = "sandbox",
    seed: int = 0,
    **_: Any,
) -> float:
    """An oracle's score of one response, as verl asks for it.

    `extra_info` has the instruction, as `export --format verl` writes it.

    It asks on several threads at once, which becomes one call of the oracle.
    """
    return scorer(dataset=dataset, oracle=oracle, seed=seed)([instruction_of(extra_info)], [solution_str])[0]
