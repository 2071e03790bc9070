"""Instruction following, one instruction at a time."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import gymnasium as gym
from gymnasium.error import ResetNeeded

from ..errors import did_you_mean
from ..instructions import Instruction
from ..seeding import IndexStream
from ..spaces import UnicodeText
from .infos import row
from .rendering import RENDER_MODES, Episode, Frame, check_render_mode
from .scoring import Scoring, check_response, instruction_columns

if TYPE_CHECKING:
    from ..data import Dataset
    from ..oracles.base import RewardOracle


class InstructionEnv(Scoring, gym.Env[str, str]):
    """Instruction following as a one-step episode.

    ## Description
    `reset` samples an instruction, `step(response)` returns the reward an oracle gives to the response. The task of
    AlpacaFarm (Dubois et al. 2023, arXiv 2305.14387), where the oracle is a learned surrogate reward model, a pool of
    simulated annotators, or a comparison with a reference response.

    ## Action space
    `UnicodeText`: a response of 0 to 2**20 code points, without lone surrogates. Nothing is ever cut or stripped.

    ## Observation space
    `UnicodeText`: an `Instruction`, a str that also carries `.instruction`, `.input`, `.id`, `.split_name` and
    `.source`. The observation at the end of an episode is the same instruction.

    ## Rewards
    A float from the oracle: for annotators and comparisons the probability, in [0, 1], that the response is preferred
    to the reference; for reward models an unbounded score. A reward is real or `step` raises, see `on_unscored`.

    ## Starting state
    An instruction drawn uniformly, with replacement, from the split by the environment's own generator, on which no
    oracle or wrapper draws. `reset(options={"instruction_id": i})` asks a given instruction and draws nothing.

    ## Episode end
    Every step terminates. A second `step` without `reset` raises `gymnasium.error.ResetNeeded`. If `step` raises
    because of the response or the oracle, the episode stays open and `step` can be called again.

    ## Information
    At reset: `instruction_id` (int), `split` (str). At step also `response` (str), `response_length` (int, code
    points), `oracle` (str, who decided), `scored` (bool), `reward_components` ({oracle: reward}), and what the oracle
    adds about its verdict.

    ## Arguments
    | argument | default | meaning |
    |---|---|---|
    | `dataset` | "sandbox" | "sandbox", a folder, a hub name, or a `Dataset` |
    | `split` | "unlabeled" | a split of the data set |
    | `oracle` | "surrogate" | a name, a mapping such as `{"judge": "sim_eval", "flip": 0.25}`, or a `RewardOracle` |
    | `render_mode` | None | "ansi": `render` returns a str; "rgb_array": it is drawn; "human": reset and step print |
    | `on_unscored` | "raise" | no verdict: "raise" `UnscoredError`, or "truncate" the episode |

    With on_unscored="truncate" a response without a verdict ends the episode by truncation, with reward NaN and
    `info["scored"]` False: not a zero, which would be a statement about the response.

    ## Rendering
    In mode "rgb_array" `render` returns a picture, uint8 [480, 640, 3]: instruction, response and reward in a font with
    Latin, Greek and Cyrillic letters. Characters it lacks (Chinese, Japanese, Korean, most emoji) are boxes. Of a text
    that is too long for the picture the middle is left out, marked "[...]". Mode "ansi" cuts nothing.

    ## Vectorized environment
    `gym.make_vec(id, num_envs=n)` gives `InstructionVectorEnv`: the same episodes, one oracle call a step.
    `AsyncVectorEnv` needs `shared_memory=False` and loads the oracle once per process.

    ## Version history
    v0: first version.
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
        """Args as in the table above.

        Raises:
            UnknownNameError: If the split, the oracle, the render mode or the value of `on_unscored` does not exist.
            DataError: If the data set cannot be read or the split is empty.
        """
        super().__init__(dataset=dataset, split=split, oracle=oracle, on_unscored=on_unscored)
        self.render_mode = check_render_mode(render_mode)
        self.observation_space = UnicodeText()
        self.action_space = UnicodeText()
        self._stream: IndexStream | None = None
        self._instruction: Instruction | None = None
        self._open = False
        self._episode: Episode | None = None  # stays None without a render mode

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Instruction, dict[str, Any]]:
        """Asks an instruction: a random one, or that of `options={"instruction_id": i}`.

        Raises:
            UnknownNameError: If the option or the id does not exist.
        """
        super().reset(seed=seed)
        options = options or {}
        for key in options:
            if key != "instruction_id":
                raise did_you_mean("reset option", key, ["instruction_id"])
        position = self.find_instruction(options["instruction_id"]) if options else self._draw()
        self._instruction = self.instructions[position]
        self._open = True
        self._show(Episode(self._instruction))
        return self._instruction, row(instruction_columns([self._instruction], self.split))

    def step(self, action: str) -> tuple[Instruction, float, bool, bool, dict[str, Any]]:
        """Scores the response `action` and ends the episode.

        Raises:
            InvalidResponseTypeError: If the response is not a string.
            InvalidResponseError: If it is too long or holds a lone surrogate.
            UnscoredError: If the oracle gives no verdict, unless on_unscored="truncate".
            ResetNeeded: If there is no open episode.
        """
        if not self._open or self._instruction is None:
            raise ResetNeeded("Every step ends the episode: call reset() for the next instruction before step().")
        response = check_response(action)
        scores = self.score([self._instruction], [response])
        self._open = False
        reward, scored, info = float(scores.rewards[0]), bool(scores.scored[0]), row(scores.columns)
        self._show(Episode(self._instruction, response, reward, info["oracle"]))
        return self._instruction, reward, scored, not scored, info

    def render(self) -> str | Frame | None:
        """The episode so far: returned as text in mode "ansi", as a picture in mode "rgb_array", printed in "human".

        Raises:
            ResetNeeded: If there is no episode yet.
        """
        if self.render_mode is None:
            gym.logger.warn(
                'render() does nothing without a render mode: make the environment with render_mode="ansi".'
            )
            return None
        if self._episode is None:
            raise ResetNeeded("There is nothing to render before the first reset().")
        return self._episode.show(self.render_mode)

    def _draw(self) -> int:
        # A new seed, or a generator assigned by the user, starts a new stream.
        if self._stream is None or self._stream.generator is not self.np_random:
            self._stream = IndexStream(self.np_random, len(self._drawn))
        return self._drawn[self._stream.draw()]

    def _renew_streams(self) -> None:
        self._stream = None

    def _show(self, episode: Episode) -> None:
        if self.render_mode is None:
            return
        self._episode = episode
        if self.render_mode == "human":
            self.render()
