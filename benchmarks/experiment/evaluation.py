"""Evaluation: an agent's answers, stored in blocks as they come, and what each judge says of each of them.

Every value is kept per response; `Evaluation.means` is the row of a table. A measure that the data's level does not
have (gold outside the sandbox, for instance) is NaN throughout, never a guess.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ...data import Dataset
from ...data.files import write_atomic
from ...errors import DataError
from ...instructions import Instruction
from ...oracles import make_oracle
from ...oracles.base import RewardOracle, judge
from ...oracles.ensemble import DISAGREEMENT
from ...oracles.reward_model import num_positions
from ...statistics import win_rate
from ..harness.report import number
from ..harness.stored import read_stored
from ..methods.methods import Actor
from .own_judge import make_own_judge

ANSWERED_AT_ONCE: Final = 161
"""Instructions whose answers are stored together; draws of `act` are keyed on all of them."""
ANSWERS: Final = {"responses": [str], "tokens": int}
SCORES = ("proxy", "gold", "win_rate_simulated", "win_rate_human")
"""The measures that an oracle decides, in the order of the tables."""
WIN_RATES = ("win_rate_simulated", "win_rate_human")
"""Those that are wins against the reference: a credit in [0, 1] for each response, percent in the means."""
OWN_WIN_RATE = "win_rate"
"""The win rate by a judge of one's own, where there is one."""


Judges = Mapping[str, RewardOracle | None]
"""The oracle of each measure in the order of the tables; None for one that does not exist here (its values are NaN).

proxy: the reward that training maximises, in its own units. gold: the true reward, which the sandbox has.
win_rate_simulated: verdicts, 1 for the response and 0 for the reference, by p_sim^eval, the simulated pool without
added noise; win_rate_human: the same by the human raters (in the sandbox: 16 simulated ones). win_rate: credit in
[0, 1] by a judge of one's own; without one there is no such measure."""


def missing_at(level: str) -> tuple[str, ...]:
    """The measures that a level does not have: gold, the simulated pool and human raters live in the sandbox only."""
    return () if level == "sandbox" else SCORES[1:]


def judges_of(
    dataset: Dataset, *, proxy: RewardOracle | None = None, own: str | None = None
) -> dict[str, RewardOracle | None]:
    """The judges that a dataset's level has: all four in the sandbox, the proxy alone elsewhere; and one's own.

    Args:
        dataset: Whose references are to be beaten.
        proxy: What stands for the training reward.
        own: A judge of one's own, see `own_judge`.
    """
    names = dict(zip(SCORES[1:], ("gold", "win_rate", "human"), strict=True))
    missing = missing_at(dataset.level)
    judges = {each: None if each in missing else make_oracle(name, dataset=dataset) for each, name in names.items()}
    judged = {} if own is None else {OWN_WIN_RATE: make_own_judge(own, dataset)}
    return {"proxy": proxy, **judges, **judged}


@dataclass(frozen=True)
class Evaluation:
    """The values of B responses."""

    instructions: tuple[str, ...]
    responses: tuple[str, ...]
    values: Mapping[str, NDArray[Any]]
    """[B] each: the measures of `SCORES`, `OWN_WIN_RATE` where there is such a judge, "length" in characters (Unicode
    code points), "finished" (1.0 where the response ended by itself, 0.0 where it was cut), an ensemble's
    "disagreement", and what else the caller has measured. NaN = no verdict, or no such judge at this level."""

    def means(self) -> dict[str, float]:
        """Means over the responses with a value: win rates in percent, length in characters, finished in [0, 1]."""
        rates = (*WIN_RATES, OWN_WIN_RATE)
        return {name: win_rate(each).win_rate if name in rates else _mean(each) for name, each in self.values.items()}

    def per_response(self) -> dict[str, list[Any]]:
        """Instructions, responses and every value of each, JSON-able: NaN as None."""
        plain = {
            name: [None if value != value else value for value in each.tolist()] for name, each in self.values.items()
        }
        return {"instructions": list(map(str, self.instructions)), "responses": list(self.responses), **plain}


def evaluate(
    instructions: Sequence[str],
    responses: Sequence[str],
    judges: Judges,
    values: Mapping[str, Sequence[Any] | NDArray[Any]] | None = None,
) -> Evaluation:
    """Scores B responses by every judge, one call a judge; `values` are those that the caller has measured, [B] each.

    Raises:
        ValueError: The sequences differ in length.
        OracleError: A judge's answer has a wrong shape, or holds an infinity.
    """
    measured = {"finished": np.full(len(responses), np.nan), **(values or {})}
    counts = (len(instructions), len(responses), *map(len, measured.values()))
    if len(set(counts)) != 1:
        raise ValueError(f"expected as many instructions as responses (and of each value), got {counts}")
    scores: dict[str, NDArray[Any]] = {}
    for name, oracle in judges.items():
        verdicts = None if oracle is None else judge(oracle, instructions, responses)
        scores[name] = np.full(len(responses), np.nan) if verdicts is None else verdicts.scores
        if name == "proxy" and verdicts is not None and DISAGREEMENT in verdicts.details:
            scores[DISAGREEMENT] = np.asarray(verdicts.details[DISAGREEMENT], dtype=np.float64)
    length = np.array([len(response) for response in responses], dtype=np.int64)
    arrays = {name: np.asarray(each, dtype=_dtype(each)) for name, each in measured.items()}
    return Evaluation(tuple(instructions), tuple(responses), {**scores, "length": length, **arrays})


def describe(means: Mapping[str, Any]) -> str:
    """One line about the means of an evaluation, in the middle of a run; what was not measured is left out."""
    texts = {
        "proxy": ("proxy {}", ""),
        "gold": ("gold {}", ""),
        "win_rate_simulated": ("win rate {} % simulated", "%"),
        "win_rate_human": ("{} % human", "%"),
        "win_rate": ("win rate {} % by the judge", "%"),
        "kl": ("KL {}", ""),
        "length": ("length {}", "characters"),
        "seconds": ("{} s", "characters"),
    }
    measured = {name: text for name, text in texts.items() if not math.isnan(means.get(name, math.nan))}
    return ", ".join(text.format(number(means[name], unit)) for name, (text, unit) in measured.items())


def subset(num_items: int, num_wanted: int) -> list[int]:
    """Up to `num_wanted` positions spread evenly over `num_items`, always the same: each source has its share."""
    count = min(num_items, num_wanted)
    return [index * num_items // count for index in range(count)]


def _dtype(values: Any) -> Any:
    """Single precision stays: a mean over it is what an earlier table has, to the last digit."""
    return np.float32 if getattr(values, "dtype", None) == np.float32 else np.float64


def _mean(values: NDArray[Any]) -> float:
    known = values[~np.isnan(values)]
    if values.dtype == np.float32:
        import torch

        return float(torch.from_numpy(known).mean()) if len(known) else math.nan
    return float(known.mean()) if len(known) else math.nan


@contextmanager
def room_for(actor: Any, longest: int) -> Iterator[None]:
    """Prompts of so many tokens are answered within, also those that training left out; 0 for no policy."""
    if not longest:
        yield
        return
    before = actor.policy.max_prompt_tokens
    actor.policy.max_prompt_tokens = max(before, longest)
    yield
    actor.policy.max_prompt_tokens = before


def longest_prompt(actor: Actor, instructions: Sequence[Instruction]) -> int:
    """Tokens of the longest prompt to answer, which training may have left out; 0 for an actor without a policy.

    Raises:
        DataError: A prompt and a response do not fit the policy's positions.
    """
    policy: Any = getattr(actor, "policy", None)
    if not hasattr(policy, "max_response_tokens"):
        return 0
    from ...agents.prompts import own_control_token, prompt_lengths

    width = policy.max_response_tokens + (own_control_token(policy.model) is not None)
    room = num_positions(policy.model.config) - width
    lengths = prompt_lengths(policy.tokenizer, policy.template, instructions)
    if too_long := [length for length in lengths if length > room]:
        raise DataError(
            f"{len(too_long)} of {len(lengths)} prompts of eval do not fit the policy with a response of {width} "
            f"tokens: the longest has {max(too_long)}, and there is room for {room:g}. Leave them out of the data (a "
            "prompt is never cut)."
        )
    return max(lengths, default=0)


def answer(
    actor: Actor, instructions: Sequence[Instruction], folder: Path, tell: Callable[[float], None]
) -> tuple[tuple[str, ...], int]:
    """One response per instruction and the tokens sampled for all; answers stored by an earlier call are kept.

    Processes of a world share the missing files; a response does not depend on which one gives it. Best-of-n has its
    own number of instructions to a file: 161 times 1024 samples of a large model would take hours.
    """
    from ...agents.processes import Processes

    world, size = Processes(), getattr(actor, "instructions_at_once", ANSWERED_AT_ONCE)
    starts = range(0, len(instructions), size)
    blocks = {folder / f"{first:06}-{size}.json": instructions[first : first + size] for first in starts}
    missing = world.from_main([file for file in blocks if not file.is_file()])
    for first in range(0, len(missing), world.count):
        files = missing[first : first + world.count]
        done = world.spread(files, lambda file: respond(actor, blocks[file]))
        for file, block in zip(files, done, strict=True):
            if world.is_main:
                folder.mkdir(exist_ok=True)
                write_atomic(file, json.dumps(block))
        left = sum(len(blocks[file]) for file in missing[first + world.count :])
        tell(1 - left / len(instructions))
    stored = world.from_main([read_stored(file, *ANSWERS, shape=ANSWERS) for file in blocks if world.is_main])
    responses = tuple(response for block in stored for response in block["responses"])
    return responses, sum(block["tokens"] for block in stored)


def respond(actor: Actor, instructions: Sequence[Instruction]) -> dict[str, Any]:
    """The responses to some instructions, and the tokens sampled for them."""
    before = getattr(actor, "num_tokens", 0)
    responses = list(actor.act(instructions))
    if len(responses) != len(instructions):
        raise ValueError(
            f"{type(actor).__name__}.act: expected a response to each of {len(instructions)} instructions, got "
            f"{len(responses)} responses"
        )
    return {"responses": responses, "tokens": getattr(actor, "num_tokens", 0) - before}
