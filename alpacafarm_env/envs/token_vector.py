"""Instruction following token by token, many episodes at a time: one oracle call for those that end on a step."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from gymnasium.error import InvalidAction, ResetNeeded
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

from .infos import Columns, merge, scatter
from .rendering import Episode, Frame
from .scoring import instruction_columns
from .token import Observation, TokenEnv, Tokens
from .vector import InstructionVectorEnv, Seeds, Slots

if TYPE_CHECKING:
    from ..data import Dataset
    from ..oracles.base import RewardOracle
    from ..templates import PromptTemplate

TokenStepResult = tuple[Observation, NDArray[np.float64], NDArray[np.bool_], NDArray[np.bool_], dict[str, Any]]


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
        _, infos = super().reset(seed=seed, options=options)
        return self._observed(), infos

    def step(self, actions: Sequence[int] | NDArray[np.integer[Any]]) -> TokenStepResult:  # type: ignore[override]
        """Appends one token a slot; scores the responses that end by that."""
        self._check_ready()
        slots, waiting = np.flatnonzero(self._open), np.flatnonzero(~self._open)
        input_ids, lengths = self._appended(actions, slots)
        last = input_ids[slots, lengths[slots] - 1]
        finished = np.isin(last, self._ends)
        ends = finished | (lengths[slots] - self._prompt_lengths[slots] >= self.max_response_tokens)
        ended = slots[ends]
        rewards = np.zeros(self.num_envs)
        columns: Columns = {}
        if ended.size:
            scores, columns = self._scored(input_ids, lengths, ended, finished[ends])
            rewards[ended] = scores
        self._input_ids, self._lengths = input_ids, lengths  # only now: the oracle may have raised
        self._open[ended] = False
        return self._reported(rewards, columns, ended, waiting)

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

    def _appended(self, actions: Any, slots: Slots) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Tokens and lengths after the actions of `slots`; those of slots that wait for their reset are ignored."""
        if not isinstance(actions, Sequence | np.ndarray) or isinstance(actions, str) or len(actions) != self.num_envs:
            raise InvalidAction(f"Expected {self.num_envs} tokens, one per slot, got {actions!r:.60}.")
        input_ids, lengths = self._input_ids.copy(), self._lengths.copy()
        input_ids[slots, lengths[slots]] = [self._check_token(actions[slot], slot) for slot in slots.tolist()]
        lengths[slots] += 1
        return input_ids, lengths

    def _scored(
        self, input_ids: NDArray[np.int64], lengths: NDArray[np.int64], ended: Slots, finished: NDArray[np.bool_]
    ) -> tuple[NDArray[np.float64], Columns]:
        """Rewards and infos of the slots whose responses have ended."""
        instructions = [self._observations[slot] for slot in ended.tolist()]
        responses = [self._decode(self._response(input_ids, lengths, slot)) for slot in ended.tolist()]
        scores, columns = self.score(instructions, responses)
        if self.render_mode is not None:
            for slot, *shown in zip(
                ended.tolist(), instructions, responses, scores.tolist(), columns["oracle"], strict=True
            ):
                self._show(slot, Episode(*shown))
        tokens = {
            "response_tokens": lengths[ended] - self._prompt_lengths[ended],
            "response_truncated": ~finished,
        }
        return scores, {**columns, **tokens}

    def _reported(
        self, rewards: NDArray[np.float64], columns: Columns, ended: Slots, waiting: Slots
    ) -> TokenStepResult:
        """The result of `step`, after the automatic resets."""
        terminations, truncations = np.zeros((2, self.num_envs), dtype=np.bool_)
        terminations[ended], truncations[ended] = ~np.isnan(rewards[ended]), np.isnan(rewards[ended])
        infos: dict[str, Any] = scatter(columns, ended, self.num_envs) if ended.size else {}
        if self.autoreset_mode is AutoresetMode.SAME_STEP and ended.size:
            final, at_end = np.full(self.num_envs, None, dtype=object), np.zeros(self.num_envs, dtype=np.bool_)
            observed, at_end[ended] = self._observed(), True
            for slot in ended.tolist():
                final[slot] = {key: values[slot] for key, values in observed.items()}
            infos = {"final_obs": final, "_final_obs": at_end.copy(), "final_info": infos, "_final_info": at_end}
            waiting, ended = ended, ended[:0]
        if self.autoreset_mode is not AutoresetMode.DISABLED and waiting.size:
            self._ask(waiting, self._draw(waiting))
        others = np.setdiff1d(np.arange(self.num_envs), ended)
        if others.size:
            instructions = [self._observations[slot] for slot in others.tolist()]
            infos = merge(infos, scatter(instruction_columns(instructions, self.split), others, self.num_envs))
        return self._observed(), rewards, terminations, truncations, infos

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
