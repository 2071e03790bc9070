"""Instruction following, one instruction at a time."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import gymnasium as gym
from gymnasium.error import ResetNeeded

from ..instructions import Instruction
from ..seeding import IndexStream
from ..spaces import UnicodeText
from .infos import row
from .rendering import RENDER_MODES, Episode, Frame
from .scoring import Scoring, check_options, check_response, instruction_columns

if TYPE_CHECKING:
    from ..data import Dataset
    from ..oracles.base import RewardOracle


class InstructionEnv(Scoring, gym.Env[str, str]):
    """Instruction following as a one-step episode: `reset` samples an instruction, `step(response)` returns its reward.

    The task of AlpacaFarm (Dubois et al. 2023, arXiv 2305.14387).

    * Action space: `UnicodeText`, a response of 0 to 2**20 code points, without lone surrogates, never cut.
    * Observation space: `UnicodeText`, an `Instruction`, a str that also carries `.instruction`, `.input`, `.system`,
      `.id`, `.split_name` and `.source`; after a step the same one.
    * Rewards: for annotators and comparisons the probability, in [0, 1], that the response is preferred to the
      reference; for reward models an unbounded score.
    * Starting state: an instruction drawn uniformly, with replacement, by the environment's own generator, which no
      oracle or wrapper uses. `reset(options={"instruction_id": i})` asks a given instruction and draws nothing.
    * Episode end: every step terminates. If `step` raises because of the response or the oracle, it can be called
      again.
    * Information: at reset `instruction_id` (int), `split` (str); at step also `response` (str), `response_length`
      (int, code points), `oracle` (str, who decided), `scored` (bool), `reward_components` ({oracle: reward}), and the
      oracle's details.
    * Rendering: in mode "rgb_array" a picture, uint8 [480, 640, 3], with Latin, Greek and Cyrillic letters; others are
      boxes, and a text that is too long loses its middle, marked "[...]". Mode "ansi" cuts nothing.
    * Vectorized: `gym.make_vec(id, num_envs=n)` gives `InstructionVectorEnv`, the same episodes with one oracle call a
      step. `AsyncVectorEnv` needs `shared_memory=False` and loads the oracle once per process.

    | argument | default | meaning |
    |---|---|---|
    | `dataset` | "sandbox" | "sandbox", a folder, a hub name, or a `Dataset` |
    | `split` | "unlabeled" | a split of the data set |
    | `oracle` | "surrogate" | a name, a mapping such as `{"judge": "eval", "flip": 0.25}`, or a `RewardOracle` |
    | `render_mode` | None | "ansi": `render` returns a str; "rgb_array": it is drawn; "human": reset and step print |
    | `on_unscored` | "raise" | no verdict: "raise" `UnscoredError`, or "truncate" the episode |

    Truncated, a response without a verdict has reward NaN and `info["scored"]` False: not a zero, which would be a
    statement about the response.
    """

    metadata: ClassVar[dict[str, Any]] = {"render_modes": list(RENDER_MODES), "render_fps": 1}  # type: ignore[misc]

    def __init__(
        self,
        dataset: "str | Dataset" = "sandbox",
        split: str = "unlabeled",
        oracle: "str | Mapping[str, Any] | RewardOracle" = "surrogate",
        render_mode: str | None = None,
        on_unscored: str = "raise",
    ) -> None:
        """Raises UnknownNameError for a wrong name, DataError for data that cannot be read or an empty split."""
        super().__init__(dataset, split, oracle, render_mode, on_unscored)
        self.observation_space = UnicodeText()
        self.action_space = UnicodeText()
        self._stream: IndexStream | None = None
        self._instruction: Instruction | None = None
        self._open = False

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Instruction, dict[str, Any]]:
        """Asks a random instruction, or that of `options={"instruction_id": i}`."""
        super().reset(seed=seed)
        options = options or {}
        check_options(options, ("instruction_id",))
        position = self.find_instruction(options["instruction_id"]) if options else self._draw()
        self._instruction = self.instructions[position]
        self._open = True
        self._show(0, Episode(self._instruction))
        return self._instruction, row(instruction_columns([self._instruction], self.split))

    def step(self, action: str) -> tuple[Instruction, float, bool, bool, dict[str, Any]]:
        """Scores the response `action` and ends the episode.

        Raises InvalidResponseTypeError or InvalidResponseError for a response outside the action space, UnscoredError
        if the oracle gives no verdict (unless on_unscored="truncate"), ResetNeeded if there is no open episode.
        """
        if not self._open or self._instruction is None:
            raise ResetNeeded("Every step ends the episode: call reset() for the next instruction before step().")
        response = check_response(action)
        rewards, columns = self.score([self._instruction], [response])
        self._open = False
        reward, info = float(rewards[0]), row(columns)
        scored: bool = info["scored"]
        self._show(0, Episode(self._instruction, response, reward, info["oracle"]))
        return self._instruction, reward, scored, not scored, info

    def render(self) -> str | Frame | None:
        """The episode so far: a text in mode "ansi", a picture in mode "rgb_array", printed in "human"."""
        shown = self._rendered()
        return shown[0] if shown else None

    def _draw(self) -> int:
        # A new seed, or a generator assigned by the user, starts a new stream.
        if self._stream is None or self._stream.generator is not self.np_random:
            self._stream = IndexStream(self.np_random, len(self.drawn))
        return self.drawn[self._stream.draw()]

    def _renew_streams(self) -> None:
        self._stream = None
