"""Between text and tokens: prompts and responses of a language model, batch-wise."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ..pretrained import token_limits
from ..templates import PromptTemplate
from .rollouts import ragged_split


def encode_prompts(
    tokenizer: PreTrainedTokenizerBase, template: PromptTemplate, instructions: Sequence[str], *, max_tokens: int
) -> list[list[int]]:
    """Returns each instruction's prompt as token ids, with whatever the tokenizer puts in front (BOS).

    Raises:
        ValueError: A prompt has more than `max_tokens` tokens, or none.
    """
    prompts = template.encode_prompts(tokenizer, instructions)
    for instruction, tokens in zip(instructions, prompts, strict=True):
        if not 0 < len(tokens) <= max_tokens:
            raise ValueError(
                f"A prompt must have 1 to {max_tokens} tokens, got {len(tokens)} for the instruction "
                f"{_shorten(instruction)!r}; load the policy with a larger max_prompt_tokens (and, where its positions "
                "do not hold both, a smaller max_response_tokens), or leave the instruction out (of an environment: "
                "env.unwrapped.leave_out([id]))"
            )
    return prompts


def encode_responses(
    tokenizer: PreTrainedTokenizerBase, template: PromptTemplate, responses: Sequence[str], *, eos: bool = True
) -> list[list[int]]:
    """Returns each response as token ids, as they continue a prompt; `eos` ends each as the template ends one."""
    ending = [template.end_id(tokenizer)] if eos else []
    return [row + ending for row in template.encode_responses(tokenizer, responses)]


def fit_limits(max_prompt_tokens: int | None, max_response_tokens: int | None, positions: float) -> tuple[int, int]:
    """Returns the longest prompt and response of a model with so many positions for them, as `token_limits` does.

    Raises:
        ValueError: What was asked for does not fit.
    """
    prompt, response = token_limits(max_prompt_tokens, max_response_tokens, positions)
    if prompt + response > positions:
        raise ValueError(
            f"Expected max_prompt_tokens and max_response_tokens that fit together into the {positions} positions that "
            f"the model has for them (a control token takes one), got {prompt} and {response}; None takes what fits"
        )
    return prompt, response


def decode_rows(tokenizer: PreTrainedTokenizerBase, tokens: Tensor, lengths: Tensor) -> tuple[str, ...]:
    """Returns the text of each row of a flat [sum T] tensor, special tokens left out and no space cleaned up."""
    if not len(lengths):
        return ()
    rows = [row.tolist() for row in ragged_split(tokens.cpu(), lengths)]
    return tuple(tokenizer.batch_decode(rows, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def _shorten(text: str, limit: int = 80) -> str:
    return text if len(text) <= limit else text[: limit - 3] + "..."
