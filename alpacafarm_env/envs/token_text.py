"""What the token environments share: an instruction as tokens, a response from tokens, and what there is to observe."""

import math
import operator
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.error import InvalidAction
from numpy.typing import NDArray

from ..chat_templates import load_template
from ..errors import CheckpointError, DataError
from ..instructions import Instruction
from ..oracles.reward_model import num_positions
from ..pretrained import load_config, load_tokenizer, token_limits

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ..templates import PromptTemplate

_UNSET: Final = int(1e9)
"""Tokenizers without a real `model_max_length` have one of this or much more."""

Observation: TypeAlias = dict[str, NDArray[Any]]


class Tokens:
    """A tokenizer, a prompt template and limits; a mixin of the token environments. See `TokenEnv`."""

    split: str

    def read_tokenizer(
        self,
        tokenizer: str | Path | None,
        template: "PromptTemplate | str | None",
        max_prompt_tokens: int | None,
        max_response_tokens: int | None,
    ) -> None:
        """Raises DataError for a tokenizer that cannot be read or lacks EOS, ValueError for limits without room."""
        folder = Path(tokenizer) if tokenizer is not None else import_module("alpacafarm_env.sandbox").POLICY
        self.tokenizer = _load_tokenizer(folder)
        self.template = load_template(folder, self.tokenizer, template)
        positions = _positions(folder, self.tokenizer)
        self.max_prompt_tokens, self.max_response_tokens = token_limits(
            max_prompt_tokens, max_response_tokens, positions
        )
        self._length = self.max_prompt_tokens + self.max_response_tokens
        if self._length > positions:
            gym.logger.warn(
                f"max_prompt_tokens and max_response_tokens are {self._length} tokens together, but the model in "
                f"{str(folder)!r} can read {positions}: a longer text is cut before a reward model like it scores it "
                '(info["reward_input_truncated"]). Lower one of the two, or leave both out.'
            )
        self.eos_token_id = self.template.end_id(self.tokenizer)
        self._ends = (self.eos_token_id, self.tokenizer.eos_token_id)
        # The mask says what is padding, so a tokenizer without a padding token can lend any.
        pad = self.tokenizer.pad_token_id
        self._pad_token_id: int = self.eos_token_id if pad is None else pad

    def token_spaces(self) -> tuple[spaces.Dict, spaces.Discrete]:
        """What one environment observes, and its actions."""
        vocab_size = len(self.tokenizer)
        observed: dict[str, spaces.Space[Any]] = {
            "input_ids": spaces.Box(0, vocab_size - 1, (self._length,), np.int64),
            "attention_mask": spaces.Box(0, 1, (self._length,), np.int8),
        }
        return spaces.Dict(observed), spaces.Discrete(vocab_size)

    def _encode(self, instruction: Instruction) -> list[int]:
        """The prompt; ValueError if it is longer than `max_prompt_tokens`."""
        (prompt,) = self.template.encode_prompts(self.tokenizer, [instruction])
        if len(prompt) > self.max_prompt_tokens:
            raise ValueError(
                f"Expected prompts of at most max_prompt_tokens={self.max_prompt_tokens} tokens, but instruction "
                f"{instruction.id} of split {self.split!r} has {len(prompt)}. Raise max_prompt_tokens, or "
                f"leave the instruction out: env.unwrapped.leave_out([{instruction.id}])."
            )
        return prompt

    def _check_token(self, action: Any, slot: int | None = None) -> int:
        try:
            token = operator.index(action)
        except TypeError:
            token = -1
        if not 0 <= token < len(self.tokenizer):
            where = "" if slot is None else f" in slot {slot}"
            raise InvalidAction(
                f"Expected a token, an integer from 0 to {len(self.tokenizer) - 1}{where}, got {action!r}."
            )
        return token

    def _decode(self, tokens: list[int]) -> str:
        """The text of a response, whose end-of-sequence token is not a part of it."""
        if tokens and tokens[-1] in self._ends:
            tokens = tokens[:-1]
        # Clean-up would delete spaces before punctuation that the policy did write.
        text = self.tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)  # a list only comes of a list of lists
        return text

    def _mask(self, lengths: NDArray[np.int64]) -> NDArray[np.int8]:
        """[B, L] from [B]: 1 where there is a token."""
        return (np.arange(self._length) < lengths[:, None]).astype(np.int8)


def _positions(folder: Path, tokenizer: "PreTrainedTokenizerBase") -> float:
    """How many tokens the model that this tokenizer belongs to can read; infinity if the folder does not say."""
    positions = num_positions(load_config(folder)) if (folder / "config.json").is_file() else math.inf
    return min(positions, tokenizer.model_max_length if tokenizer.model_max_length < _UNSET else math.inf)


def _load_tokenizer(folder: Path) -> "PreTrainedTokenizerBase":
    if not folder.is_dir():
        raise DataError(
            f"Expected the folder of a Hugging Face tokenizer (tokenizer.json ...), got {str(folder)!r}: no folder."
        )
    try:
        tokenizer: PreTrainedTokenizerBase = load_tokenizer(folder, local_files_only=True)
    except CheckpointError as error:
        raise DataError(str(error)) from error
    if tokenizer.eos_token_id is None:
        raise DataError(f"The tokenizer in {str(folder)!r} has no eos_token, so that no response could end; set one.")
    return tokenizer
