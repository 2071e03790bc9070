"""Instruction following token by token: for Stable-Baselines3 and whatever else wants arrays and discrete actions."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from gymnasium.error import ResetNeeded

from .instruction import InstructionEnv
from .rendering import Frame
from .token_text import Observation, Tokens

if TYPE_CHECKING:
    from ..data import Dataset
    from ..oracles.base import RewardOracle
    from ..templates import PromptTemplate


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
