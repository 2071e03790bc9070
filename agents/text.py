"""Between text and tokens: prompts and responses of a language model, batch-wise."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ..templates import PromptTemplate
from .rollouts import ragged_split


def encode_prompts(
    tokenizer: PreTrainedTokenizerBase, template: PromptTemplate, instructions: Sequence[str], *, max_tokens: int
) -> list[list[int]]:
    """Returns each instruction's prompt as token ids, with whatever the tokenizer puts in front (BOS).

    Raises:
        ValueError: A prompt has more than `max_tokens` tokens, or none.
    """
    # Some tokenizers end every text with EOS; a prompt that ends so would ask for nothing.
    eos = tokenizer.eos_token_id
    rows = _encode(tokenizer, [template.render(instruction) for instruction in instructions], special=True)
    prompts = [row[:-1] if row[-1:] == [eos] else row for row in rows]
    for instruction, tokens in zip(instructions, prompts, strict=True):
        if not 0 < len(tokens) <= max_tokens:
            raise ValueError(
                f"A prompt must have 1 to {max_tokens} tokens, got {len(tokens)} for the instruction "
                f"{_shorten(instruction)!r}; leave it out or raise max_prompt_tokens"
            )
    return prompts


def encode_responses(
    tokenizer: PreTrainedTokenizerBase, template: PromptTemplate, responses: Sequence[str], *, eos: bool = True
) -> list[list[int]]:
    """Returns each response as token ids, as they continue a prompt; `eos` ends each with the EOS token.

    A tokenizer of SentencePiece's kind puts a space before the first word of a text. A response is no such text: it
    follows the template's last character, so it is encoded after that and the character is cut off again.
    """
    anchor = template.tail[-1:]
    anchor_tokens = _encode(tokenizer, [anchor])[0] if anchor else []
    joined = _encode(tokenizer, [anchor + response for response in responses])
    split = len(anchor_tokens)
    # Where anchor and response merge into one token they cannot be cut apart: encode the response alone.
    merged = [i for i, tokens in enumerate(joined) if tokens[:split] != anchor_tokens]
    alone = dict(zip(merged, _encode(tokenizer, [responses[i] for i in merged]), strict=True))
    ending = [tokenizer.eos_token_id] if eos else []
    return [alone.get(i, tokens[split:]) + ending for i, tokens in enumerate(joined)]


def decode_rows(tokenizer: PreTrainedTokenizerBase, tokens: Tensor, lengths: Tensor) -> tuple[str, ...]:
    """Returns the text of each row of a flat [sum T] tensor, special tokens left out and no space cleaned up."""
    if not len(lengths):
        return ()
    rows = [row.tolist() for row in ragged_split(tokens.cpu(), lengths)]
    return tuple(tokenizer.batch_decode(rows, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def _encode(tokenizer: PreTrainedTokenizerBase, texts: list[str], *, special: bool = False) -> list[list[int]]:
    if not texts:
        return []
    # split_special_tokens: "</s>" spelled out in somebody's text is four letters, not the end of the sequence.
    rows: list[list[int]] = tokenizer(texts, add_special_tokens=special, split_special_tokens=True, verbose=False)[
        "input_ids"
    ]
    return rows


def _shorten(text: str, limit: int = 80) -> str:
    return text if len(text) <= limit else text[: limit - 3] + "..."
