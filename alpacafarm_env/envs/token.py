"""Instruction following token by token: for Stable-Baselines3 and whatever else wants arrays and discrete actions.

Many episodes at a time have one oracle call for those that end on a step.
"""

import math
import operator
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, TypeAlias

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.error import InvalidAction, ResetNeeded
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

from ..chat_templates import load_template
from ..errors import CheckpointError, DataError
from ..instructions import Instruction
from ..oracles.reward_model import num_positions
from ..pretrained import load_config, load_tokenizer, token_limits
from .infos import Columns
from .instruction import InstructionEnv
from .rendering import Frame
from .vector import InstructionVectorEnv, Seeds, Slots

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ..data import Dataset
    from ..oracles.base import RewardOracle
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
        """The spaces of one environment's observations and actions."""
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


class TokenEnv(Tokens, InstructionEnv):
    """Instruction following as an episode of one token a step, at the end of which the oracle scores the text.

    The same instructions, oracles and reward wrappers as `InstructionEnv`, in the form Stable-Baselines3 can take.

    * Action space: `Discrete(V)`, the next token, V the size of the tokenizer.
    * Observation space: `Dict(input_ids=Box(0, V - 1, [L], int64), attention_mask=Box(0, 1, [L], int8))` with
      L = max_prompt_tokens + max_response_tokens: the prompt, the response so far, then padding on the right, where the
      mask is 0. The last real token is at `attention_mask.sum() - 1`.
    * Rewards: 0 until the end, then the oracle's score of the decoded response (special tokens left out).
    * Starting state: an instruction as in `InstructionEnv`, rendered by the `prompt_template.json` next to the
      tokenizer, or by the tokenizer's `chat_template`.
    * Episode end: the end-of-sequence token, or the last of `max_response_tokens`. The limit too is a *termination*:
      the reward is final, and an algorithm that bootstraps from the value of a truncated state would add to it. Use a
      discount of 1. After an `UnscoredError` the last token is not taken: `step` can be called again.
    * Information: always `instruction_id` and `split`; at the end also all that `InstructionEnv` reports, and
      `response_tokens` (int, with the end-of-sequence token) and `response_truncated` (bool, ended by the limit).
      Whether a reward model could read it all is another matter: `reward_input_truncated`.
    * Vectorized: `gym.make_vec(id, num_envs=n)` gives `TokenVectorEnv`, the same episodes; those that end on the same
      step are scored by one oracle call.

    | argument | default | meaning (others are those of `InstructionEnv`) |
    |---|---|---|
    | `tokenizer` | None | folder of a Hugging Face tokenizer; None: that of the sandbox's policy |
    | `template` | None | "alpaca" or a `PromptTemplate`, instead of the folder's |
    | `max_prompt_tokens` | None | longest prompt; `reset` raises on a longer one, which is never cut |
    | `max_response_tokens` | None | longest response, with the end-of-sequence token |

    None is AlpacaFarm's limit, 192 and 300, or less where the model next to the tokenizer (its `config.json`, or the
    tokenizer's `model_max_length`) has fewer positions: 192 and 64 for the sandbox's, which have 256. Numbers that do
    not fit are kept, with a warning.
    """

    metadata: ClassVar[dict[str, Any]] = {**InstructionEnv.metadata, "render_fps": 10}  # type: ignore[misc]

    # The ignored types: what InstructionEnv says in text, this environment says in arrays.

    def __init__(
        self,
        dataset: "str | Dataset" = "sandbox",
        split: str = "unlabeled",
        oracle: "str | Mapping[str, Any] | RewardOracle" = "surrogate",
        tokenizer: str | Path | None = None,
        template: "PromptTemplate | str | None" = None,
        max_prompt_tokens: int | None = None,
        max_response_tokens: int | None = None,
        render_mode: str | None = None,
        on_unscored: str = "raise",
    ) -> None:
        """Raises DataError for a tokenizer that cannot be read or lacks EOS, ValueError for limits without room."""
        super().__init__(dataset, split, oracle, render_mode, on_unscored)
        self.read_tokenizer(tokenizer, template, max_prompt_tokens, max_response_tokens)
        self.observation_space, self.action_space = self.token_spaces()  # type: ignore[assignment]
        self._prompt: list[int] = []
        self._response: list[int] | None = None  # None: no open episode
        self._asked: dict[str, Any] = {}

    def reset(  # type: ignore[override]
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """As `InstructionEnv.reset`; ValueError if the prompt is longer than `max_prompt_tokens`."""
        self._response = None
        instruction, self._asked = super().reset(seed=seed, options=options)
        self._prompt = self._encode(instruction)
        self._response = []
        return self._observation([]), dict(self._asked)

    def step(  # type: ignore[override]
        self, action: int | np.integer[Any]
    ) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Appends one token; scores the response if that ends it. An action that is no token is an InvalidAction."""
        if self._response is None:
            raise ResetNeeded("The response has ended, or none was begun: call reset() before step().")
        response = [*self._response, self._check_token(action)]
        finished = response[-1] in self._ends
        if not finished and len(response) < self.max_response_tokens:
            self._response = response
            return self._observation(response), 0.0, False, False, dict(self._asked)
        _, reward, terminated, truncated, info = super().step(self._decode(response))
        self._response = None  # only now: the oracle may have raised
        info |= {"response_tokens": len(response), "response_truncated": not finished}
        return self._observation(response), reward, terminated, truncated, info

    def render(self) -> str | Frame | None:
        """As `InstructionEnv.render`, with the response so far."""
        if self._episodes and self._response:
            self._episodes[0] = self._episodes[0]._replace(response=self._decode(self._response))
        return super().render()

    def _observation(self, response: Sequence[int]) -> Observation:
        tokens = [*self._prompt, *response]
        input_ids = np.full(self._length, self._pad_token_id, dtype=np.int64)
        input_ids[: len(tokens)] = tokens
        return {"input_ids": input_ids, "attention_mask": self._mask(np.array([len(tokens)]))[0]}


class TokenVectorEnv(Tokens, InstructionVectorEnv):
    """`num_envs` slots of `TokenEnv`; the responses that end on the same step are scored by one oracle call.

    Observations (`input_ids` int64 and `attention_mask` int8, [B, L]), rewards, terminations and infos equal those of a
    `SyncVectorEnv` of `TokenEnv`s, in all three autoreset modes. Slots end at different steps: in mode DISABLED, reset
    those that ended by `options={"reset_mask": mask}` before the next step. Options of `reset` are those of
    `InstructionVectorEnv` but for `num_generations` (ValueError), as the slots of a group would part at their ends.
    Arguments and rewards are those of `TokenEnv`. Actions are integers [B].

    If `step` raises because of an action or the oracle, nothing has changed and it can be called again.
    """

    metadata: ClassVar[dict[str, Any]] = TokenEnv.metadata  # type: ignore[misc]

    # The ignored types: what InstructionVectorEnv says in text, this environment says in arrays.

    def __init__(
        self,
        num_envs: int = 1,
        dataset: "str | Dataset" = "sandbox",
        split: str = "unlabeled",
        oracle: "str | Mapping[str, Any] | RewardOracle" = "surrogate",
        tokenizer: str | Path | None = None,
        template: "PromptTemplate | str | None" = None,
        max_prompt_tokens: int | None = None,
        max_response_tokens: int | None = None,
        render_mode: str | None = None,
        on_unscored: str = "raise",
        autoreset_mode: AutoresetMode | str = AutoresetMode.SAME_STEP,
    ) -> None:
        """As `TokenEnv`, with the number of slots and an `AutoresetMode` or its value ("SameStep", ...)."""
        super().__init__(num_envs, dataset, split, oracle, render_mode, on_unscored, autoreset_mode)
        self.read_tokenizer(tokenizer, template, max_prompt_tokens, max_response_tokens)
        self.single_observation_space, self.single_action_space = self.token_spaces()
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        # Replaced as a whole by every reset and step, never written to: they are what has been observed.
        self._input_ids = np.full((num_envs, self._length), self._pad_token_id, dtype=np.int64)
        self._prompt_lengths = np.zeros(num_envs, dtype=np.int64)
        self._lengths = np.zeros(num_envs, dtype=np.int64)

    def reset(  # type: ignore[override]
        self, *, seed: Seeds = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """As `InstructionVectorEnv.reset`; ValueError if a prompt is longer than `max_prompt_tokens`."""
        if (options or {}).get("num_generations", 1) != 1:
            raise ValueError(
                "Expected num_generations of 1: here slots end at different steps. Give "
                "instruction_ids, or take an environment of whole responses, such as AlpacaFarm-PPO-v0."
            )
        return super().reset(seed=seed, options=options)  # type: ignore[return-value]

    def render(self) -> tuple[str | Frame | None, ...] | None:  # type: ignore[override]
        """As `TokenEnv.render`, a tuple of all slots."""
        for slot in np.flatnonzero(self._open & (self._lengths > self._prompt_lengths)).tolist():
            if slot in self._episodes:
                said = self._decode(self._response(self._input_ids, self._lengths, slot))
                self._episodes[slot] = self._episodes[slot]._replace(response=said)
        return super().render()

    def _check_ready(self) -> None:
        super()._check_ready()
        if self.autoreset_mode is AutoresetMode.SAME_STEP and not self._open.all():
            raise ResetNeeded("An automatic reset has failed: call reset() before step().")

    def _take(self, actions: Any, slots: Slots) -> tuple[Slots, list[str], Columns]:
        if not isinstance(actions, Sequence | np.ndarray) or isinstance(actions, str) or len(actions) != self.num_envs:
            raise InvalidAction(f"Expected {self.num_envs} tokens, one per slot, got {actions!r:.60}.")
        input_ids, lengths = self._input_ids.copy(), self._lengths.copy()
        input_ids[slots, lengths[slots]] = [self._check_token(actions[slot], slot) for slot in slots.tolist()]
        lengths[slots] += 1
        self._taken = input_ids, lengths
        finished = np.isin(input_ids[slots, lengths[slots] - 1], self._ends)
        counts = lengths[slots] - self._prompt_lengths[slots]
        ends = finished | (counts >= self.max_response_tokens)
        responses = [self._decode(self._response(input_ids, lengths, slot)) for slot in slots[ends].tolist()]
        return slots[ends], responses, {"response_tokens": counts[ends], "response_truncated": ~finished[ends]}

    def _end(self, ended: Slots) -> None:
        self._input_ids, self._lengths = self._taken
        super()._end(ended)

    def _last(self, ended: Slots) -> Any:
        observed = self._observed()
        return [{key: values[slot] for key, values in observed.items()} for slot in ended.tolist()]

    def _ask(self, slots: Slots, positions: Slots) -> None:
        self._open[slots] = False  # a prompt may be too long
        prompts = [self._encode(self.instructions[position]) for position in positions.tolist()]
        input_ids, lengths = self._input_ids.copy(), self._lengths.copy()
        for slot, prompt in zip(slots.tolist(), prompts, strict=True):
            input_ids[slot] = self._pad_token_id
            input_ids[slot, : len(prompt)] = prompt
            lengths[slot] = len(prompt)
        self._input_ids, self._lengths = input_ids, lengths
        self._prompt_lengths[slots] = lengths[slots]
        super()._ask(slots, positions)

    def _response(self, input_ids: NDArray[np.int64], lengths: NDArray[np.int64], slot: int) -> list[int]:
        response: list[int] = input_ids[slot, self._prompt_lengths[slot] : lengths[slot]].tolist()
        return response

    def _observed(self) -> Observation:
        return {"input_ids": self._input_ids.copy(), "attention_mask": self._mask(self._lengths)}


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
