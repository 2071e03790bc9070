"""Prompts as token ids, and the limits of prompts and responses.

No prompt is ever cut. One that is too long is counted and left out before training begins; one that a policy is asked
to answer, in `act` or in an evaluation, is refused.

The longest response travels with a model whose own is not the default: in its config.json, or beside a LoRA adapter in
alpacafarm_limits.json, as `alpacafarm_max_response_tokens`.
"""

import inspect
import json
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import DataError
from ..oracles.base import check_batch, shorten
from ..oracles.reward_model import num_positions
from ..pretrained import token_limits
from ..templates import PromptTemplate
from .special_tokens import own_control_token

KEY = "alpacafarm_max_response_tokens"
FILE = "alpacafarm_limits.json"


def encode_prompts(
    tokenizer: Any, template: PromptTemplate, instructions: Sequence[str], *, max_tokens: int = sys.maxsize
) -> list[list[int]]:
    """Each instruction's prompt as token ids, with BOS if the tokenizer puts it there; errors as of the method."""
    check_batch(instructions)
    prompts = template.encode_prompts(tokenizer, instructions)
    for instruction, tokens in zip(instructions, prompts, strict=True):
        if not 0 < len(tokens) <= max_tokens:
            raise ValueError(
                f"A prompt must have 1 to {max_tokens} tokens, got {len(tokens)} for the instruction "
                f"{shorten(instruction)}; load the policy with a larger max_prompt_tokens (and, where its positions do "
                "not hold both, a smaller max_response_tokens), or leave the instruction out (of an environment: "
                "env.unwrapped.leave_out([id]))"
            )
    return prompts


def fit_limits(max_prompt_tokens: int | None, max_response_tokens: int | None, positions: float) -> tuple[int, int]:
    """The longest prompt and response, as `token_limits` has them; ValueError if they exceed the positions."""
    prompt, response = token_limits(max_prompt_tokens, max_response_tokens, positions)
    if prompt + response > positions:
        raise ValueError(
            f"Expected max_prompt_tokens and max_response_tokens that fit together into the {positions} positions that "
            f"the model has for them (a control token takes one), got {prompt} and {response}; None takes what fits"
        )
    return prompt, response


def settle_limits(model: Any, max_prompt_tokens: int | None, max_response_tokens: int | None) -> tuple[int, int]:
    """The limits of a policy; None takes the longest response that its config keeps. What is not default is kept there.

    Raises:
        ValueError: They do not fit the model's positions.
    """
    positions = num_positions(model.config) - (own_control_token(model) is not None)
    kept, wanted = getattr(model.config, KEY, None), max_response_tokens
    if kept is not None and wanted is None:
        wanted = kept if max_prompt_tokens is None else int(min(kept, max(positions - max_prompt_tokens, 1)))
    prompt, response = fit_limits(max_prompt_tokens, wanted, positions)
    if kept is not None or response != token_limits(None, None, positions)[1]:
        setattr(model.config, KEY, response)
    return prompt, response


def limit_file(model: Any) -> dict[str, Any]:
    """The limit as a file of an adapter's folder, by its name; nothing where it is the default."""
    kept = getattr(model.config, KEY, None)
    return {} if kept is None else {FILE: {KEY: kept}}


def read_limit(model: Any, folder: Path) -> None:
    """Gives a base model the longest response that the folder of its adapter keeps, if it does."""
    if (folder / FILE).is_file():
        setattr(model.config, KEY, json.loads((folder / FILE).read_text(encoding="utf-8"))[KEY])


def prompt_lengths(tokenizer: Any, template: PromptTemplate, instructions: Sequence[str]) -> list[int]:
    """The tokens of each instruction's prompt."""
    return [len(prompt) for prompt in encode_prompts(tokenizer, template, instructions)]


def up_to(limit: int, lengths: Sequence[int], *, who: str, advice: str) -> list[int]:
    """The numbers of the prompts of at most `limit` tokens; warns of the others, a DataError if that is all."""
    kept = [number for number, length in enumerate(lengths) if length <= limit]
    if len(kept) < len(lengths):
        count = len(lengths) - len(kept)
        share, longest = count / len(lengths), max(lengths)
        some = f"{count} of {len(lengths)} prompts ({share:.1%}) have more than {limit} tokens, the longest {longest}"
        if not kept:
            raise DataError(f"{who}: {some}, so there is nothing to train on. A prompt is never cut: {advice}.")
        warn_caller(f"{who}: {some}, and are left out of training. To train on them, {advice}.")
    return kept


def check_budget(micro_batch_tokens: int | None, longest: int, *, who: str) -> None:
    """Refuses, by a DataError, given micro-batches that could not hold the longest row."""
    if micro_batch_tokens is not None and micro_batch_tokens < longest:
        raise DataError(
            f"{who}: expected micro-batches of at least {longest} tokens, as the longest row can have, got "
            f"micro_batch_tokens={micro_batch_tokens}."
        )


def warn_caller(text: str) -> None:
    """Warns at the line outside this package that led here, however many calls there are between."""
    level, frame = 1, inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__", "").split(".")[0] == __name__.split(".")[0]:
        level, frame = level + 1, frame.f_back
    warnings.warn(text, stacklevel=level)
