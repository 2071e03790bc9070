"""Instruction following, many instructions at a time: one oracle call a step."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from gymnasium.error import ResetNeeded
from gymnasium.utils.seeding import np_random
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

from ..errors import InvalidResponseError, InvalidResponseTypeError, did_you_mean
from ..instructions import Instruction
from ..seeding import IndexStream
from ..spaces import UnicodeText
from .infos import Columns, merge, scatter
from .rendering import RENDER_MODES, Episode, Frame
from .scoring import Scoring, check_options, check_response, instruction_columns

if TYPE_CHECKING:
    from ..data import Dataset
    from ..oracles.base import RewardOracle

Slots = NDArray[np.int64]
Seeds = int | Sequence[int | None] | None
StepResult = tuple[tuple[Instruction, ...], NDArray[np.float64], NDArray[np.bool_], NDArray[np.bool_], dict[str, Any]]


class InstructionVectorEnv(Scoring, VectorEnv[tuple[str, ...], Sequence[str], NDArray[Any]]):
    """`num_envs` slots of `InstructionEnv`, scored by one oracle call a step.

    Observations, rewards, terminations and infos equal those of a `SyncVectorEnv` of `InstructionEnv`s, in all three
    autoreset modes. Slot i draws instructions from its own generator, seeded `seed + i`.

    | autoreset_mode | what `step` does | where the scored info is |
    |---|---|---|
    | SAME_STEP (default) | scores the responses, asks the next instructions | `infos["final_info"]`, `["final_obs"]` |
    | NEXT_STEP | scores; the next call ignores the responses and asks the next instructions | top level |
    | DISABLED | scores; `reset` comes next | top level |

    Infos have Gymnasium's form, arrays and their masks, nested where a key holds several numbers. Tables are made by
    `pandas.json_normalize` of single environments' infos, or of those that Gymnasium's `DictInfoToList` gives.

    Options of `reset`:
        num_generations: k, a divisor of num_envs. Slots i·k to i·k+k-1 hold the same instruction, drawn by slot i·k.
            Holds, for the slots it reset, through automatic resets, until they are reset explicitly again. Default 1.
        instruction_ids: num_envs // k ids to ask instead of drawing; nothing is drawn.
        reset_mask: Bool array [num_envs], the slots to reset; with num_generations, whole groups. Default: all.

    Arguments, action space, rewards and errors are those of `InstructionEnv`, one response per slot. If `step` raises,
    nothing has changed and it can be called again.
    """

    metadata: ClassVar[dict[str, Any]] = {"render_modes": list(RENDER_MODES), "render_fps": 1}  # type: ignore[misc]

    def __init__(
        self,
        num_envs: int = 1,
        dataset: "str | Dataset" = "sandbox",
        split: str = "unlabeled",
        oracle: "str | Mapping[str, Any] | RewardOracle" = "surrogate",
        render_mode: str | None = None,
        on_unscored: str = "raise",
        autoreset_mode: AutoresetMode | str = AutoresetMode.SAME_STEP,
    ) -> None:
        """As `InstructionEnv`, with the number of slots and an `AutoresetMode` or its value ("SameStep", ...)."""
        super().__init__(dataset, split, oracle, render_mode, on_unscored)
        if num_envs < 1:
            raise ValueError(f"Expected num_envs of at least 1, got {num_envs!r}.")
        self.num_envs = num_envs
        try:
            self.autoreset_mode = AutoresetMode(autoreset_mode)
        except ValueError:
            raise did_you_mean("autoreset_mode", autoreset_mode, [mode.value for mode in AutoresetMode]) from None
        # The class's metadata must not learn one instance's mode.
        self.metadata = {**type(self).metadata, "autoreset_mode": self.autoreset_mode}  # type: ignore[misc]
        self.single_observation_space = UnicodeText()
        self.single_action_space = UnicodeText()
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)

        self._streams: dict[int, IndexStream] = {}
        self._seeds: dict[int, int] = {}
        self._leaders = np.arange(num_envs)  # the slot whose stream draws for this one
        self._indices = np.zeros(num_envs, dtype=np.int64)
        self._observations: tuple[Instruction, ...] = ()
        self._open = np.zeros(num_envs, dtype=np.bool_)

    @property  # type: ignore[misc]  # read only: a slot's generator is replaced by seeding it
    def np_random(self) -> tuple[np.random.Generator, ...]:  # type: ignore[override]
        """The generator of each slot."""
        self._seed(None, np.arange(self.num_envs))
        return tuple(self._streams[slot].generator for slot in range(self.num_envs))

    @property
    def np_random_seed(self) -> tuple[int, ...]:  # type: ignore[override]
        """The seed of each slot."""
        self._seed(None, np.arange(self.num_envs))
        return tuple(self._seeds[slot] for slot in range(self.num_envs))

    def reset(
        self, *, seed: Seeds = None, options: dict[str, Any] | None = None
    ) -> tuple[tuple[Instruction, ...], dict[str, Any]]:
        """Asks every slot, or those of `reset_mask`, an instruction; see the class for the options.

        Slot i is seeded `seed + i`, or by its entry of a list; None goes on with the streams. Raises UnknownNameError
        or ValueError for wrong options, ResetNeeded if the first reset leaves slots out.
        """
        options = options or {}
        check_options(options, ("num_generations", "instruction_ids", "reset_mask"))
        slots = self._slots_to_reset(options.get("reset_mask"))
        num_generations = self._check_num_generations(options.get("num_generations", 1), slots)
        ids = options.get("instruction_ids")
        given = None if ids is None else self._positions_of(ids, num_generations)
        self._seed(seed, slots)
        self._leaders[slots] = slots - slots % num_generations
        self._ask(slots, self._draw(slots) if given is None else given[slots])
        return self._observed(), self._reset_infos(slots)

    def step(self, actions: Sequence[str]) -> StepResult:
        """Scores one response per slot by one oracle call; errors as of `InstructionEnv.step`.

        Returns observations (tuple of B instructions), rewards (float64 [B]), terminations, truncations (bool [B]),
        infos.
        """
        self._check_ready()
        waiting = np.flatnonzero(~self._open)  # none, but in mode NEXT_STEP
        ended, responses, more = self._take(actions, np.flatnonzero(self._open))
        rewards = np.zeros(self.num_envs)
        terminations, truncations = np.zeros((2, self.num_envs), dtype=np.bool_)
        infos: dict[str, Any] = {}
        if ended.size:
            answered = [self._observations[i] for i in ended.tolist()]
            scores, columns = self.score(answered, responses)
            rewards[ended], terminations[ended], truncations[ended] = scores, ~np.isnan(scores), np.isnan(scores)
            infos = scatter({**columns, **more}, ended, self.num_envs)
            if self.render_mode is not None:
                oracle = infos["oracle"][ended[0]]
                rows = zip(ended.tolist(), answered, responses, scores.tolist(), strict=True)
                for slot, instruction, response, reward in rows:
                    self._show(slot, Episode(instruction, response, reward, oracle))
        self._end(ended)  # only now: the oracle may have raised
        if self.autoreset_mode is AutoresetMode.SAME_STEP and ended.size:
            final, at_end = np.full(self.num_envs, None, dtype=object), np.zeros(self.num_envs, dtype=np.bool_)
            final[ended], at_end[ended] = self._last(ended), True
            infos = {"final_obs": final, "_final_obs": at_end.copy(), "final_info": infos, "_final_info": at_end}
            waiting, ended = ended, ended[:0]
        if self.autoreset_mode is not AutoresetMode.DISABLED and waiting.size:
            self._ask(waiting, self._draw(waiting))
        going_on = np.ones(self.num_envs, dtype=np.bool_)
        going_on[ended] = False
        if going_on.any():
            infos = merge(infos, self._reset_infos(np.flatnonzero(going_on)))
        return self._observed(), rewards, terminations, truncations, infos

    def _take(self, actions: Any, slots: Slots) -> tuple[Slots, list[str], Columns]:
        """The slots whose responses end by these actions, the responses, and what infos say of them beside."""
        return slots, self._check_responses(actions, slots), {}

    def _end(self, ended: Slots) -> None:
        self._open[ended] = False

    def _last(self, ended: Slots) -> Any:
        """The last observations of episodes, one for each slot of `ended`."""
        return np.array(self._observations, dtype=object)[ended]

    def _observed(self) -> Any:
        return self._observations

    def render(self) -> tuple[str | Frame | None, ...] | None:  # type: ignore[override]
        """As `InstructionEnv.render`, a tuple of all slots."""
        return self._rendered()

    def _check_ready(self) -> None:
        if not self._observations:
            raise ResetNeeded("Call reset() before the first step().")
        if self.autoreset_mode is AutoresetMode.DISABLED and not self._open.all():
            raise ResetNeeded(
                f"{np.count_nonzero(~self._open)} of {self.num_envs} slots have no open episode: every step ends it, "
                "and in this autoreset_mode nothing resets by itself. Call reset() before step()."
            )

    def _check_responses(self, actions: Sequence[str], slots: Slots) -> list[str]:
        """The responses of `slots`; those of slots that only wait for their reset are ignored, as everywhere."""
        if isinstance(actions, str) or not isinstance(actions, Sequence | np.ndarray):
            raise InvalidResponseTypeError(
                f"Expected a sequence of {self.num_envs} responses, one per slot, got {type(actions).__name__}."
            )
        if len(actions) != self.num_envs:
            raise InvalidResponseError(f"Expected {self.num_envs} responses, one per slot, got {len(actions)}.")
        return [check_response(actions[slot], slot) for slot in slots.tolist()]

    def _slots_to_reset(self, mask: object) -> Slots:
        if mask is None:
            return np.arange(self.num_envs)
        if not isinstance(mask, np.ndarray) or mask.dtype != np.bool_ or mask.shape != (self.num_envs,):
            raise ValueError(f"Expected reset_mask to be a bool array of shape ({self.num_envs},), got {mask!r}.")
        if not mask.any():
            raise ValueError("Expected reset_mask to select at least one slot, got none.")
        if not self._observations and not mask.all():
            raise ResetNeeded("The first reset must be of all slots: call reset() once without a reset_mask.")
        return np.flatnonzero(mask)

    def _check_num_generations(self, num_generations: object, slots: Slots) -> int:
        if not isinstance(num_generations, int | np.integer) or not 1 <= num_generations <= self.num_envs:
            raise ValueError(
                f"Expected num_generations between 1 and num_envs={self.num_envs}, got {num_generations!r}."
            )
        if self.num_envs % num_generations:
            raise ValueError(f"Expected num_generations to divide num_envs={self.num_envs}, got {num_generations}.")
        group_sizes = np.bincount(slots // num_generations)
        if not np.isin(group_sizes, [0, int(num_generations)]).all():
            raise ValueError(f"Expected reset_mask to select whole groups of num_generations={num_generations} slots.")
        return int(num_generations)

    def _positions_of(self, ids: Any, num_generations: int) -> Slots:
        expected = self.num_envs // num_generations
        if isinstance(ids, str) or not isinstance(ids, Sequence | np.ndarray) or len(ids) != expected:
            raise ValueError(
                f"Expected {expected} instruction_ids, for num_envs={self.num_envs} slots and num_generations="
                f"{num_generations} of each, got {ids!r:.60}."
            )
        return np.repeat([self.find_instruction(id) for id in ids], num_generations)

    def _seed(self, seed: Seeds, slots: Slots) -> None:
        """Starts new streams for `slots` where there is a seed, and for every slot that has none yet."""
        if seed is None or isinstance(seed, int | np.integer):
            seeds = [None if seed is None else int(seed) + i for i in range(self.num_envs)]
        elif not isinstance(seed, list | tuple | np.ndarray):
            raise ValueError(f"Expected seed to be None, an int or a list of one per slot, got {seed!r}.")
        else:
            seeds = list(seed)
        if len(seeds) != self.num_envs:
            raise ValueError(f"Expected one seed per slot, {self.num_envs}, got {len(seeds)}.")
        for slot in slots.tolist():
            if seeds[slot] is not None or slot not in self._streams:
                generator, self._seeds[slot] = np_random(seeds[slot])
                self._streams[slot] = IndexStream(generator, len(self.drawn))

    def _renew_streams(self) -> None:
        size = len(self.drawn)
        self._streams = {slot: IndexStream(stream.generator, size) for slot, stream in self._streams.items()}

    def _draw(self, slots: Slots) -> Slots:
        leaders = self._leaders[slots].tolist()
        drawn = {leader: self.drawn[self._streams[leader].draw()] for leader in dict.fromkeys(leaders)}
        return np.fromiter((drawn[leader] for leader in leaders), dtype=np.int64, count=len(leaders))

    def _ask(self, slots: Slots, positions: Slots) -> None:
        self._indices[slots] = positions
        self._open[slots] = True
        self._observations = tuple(self.instructions[i] for i in self._indices.tolist())
        if self.render_mode is not None:
            for slot in slots.tolist():
                self._show(slot, Episode(self._observations[slot]))

    def _reset_infos(self, slots: Slots) -> dict[str, Any]:
        instructions = [self._observations[i] for i in slots.tolist()]
        return scatter(instruction_columns(instructions, self.split), slots, self.num_envs)
