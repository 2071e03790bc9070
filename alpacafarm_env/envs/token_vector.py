"""Instruction following token by token, many episodes at a time: one oracle call for those that end on a step."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from gymnasium.error import InvalidAction, ResetNeeded
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

from .infos import Columns
from .rendering import Frame
from .token import Observation, TokenEnv, Tokens
from .vector import InstructionVectorEnv, Seeds, Slots

if TYPE_CHECKING:
    from ..data import Dataset
    from ..oracles.base import RewardOracle
    from ..templates import PromptTemplate


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
            raise ValueError("Expected num_generations of 1: here slots end at different steps. Give instruction_ids.")
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
