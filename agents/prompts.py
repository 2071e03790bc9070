"""Prompts as token ids, and the limits that they keep to: no prompt is ever cut."""

import sys
from collections.abc import Sequence
from typing import Any

from ..oracles.base import shorten
from ..pretrained import token_limits
from ..templates import PromptTemplate


def encode_prompts(
    tokenizer: Any, template: PromptTemplate, instructions: Sequence[str], *, max_tokens: int = sys.maxsize
) -> list[list[int]]:
    """Each instruction's prompt as token ids, with BOS if the tokenizer puts it there; errors as of the method."""
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
