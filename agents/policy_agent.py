"""What every agent that trains a policy shares: steps out, answers out, weights in and out."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from torch import nn

from .checkpoints import load_weights
from .language_model import LanguageModel
from .loop import Loop, Resume, TrainingConfig, keyed_generator, show_progress
from .processes import default_device


@dataclass(frozen=True, kw_only=True)
class PolicyConfig(TrainingConfig):
    """What the config of every agent with a policy has."""

    act_temperature: float = 0.7
    """Sampling temperature of `act`; 0 is greedy. Source: AlpacaFarm, sec. 4."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(self.act_temperature >= 0, "act_temperature", "0 or more")


class PolicyAgent:
    """Base of the agents that train a policy. A subclass makes its loop with `_start` and defines `_step`.

    Args:
        policy: The model to train, in place, or a folder or hub name to load it from.
        config: Settings.
        seed: Keys every draw of the run.
        max_act_tokens: Longest response of `act`; None: the policy's own limit.
    """

    label: ClassVar[str]
    """What the progress bar calls it."""

    def __init__(
        self, policy: LanguageModel | str | Path, config: PolicyConfig, *, seed: int, max_act_tokens: int | None = None
    ) -> None:
        if not isinstance(policy, LanguageModel):
            policy = LanguageModel.from_pretrained(policy, device=default_device())
        self.policy, self.seed = policy, seed
        self._act_temperature, self._max_act_tokens = config.act_temperature, max_act_tokens

    def updates(self) -> Iterator[dict[str, float]]:
        """Train, one step at a time; yields each step's metrics."""
        return self._loop.run(self._step)

    def learn(self) -> dict[str, float]:
        """Train to the end, with a progress bar; returns the last metrics ({} if there was nothing left to do)."""
        return show_progress(self.updates(), done=self._loop.step, total=self._loop.total, label=self.label)

    def act(self, instructions: Sequence[str]) -> tuple[str, ...]:
        """Sample a response for each instruction; equal calls give equal answers."""
        generator = keyed_generator(self.seed, "act", *instructions)
        samples = self.policy.generate(
            instructions,
            generator=generator,
            temperature=self._act_temperature,
            max_new_tokens=self._max_act_tokens,
        )
        return samples.texts

    def save(self, folder: str | Path) -> None:
        """Write the policy as a Hugging Face folder with tokenizer and prompt template."""
        self.policy.save(Path(folder))

    def load(self, folder: str | Path) -> None:
        """Read weights that `save` wrote back into the policy."""
        load_weights(Path(folder), self.policy.model)

    # ------------------------------------------------------------------------------------------- for subclasses

    _loop: Loop

    def _step(self, step: int) -> dict[str, float]:
        """Make step `step` (from 1); its metrics."""
        raise NotImplementedError

    def _start(
        self,
        config: TrainingConfig,
        *,
        total: int,
        inputs: Mapping[str, Any],
        out: str | Path | None,
        resume: Resume,
        modules: Mapping[str, nn.Module] | None = None,
        write: Callable[[Path], None] | None = None,
        read: Callable[[Path], None] | None = None,
    ) -> Loop:
        """The loop of a run whose checkpoints hold the policy; arguments as of `Loop`."""
        return Loop(
            modules or {"policy": self.policy.model},
            config=config,
            total=total,
            seed=self.seed,
            out=None if out is None else Path(out),
            inputs=inputs,
            write=write or (lambda folder: self.save(folder / "policy")),
            read=read or (lambda folder: self.load(folder / "policy")),
            resume=resume,
        )
