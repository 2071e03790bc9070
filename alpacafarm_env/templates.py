"""Prompt templates: how an instruction becomes the text a model reads.

A model folder carries its own template in `prompt_template.json`, so a policy and a reward model with different
formats can meet in one environment. The file has AlpacaFarm's two keys, `prompt_inputs` and `prompt_noinputs`.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from .errors import DataError
from .instructions import Instruction

FILE_NAME = "prompt_template.json"
_PLACEHOLDER = re.compile(r"\{(instruction|input)\}")


@dataclass(frozen=True)
class PromptTemplate:
    """Two texts with the placeholders `{instruction}` and `{input}`.

    Raises:
        DataError: A text lacks a placeholder it needs.
    """

    with_input: str
    """Used for an instruction that has an input; must hold both placeholders."""
    without_input: str
    """Used for an instruction alone; must hold `{instruction}` and may not hold `{input}`."""

    def __post_init__(self) -> None:
        _check("with_input", self.with_input, {"instruction", "input"})
        _check("without_input", self.without_input, {"instruction"})

    def render(self, instruction: str) -> str:
        """Returns the prompt for an instruction.

        An `Instruction` with a non-empty `.input` uses `with_input`; any other str is an instruction without input.
        Fields are substituted in one pass: an instruction that itself contains "{input}" is left as it is.
        """
        if isinstance(instruction, Instruction):
            fields = {"instruction": instruction.instruction, "input": instruction.input}
        else:
            fields = {"instruction": instruction, "input": ""}
        text = self.with_input if fields["input"] else self.without_input
        return _PLACEHOLDER.sub(lambda match: fields[match[1]], text)

    @property
    def tail(self) -> str:
        """The text after the last placeholder: what stands right before every response."""
        return _PLACEHOLDER.split(self.without_input)[-1]

    @classmethod
    def load(cls, folder: str | Path) -> PromptTemplate:
        """Reads `prompt_template.json` of a model folder; `ALPACA` if the folder has none.

        Raises:
            DataError: The file is not a JSON object with the two texts.
        """
        path = Path(folder) / FILE_NAME
        if not path.is_file():
            return ALPACA
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise DataError(f"{path}: expected JSON, {error}") from error
        keys = ("prompt_inputs", "prompt_noinputs")
        if not isinstance(content, dict) or not all(isinstance(content.get(key), str) for key in keys):
            raise DataError(f"{path}: expected an object with the texts {keys}, got {content!r}")
        return cls(content["prompt_inputs"], content["prompt_noinputs"])

    def save(self, folder: str | Path) -> None:
        """Writes `prompt_template.json` into a folder, replacing an older one in one rename."""
        path = Path(folder) / FILE_NAME
        path.parent.mkdir(parents=True, exist_ok=True)
        content = {"prompt_inputs": self.with_input, "prompt_noinputs": self.without_input}
        beside = path.with_name(path.name + ".partial")
        beside.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        beside.replace(path)


def _check(name: str, text: str, expected: set[str]) -> None:
    found = set(_PLACEHOLDER.findall(text))
    if found != expected:
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
