"""What the agents with a policy share: answers, weights in and out, the start of a run."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

from ..instructions import Demonstration, Preference
from ..oracles.base import NoCopy
from . import fitting
from .checkpoints import load_weights, starting_point
from .language_model import LanguageModel
from .loop import Loop, Resume, keyed_generator
from .processes import Processes, default_device
from .settings import TrainingConfig
from .trainer import Trainer


@dataclass(frozen=True, kw_only=True)
class PolicyConfig(TrainingConfig):
    """What the config of every agent with a policy has."""

    act_temperature: float = 0.7
    """Sampling temperature of `act`; 0 is greedy. Source: AlpacaFarm, sec. 4."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.at_least(0, "act_temperature")


Example = TypeVar("Example", Demonstration, Preference)


def loaded(policy: LanguageModel | str | Path) -> LanguageModel:
    """The policy itself, or the one in a folder or of a hub name, on this process's device."""
    if isinstance(policy, LanguageModel):
        return policy
    return LanguageModel.from_pretrained(policy, device=default_device())


class PolicyActor(NoCopy):
    """A policy that answers instructions.

    Args:
        policy: The model, or a folder or hub name to load it from.
        config: Gives the temperature of `act`.
        seed: Keys every draw.
        max_act_tokens: Longest response of `act`; None: the policy's own limit.

    Attributes:
        num_tokens: How many tokens `act` has sampled so far, ends of sequence included.
    """

    facts: Any = None
    """What the model card says of the training."""

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

    def save(self, folder: str | Path, *, merged: bool = False) -> None:
        """Write the policy as a Hugging Face folder with tokenizer, prompt template and model card.

        Of a policy with LoRA that is the adapter; `merged`, a whole model.
        """
        self.policy.save(Path(folder), merged=merged, facts=self.facts)

    def load(self, folder: str | Path) -> None:
        """Read weights that `save` wrote back into the policy."""
        load_weights(Path(folder), self.policy.model)


class PolicyAgent(Trainer, PolicyActor):
    """Base of the agents that train a policy. A subclass makes `_loop` with `_start` and defines `_step`.

    All of them take:

    - `policy`: the model to train, in place, or a folder or hub name to load it from. As it is when the agent is made,
      it is the reference of those that have one.
    - `config`: settings; those of `paper()` are the source's, those of `sandbox()` suit two CPU cores.
    - `seed`: keys every draw by step, so that a resumed run makes the same ones.
    - `out`: the folder for metrics.jsonl, timing.jsonl and checkpoints; None keeps nothing.
    - `resume`: "auto" continues the newest checkpoint of `out`, "never" refuses a folder that has one.

    Examples whose prompts are too long for the policy are left out, with a warning (`num_left_out`).
    """

    def _fitting(self, examples: Sequence[Example]) -> list[Example]:
        """The examples whose prompts the policy can read; ValueError if there are none at all."""
        if not examples:
            raise ValueError(f"{self.label} needs at least one example to train on, got none.")
        asked = [example.instruction for example in examples]
        kept = fitting.fitting(self.policy, asked, who=self.label)
        self.num_left_out = len(examples) - len(kept)
        return [examples[number] for number in kept]

    def _start(
        self,
        config: TrainingConfig,
        *,
        total: int,
        inputs: Callable[[], Mapping[str, Any]],
        out: str | Path | None,
        resume: Resume,
        modules: Mapping[str, nn.Module] | None = None,
        frozen: Sequence[nn.Module] = (),
    ) -> Loop:
        """The loop of a run whose checkpoints hold the policy; arguments as of `Loop`.

        `inputs` is called only where its result is compared: by a later resume, or by the other processes. For a resume
        the fingerprints of the models at the start are added to it.
        """
        if self.policy.sampler is not None:
            self.policy.sampler.check_trainable()
        modules = modules or {"policy": self.policy.model}
        known: dict[str, Any] = {}
        if out is not None or Processes(self.policy.device).count > 1:
            known |= inputs()
        if out is not None:
            known |= {f"{role}_sha256": starting_point(model) for role, model in modules.items()}
        return Loop(
            modules,
            frozen=frozen,
            config=config,
            total=total,
            seed=self.seed,
            out=None if out is None else Path(out),
            # Only if there are any: a run that leaves nothing out is the same as before this was counted.
            inputs={**known, "left_out": self.num_left_out} if self.num_left_out else known,
            write=self._write,
            read=self._read,
            resume=resume,
        )

    def _write(self, folder: Path) -> None:
        """What a checkpoint holds of the models."""
        self.save(folder / "policy")

    def _read(self, folder: Path) -> None:
        self.load(folder / "policy")
