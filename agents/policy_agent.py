"""What every agent that trains a policy shares: steps out, answers out, weights in and out."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from torch import nn

from .checkpoints import load_weights, starting_point
from .language_model import LanguageModel
from .loop import Loop, Resume, TrainingConfig, keyed_generator, show_progress
from .processes import Processes, default_device


@dataclass(frozen=True, kw_only=True)
class PolicyConfig(TrainingConfig):
    """What the config of every agent with a policy has."""

    act_temperature: float = 0.7
    """Sampling temperature of `act`; 0 is greedy. Source: AlpacaFarm, sec. 4."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(self.act_temperature >= 0, "act_temperature", "0 or more")


def loaded(policy: LanguageModel | str | Path) -> LanguageModel:
    """The policy itself, or what a folder or hub name holds, on this process's device."""
    if isinstance(policy, LanguageModel):
        return policy
    return LanguageModel.from_pretrained(policy, device=default_device())


class PolicyActor:
    """A policy that answers instructions; what it has learned elsewhere, or nothing.

    Args:
        policy: The model, or a folder or hub name to load it from.
        config: Gives the temperature of `act`.
        seed: Keys every draw.
        max_act_tokens: Longest response of `act`; None: the policy's own limit.

    Attributes:
        num_tokens: How many tokens `act` has sampled so far, ends of sequence included.
    """

    def __init__(
        self,
        policy: LanguageModel | str | Path,
        config: PolicyConfig | None = None,
        *,
        seed: int = 0,
        max_act_tokens: int | None = None,
    ) -> None:
        self.policy, self.seed, self.num_tokens = loaded(policy), seed, 0
        self._act_temperature = (config or PolicyConfig()).act_temperature
        self._max_act_tokens = max_act_tokens

    def act(self, instructions: Sequence[str]) -> tuple[str, ...]:
        """Sample a response for each instruction; equal calls give equal answers."""
        samples = self.policy.generate(
            instructions,
            generator=keyed_generator(self.seed, "act", *instructions),
            temperature=self._act_temperature,
            max_new_tokens=self._max_act_tokens,
        )
        self.num_tokens += len(samples.tokens)
        return samples.texts

    def save(self, folder: str | Path) -> None:
        """Write the policy as a Hugging Face folder with tokenizer and prompt template."""
        self.policy.save(Path(folder))

    def load(self, folder: str | Path) -> None:
        """Read weights that `save` wrote back into the policy."""
        load_weights(Path(folder), self.policy.model)


class PolicyAgent(PolicyActor):
    """Base of the agents that train a policy. A subclass makes `_loop` with `_start` and defines `_step`."""

    label: ClassVar[str]
    """What the progress bar calls it."""
    num_left_out: int = 0
    """Examples, or instructions of the environment, left out as their prompts are too long for the policy."""
    _loop: Loop

    def updates(self) -> Iterator[dict[str, float]]:
        """Train, one step at a time; yields each step's metrics."""
        return self._loop.run(self._step)

    def learn(self) -> dict[str, float]:
        """Train to the end, with a progress bar; returns the last metrics ({} if there was nothing left to do)."""
        return show_progress(self.updates(), done=self._loop.step, total=self._loop.total, label=self.label)

    @property
    def num_steps(self) -> int:
        """Steps of the whole run."""
        return self._loop.total

    # ------------------------------------------------------------------------------------------- for subclasses

    def _step(self, step: int) -> dict[str, float]:
        """Make step `step` (from 1); its metrics."""
        raise NotImplementedError

    def _start(
        self,
        config: TrainingConfig,
        *,
        total: int,
        inputs: Callable[[], Mapping[str, Any]],
        out: str | Path | None,
        resume: Resume,
        modules: Mapping[str, nn.Module] | None = None,
        write: Callable[[Path], None] | None = None,
        read: Callable[[Path], None] | None = None,
    ) -> Loop:
        """The loop of a run whose checkpoints hold the policy; arguments as of `Loop`.

        `inputs` is asked where somebody compares it: a later resume, or the other processes. What the models start
        from is added to it for a resume.
        """
        modules = modules or {"policy": self.policy.model}
        known: dict[str, Any] = {}
        if out is not None or Processes(self.policy.device).count > 1:
            known |= inputs()
        if out is not None:
            known |= {f"{role}_sha256": starting_point(model) for role, model in modules.items()}
        return Loop(
            modules,
            config=config,
            total=total,
            seed=self.seed,
            out=None if out is None else Path(out),
            # Only if there are any: a run that leaves nothing out is the same as before this was counted.
            inputs={**known, "left_out": self.num_left_out} if self.num_left_out else known,
            write=write or (lambda folder: self.save(folder / "policy")),
            read=read or (lambda folder: self.load(folder / "policy")),
            resume=resume,
        )
