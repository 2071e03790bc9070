"""An environment of texts as OpenEnv serves it: sessions, and every session's steps through one oracle.

Source: OpenEnv 0.10 (`openenv.core.env_server`), whose clients need nothing of this package.
"""

from __future__ import annotations

from typing import Any, Final

from gymnasium.error import ResetNeeded
from openenv.core.env_server import Action, Environment, Observation, State
from openenv.core.env_server.http_server import create_fastapi_app

from ..data import Dataset
from ..envs.instruction import InstructionEnv
from ..envs.scoring import check_options
from ..errors import DataError, FieldError
from ..instructions import Instruction
from ..oracles.base import RewardOracle, shorten

MAX_SESSIONS: Final = 256
"""Sessions at once, each a thread."""
_TASKS: Final = ("split", "instruction_id")


class Response(Action):
    """The policy's answer."""

    response: str


class Shown(Observation):
    """The instruction, input merged in, and its id; after a step the info, such as `reward_components`, as metadata."""

    instruction: str
    instruction_id: int
    split: str


class TextEnvironment(Environment):
    """One session: `InstructionEnv` of a split, or of another one that `reset` names.

    `reset(instruction_id=...)` asks the instruction of that id and draws nothing; `reset(seed=...)` seeds the draws,
    and `reset()` draws.
    """

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self, dataset: Dataset, split: str, oracle: RewardOracle) -> None:
        super().__init__()
        self._dataset, self._split, self._oracle = dataset, split, oracle
        self._envs: dict[str, InstructionEnv] = {}
        self._env = self._env_of(split)
        self._state = State()

    async def reset_async(self, seed: int | None = None, episode_id: str | None = None, **task: Any) -> Shown:
        """As `reset`; it asks no oracle, so no thread is needed."""
        return self.reset(seed, episode_id, **task)

    def reset(self, seed: int | None = None, episode_id: str | None = None, **task: Any) -> Shown:
        """The next instruction, or the one asked for; FieldError for a wrong option."""
        check_options(task, ("seed", "episode_id", *_TASKS))
        split, id = (task.get(name) for name in _TASKS)
        for name, number in {"seed": seed, "instruction_id": id}.items():
            if number is not None and type(number) is not int:  # nor bool
                raise FieldError(name, f"expected a whole number, got {shorten(str(number))}")
        env = self._env_of(self._split if split is None else split)
        options = None if id is None else {"instruction_id": id}
        instruction, info = env.reset(seed=seed, options=options)
        self._env, self._state = env, State(episode_id=episode_id, step_count=0)
        return self._show(instruction, info)

    def step(self, action: Response, timeout_s: float | None = None, **more: Any) -> Shown:
        """The response's reward, None without a verdict; every step ends the episode."""
        try:
            instruction, reward, scored, _, info = self._env.step(action.response)
        except ResetNeeded as error:
            raise DataError(f"{error} POST /step knows no session: connect to /ws.") from error
        self._state.step_count += 1
        return self._show(instruction, info, done=True, reward=reward if scored else None)

    @property
    def state(self) -> State:
        """The episode's id, and whether its step was taken."""
        return self._state

    def _env_of(self, split: Any) -> InstructionEnv:
        if split not in self._dataset.splits:
            raise FieldError("split", f"expected one of {', '.join(self._dataset.splits)}, got {shorten(str(split))}")
        if split not in self._envs:
            self._envs[split] = InstructionEnv(self._dataset, split, self._oracle)
        return self._envs[split]

    def _show(self, instruction: Instruction, info: dict[str, Any], **more: Any) -> Shown:
        own = ("instruction_id", "split", "response")
        metadata = {key: value for key, value in info.items() if key not in own}
        place = {"instruction_id": instruction.id, "split": info["split"]}
        return Shown(instruction=str(instruction), **place, metadata=metadata, **more)


def make_app(id: str, dataset: Dataset, split: str, oracle: RewardOracle) -> Any:
    """OpenEnv's FastAPI application of an environment; `oracle` is asked by many threads."""

    def session() -> TextEnvironment:
        return TextEnvironment(dataset, split, oracle)

    return create_fastapi_app(session, Response, Shown, MAX_SESSIONS, env_name=id, mode="simulation")
