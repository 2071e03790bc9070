"""Prompts that a policy cannot read: counted before training begins, and left out of it.

A prompt is never cut. One that a policy is asked to answer, in `act` or in an evaluation, is refused instead.
"""

import inspect
import warnings
from collections.abc import Sequence
from heapq import nlargest
from typing import Any

from gymnasium.vector import VectorEnv

from ..envs.scoring import Scoring
from ..errors import DataError
from ..oracles.reward_model import num_positions
from ..templates import PromptTemplate
from .language_model import LanguageModel
from .prompts import encode_prompts
from .special_tokens import own_control_token


def warn_caller(text: str) -> None:
    """Warns at the line outside this package that led here, however many calls there are between."""
    level, frame = 1, inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__", "").split(".")[0] == __name__.split(".")[0]:
        level, frame = level + 1, frame.f_back
    warnings.warn(text, stacklevel=level)


def prompt_lengths(tokenizer: Any, template: PromptTemplate, instructions: Sequence[str]) -> list[int]:
    """The tokens of each instruction's prompt."""
    return [len(prompt) for prompt in encode_prompts(tokenizer, template, instructions)]


def check_budget(micro_batch_tokens: int | None, longest: int, *, who: str) -> None:
    """Refuses, by a DataError, given micro-batches that could not hold the longest row."""
    if micro_batch_tokens is not None and micro_batch_tokens < longest:
        raise DataError(
            f"{who}: expected micro-batches of at least {longest} tokens, as the longest row can have, got "
            f"micro_batch_tokens={micro_batch_tokens}."
        )


def fitting(
    policy: LanguageModel,
    instructions: Sequence[str],
    *,
    who: str,
    width: int | None = None,
    micro_batch_tokens: int | None = None,
) -> list[int]:
    """The numbers of the instructions whose prompts the policy can read; a warning by `who` counts the others.

    `width` is how many tokens a response needs after the prompt (None: the policy's longest), and `micro_batch_tokens`
    what must hold each prompt with such a response (None: chosen by what there is).

    Raises:
        DataError: No prompt can be read, or a micro-batch is too small.
    """
    limit, advice = policy.max_prompt_tokens, "load the policy with a larger max_prompt_tokens"
    # The control token of a conditioned policy is in front of the prompt, and not counted as one of its tokens.
    taken = (policy.max_response_tokens if width is None else width) + (own_control_token(policy.model) is not None)
    room = num_positions(policy.model.config) - taken
    if room < limit:
        limit, advice = int(room), "take a smaller max_response_tokens: the model's positions must hold both"
    lengths = prompt_lengths(policy.tokenizer, policy.template, instructions)
    kept = up_to(limit, lengths, who=who, advice=advice)
    check_budget(micro_batch_tokens, max((lengths[number] for number in kept), default=0) + taken, who=who)
    return kept


def up_to(limit: int, lengths: Sequence[int], *, who: str, advice: str) -> list[int]:
    """The numbers of the prompts of at most `limit` tokens; warns of the others, a DataError if that is all."""
    kept = [number for number, length in enumerate(lengths) if length <= limit]
    if len(kept) < len(lengths):
        count = len(lengths) - len(kept)
        share, longest = count / len(lengths), max(lengths)
        some = (
            f"{count} of {len(lengths)} prompts ({share:.1%}) have more than {limit} tokens, the longest {longest}"
        )
        if not kept:
            raise DataError(f"{who}: {some}, so there is nothing to train on. A prompt is never cut: {advice}.")
        warn_caller(f"{who}: {some}, and are left out of training. To train on them, {advice}.")
    return kept


def unreadable(
    env: VectorEnv[Any, Any, Any], policy: LanguageModel, *, who: str, width: int, micro_batch_tokens: int | None
) -> list[tuple[Any, frozenset[int]]]:
    """The instructions of an environment that the policy cannot read, without changing it. Arguments as of `fitting`.

    The environment may have any wrappers, or be a SyncVectorEnv of single ones. One whose instructions lie in other
    processes cannot be looked into: a prompt that is too long is refused there when it is drawn.

    Returns:
        Environments with the positions of their instructions that are too long, for `leaving_out`.
    """
    too_long: dict[tuple[object, ...], frozenset[int]] = {}  # separate environments mostly have the same
    rows = []
    for scoring in scorings(env):
        drawn = [(position, scoring.instructions[position]) for position in scoring.drawn]
        key = tuple((position, x.instruction, x.input) for position, x in drawn)
        if key not in too_long:
            texts = [x for _, x in drawn]
            kept = set(fitting(policy, texts, who=who, width=width, micro_batch_tokens=micro_batch_tokens))
            too_long[key] = frozenset(position for number, (position, _) in enumerate(drawn) if number not in kept)
        if too_long[key]:
            rows.append((scoring, too_long[key]))
    return rows


def longest_prompt(env: VectorEnv[Any, Any, Any], policy: LanguageModel) -> int:
    """Tokens of the longest prompt that an environment gives a policy, by its longest texts; or the policy's limit."""
    texts = [scoring.instructions[position] for scoring in scorings(env) for position in scoring.drawn]
    longest = prompt_lengths(policy.tokenizer, policy.template, nlargest(64, texts, key=len))
    return min([policy.max_prompt_tokens, *([max(longest)] if longest else [])])


def scorings(env: VectorEnv[Any, Any, Any]) -> list[Scoring]:
    """The AlpacaFarm environments below any wrappers: one, or those of a SyncVectorEnv of single ones."""
    base: Any = env.unwrapped
    below = [base] if isinstance(base, Scoring) else [single.unwrapped for single in getattr(base, "envs", ())]
    return [each for each in below if isinstance(each, Scoring)]
