"""Prompt templates: how an instruction becomes the text, and the tokens, a model reads.

A model folder carries its own template, in `prompt_template.json` (AlpacaFarm's two keys) or in its tokenizer's
`chat_template` (see `chat_templates`), so models with different formats can meet in one environment.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from .data.files import write_atomic
from .errors import DataError
from .instructions import Instruction

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FILE_NAME = "prompt_template.json"
_PLACEHOLDER = re.compile(r"\{(instruction|input)\}")


@dataclass(frozen=True)
class PromptTemplate:
    """Two texts with the placeholders `{instruction}` and, in the one for instructions with an input, `{input}`.

    Raises DataError if a text lacks a placeholder it needs, or has one it may not have.
    """

    with_input: str
    without_input: str

    def __post_init__(self) -> None:
        _check("with_input", self.with_input, {"instruction", "input"})
        _check("without_input", self.without_input, {"instruction"})

    def render(self, instruction: str) -> str:
        """Returns the prompt; a str that is no `Instruction` has no input.

        Fields are substituted in one pass: an instruction that itself contains "{input}" is left as it is. A system
        text stays in front of its instruction, with a warning.
        """
        ask = instruction if isinstance(instruction, Instruction) else Instruction(instruction)
        if ask.system:
            warn_no_place()
        fields = {"instruction": ask.instruction, "input": ask.input}
        text = self.with_input if fields["input"] else self.without_input
        return _PLACEHOLDER.sub(lambda match: fields[match[1]], text)

    @property
    def tail(self) -> str:
        """The text right before every response."""
        return _PLACEHOLDER.split(self.without_input)[-1]

    def encode_prompts(self, tokenizer: PreTrainedTokenizerBase, instructions: Sequence[str]) -> list[list[int]]:
        """Returns each instruction's prompt as token ids, with whatever the tokenizer puts in front (BOS)."""
        # Some tokenizers end every text with EOS; a prompt that ends so would ask for nothing.
        rows = tokens_of(tokenizer, [self.render(instruction) for instruction in instructions], around=True)
        return [row[:-1] if row[-1:] == [tokenizer.eos_token_id] else row for row in rows]

    def encode_responses(self, tokenizer: PreTrainedTokenizerBase, responses: Sequence[str]) -> list[list[int]]:
        """Returns each response as token ids, as they continue a prompt, without an end.

        SentencePiece puts a space before the first word of a text. A response follows the template's last character
        instead, so it is encoded after that, and the character is cut off again.
        """
        anchor = self.tail[-1:]
        joined = tokens_of(tokenizer, [anchor + response for response in responses])
        return cut_anchor(tokenizer, tokens_of(tokenizer, [anchor])[0], joined, responses)

    def encode_pairs(
        self,
        tokenizer: PreTrainedTokenizerBase,
        instructions: Sequence[str],
        responses: Sequence[str],
        *,
        eos: bool,
    ) -> list[list[int]]:
        """Returns prompt and response as one row of token ids each, what a reward model reads.

        With `eos` a row ends with one EOS token; without, as the tokenizer ends every text.
        """
        texts = [self.render(x) + y for x, y in zip(instructions, responses, strict=True)]
        rows, end = tokens_of(tokenizer, texts, around=True), tokenizer.eos_token_id
        if not eos or end is None:
            return rows
        return [row if row[-1:] == [end] else [*row, end] for row in rows]

    def end_id(self, tokenizer: PreTrainedTokenizerBase) -> int:
        """The token that ends a response."""
        end: int = tokenizer.eos_token_id
        return end

    @classmethod
    def load(cls, folder: str | Path) -> PromptTemplate | None:
        """Reads `prompt_template.json` of a folder, None if it has none; DataError if it lacks the two texts."""
        path = Path(folder) / FILE_NAME
        if not path.is_file():
            return None
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise DataError(f"{path}: expected JSON, {error}") from error
        keys = ("prompt_inputs", "prompt_noinputs")
        if not isinstance(content, dict) or not all(isinstance(content.get(key), str) for key in keys):
            raise DataError(f"{path}: expected an object with the texts {keys}, got {content!r}")
        return PromptTemplate(content["prompt_inputs"], content["prompt_noinputs"])

    def save(self, folder: str | Path) -> None:
        """Writes `prompt_template.json`, replacing an older one in one rename."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        content = {"prompt_inputs": self.with_input, "prompt_noinputs": self.without_input}
        write_atomic(Path(folder) / FILE_NAME, json.dumps(content, indent=2) + "\n")


def warn_no_place() -> None:
    """Says where a system text goes by a template that has no place for it."""
    warnings.warn(
        "The prompt template has no place for a system text, so it stands before the instruction. A tokenizer's "
        "chat_template with the role system has one; else leave the text out of the data.",
        stacklevel=3,
    )


def tokens_of(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], *, around: bool = False, special: bool = False
) -> list[list[int]]:
    """Token ids of texts in which special tokens are letters: "</s>" in somebody's text ends nothing.

    With `special` they count, as in a template's own text; with `around`, the tokenizer adds what it puts around every
    text (BOS, EOS).
    """
    if not texts:
        return []
    options = {"add_special_tokens": around, "split_special_tokens": not special, "verbose": False}
    rows: list[list[int]] = tokenizer(list(texts), **options)["input_ids"]
    return rows


def cut_anchor(
    tokenizer: PreTrainedTokenizerBase, anchor: list[int], joined: Sequence[list[int]], responses: Sequence[str]
) -> list[list[int]]:
    """The tokens that follow the anchor's in each row of `joined`, which is anchor and response in one."""
    split = len(anchor)
    # Where anchor and response merge into one token they cannot be cut apart: encode the response alone.
    merged = [row for row, tokens in enumerate(joined) if tokens[:split] != anchor]
    alone = dict(zip(merged, tokens_of(tokenizer, [responses[row] for row in merged]), strict=True))
    return [alone.get(row, tokens[split:]) for row, tokens in enumerate(joined)]


def _check(name: str, text: str, expected: set[str]) -> None:
    placeholders = set(_PLACEHOLDER.findall(text))
    if placeholders != expected:
        wanted = " and ".join("{" + key + "}" for key in sorted(expected))
        raise DataError(f"The template's {name} text must hold exactly {wanted}, got {text!r}")


# Stanford Alpaca's format, which AlpacaFarm uses for all of its local models. The wording is part of the checkpoints:
# a model trained with it answers worse under any other.
ALPACA = PromptTemplate(
    with_input=(
        "Below is an instruction that describes a task, paired with an input that provides further context. "
        "Write a response that appropriately completes the request.\n\n"
        "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:"
    ),
    without_input=(
        "Below is an instruction that describes a task. "
        "Write a response that appropriately completes the request.\n\n"
        "### Instruction:\n{instruction}\n\n### Response:"
    ),
)
