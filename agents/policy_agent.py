"""Base of all agents: training by a `Loop`, answers, weights in and out, the start of a run."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, TypedDict, TypeVar

import torch
from torch import Tensor, nn

from ..bases import adapter_base, adapter_task, is_adapter
from ..chat_templates import load_template
from ..errors import CheckpointError, DataError
from ..instructions import Demonstration, Labelled, Preference
from ..oracles.base import NoCopy
from ..oracles.reward_model import check_folder, load_scorer, num_positions
from ..pretrained import load_config, load_tokenizer
from ..terminal import make_bar
from . import tracking
from .adapters import merge
from .checkpoints import load_weights, starting_point
from .language_model import LanguageModel
from .loop import Loop, Resume, Sums, keyed_generator
from .processes import Processes, default_device
from .prompts import check_budget, own_control_token, prompt_lengths, up_to
from .saving import save_files
from .settings import FREE_TO_CHANGE, NonNegative, TrainingConfig


@dataclass(frozen=True, kw_only=True)
class PolicyConfig(TrainingConfig):
    """Settings that every agent with a policy has."""

    act_temperature: NonNegative = 0.7
    """Sampling temperature of `act`; 0 is greedy. Source: AlpacaFarm, sec. 4."""


class Run(TypedDict, total=False):
    """Arguments of all agents that a `Loop` trains; see `PolicyAgent`."""

    seed: int
    out: str | Path | None
    resume: Resume


class Trainer:
    """Base of what a `Loop` trains: a subclass makes `_loop` and defines `updates`, which goes through its steps."""

    label: ClassVar[str]
    """Its name in the progress bar and in warnings."""
    num_left_out: int = 0
    """Examples, or instructions of the environment, that are left out as their prompts are too long."""
    _loop: Loop

    def updates(self) -> Iterator[dict[str, float]]:
        """Train, one step at a time; yields each step's metrics.

        Before the first one, passes of the largest update find out whether its micro-batches fit into the memory.

        Raises:
            NotEnoughMemoryError: Not even the longest row does.
        """
        raise NotImplementedError

    def learn(self, *, callback: tracking.Callback | None = None, trackers: tracking.Trackers = ()) -> dict[str, float]:
        """Train to the end, with a progress bar; returns the last metrics ({} if there was nothing left to do).

        Args:
            callback: Is called with each step's metrics, on every process, once they are on disk. If it returns False,
                the run ends there, with a checkpoint. What it raises is raised; the run goes on from its last
                checkpoint.
            trackers: Names of accelerate's trackers ("tensorboard", "wandb", "trackio", "mlflow" ...), or its
                `GeneralTracker` objects, such as `WandBTracker("my project", name="run 3")`; of the main process. They
                are given the config, the seed and each step's metrics.

        Raises:
            TypeError: `callback` cannot be called.
            TrackerError: A tracker's package is not installed, or it needs an `out`; nothing has been trained then.
            UnknownNameError: There is no such tracker.
        """
        run, metrics = self._run(), dict[str, float]()
        settings = {**tracking.flat(asdict(run["config"])), "seed": run["seed"]}
        trackers = trackers if self.step < self.num_steps else ()
        updates: Any = self.updates()
        with (
            tracking.reporting(callback, trackers, settings, run["out"], run["processes"]) as report,
            # Closed where it is interrupted too: a traceback that a notebook keeps would hold the run's folder.
            closing(updates),
            make_bar(self.num_steps, self.label, show=run["processes"].is_main, initial=self.step, unit="step") as bar,
        ):
            for metrics in updates:
                bar.set_postfix({name: metrics[name] for name in tracking.SHOWN if name in metrics}, refresh=False)
                bar.update()
                if not report(metrics):
                    run["stop"]()
                    break
        return metrics

    @property
    def step(self) -> int:
        """Completed steps."""
        return self._loop.step

    @property
    def num_steps(self) -> int:
        """Steps of the whole run."""
        return self._loop.total

    def whole(self) -> AbstractContextManager[None]:
        """All models whole on each process, so that it may ask any of them as often as it likes, without gradients.

        Needed around what reads a reference or value model that is sharded; all processes enter and leave it together.
        """
        return self._loop.whole()

    @property
    def facts(self) -> dict[str, Any]:
        """The rows of a model card: the method, its steps and seed, and the settings that decide what it learns."""
        run = self._run()
        settings = {name: value for name, value in asdict(run["config"]).items() if name not in FREE_TO_CHANGE}
        steps = f"{self.step} of {self.num_steps}"
        return {"method": type(self).__name__, "steps": steps, "seed": run["seed"], "settings": settings}

    def _run(self) -> dict[str, Any]:
        """The run as `learn` needs to know it; `stop` saves it as it is."""
        loop = self._loop
        run = {"config": loop.config, "seed": loop.seed, "out": loop.out, "processes": loop.processes}
        return {**run, "stop": loop.keep}

    def _longest_rows(self, sizes: Tensor, batch_size: int) -> Tensor:
        """The rows of this process's share of a batch in the worst case: those of the largest sizes, [b]."""
        return sizes.topk(min(len(sizes), math.ceil(batch_size / self._loop.processes.count))).indices

    def _largest(self) -> tuple[list[int], Sums]:
        """This process's largest update: tokens of each row in a micro-batch, and sums over some of these rows."""
        raise NotImplementedError


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
    """The model card's rows on the training."""

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
    """Base of the agents that train a policy. A subclass makes `_loop` with `_start` and goes through it in `updates`.

    All of them take:

    - `policy`: the model to train, in place, or a folder or hub name to load it from. As it is when the agent is made,
      it is the reference of those that have one.
    - `config`: settings; those of `paper()` are the source's, those of `sandbox()` suit two CPU cores.
    - `seed`: keys every draw by step, so that a resumed run makes the same ones.
    - `out`: the folder for metrics.jsonl, timing.jsonl, checkpoints and rollouts.jsonl.gz, some of what an agent that
      samples has sampled in each step; None keeps nothing.
    - `resume`: "auto" continues the newest checkpoint of `out`, "never" refuses a folder that has one.

    Examples whose prompts are too long for the policy are left out, with a warning (`num_left_out`).
    """

    def _fitting(self, examples: Sequence["Example"]) -> list["Example"]:
        """The examples whose prompts the policy can read; ValueError if there are none at all."""
        if not examples:
            raise ValueError(f"{self.label} needs at least one example to train on, got none.")
        kept = fitting(self.policy, [example.instruction for example in examples], who=self.label)
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
    ) -> Loop:
        """The loop of a run whose checkpoints hold the policy; arguments as of `Loop`.

        `inputs` is called only where its result is compared: by a later resume, or by the other processes. For a resume
        the fingerprints of the models at the start are added to it.
        """
        if self.policy.sampler is not None:
            self.policy.sampler.check_trainable()
        modules = modules or {"policy": self.policy.model}
        identity: dict[str, Any] = {"left_out": self.num_left_out}
        if out is not None or Processes(self.policy.device).count > 1:
            identity |= inputs()
        if out is not None:
            identity |= {f"{role}_sha256": starting_point(model) for role, model in modules.items()}
        loop = Loop(
            modules,
            frozen=[] if self.policy.reference is None else [self.policy.reference],
            config=config,
            total=total,
            seed=self.seed,
            out=None if out is None else Path(out),
            inputs=identity,
            write=self._write,
            read=self._read,
            largest=self._largest,
            label=self.label,
            resume=resume,
        )
        self.policy.precision = loop.processes.precision
        return loop

    def _write(self, folder: Path) -> None:
        """Write a checkpoint's models."""
        self.save(folder / "policy")

    def _read(self, folder: Path) -> None:
        self.load(folder / "policy")


Example = TypeVar("Example", Demonstration, Labelled, Preference)


def loaded(policy: LanguageModel | str | Path) -> LanguageModel:
    """The policy itself, or the one in a folder or of a hub name, on this process's device."""
    if isinstance(policy, LanguageModel):
        return policy
    return LanguageModel.from_pretrained(policy, device=default_device())


def fitting(
    policy: LanguageModel,
    instructions: Sequence[str],
    *,
    who: str,
    width: int | None = None,
    micro_batch_tokens: int | None = None,
) -> list[int]:
    """The numbers of the instructions whose prompts the policy can read; a warning by `who` counts the others.

    `width` is how many tokens a response needs after the prompt (None: the policy's longest), and `micro_batch_tokens`
    what must hold each prompt with such a response (None: chosen by what there is).

    Raises:
        DataError: No prompt can be read, or a micro-batch is too small.
    """
    limit, advice = policy.max_prompt_tokens, "load the policy with a larger max_prompt_tokens"
    # The control token of a conditioned policy is in front of the prompt, and not counted as one of its tokens.
    taken = (policy.max_response_tokens if width is None else width) + (own_control_token(policy.model) is not None)
    room = num_positions(policy.model.config) - taken
    if room < 1:
        raise DataError(
            f"{who}: responses of {taken} tokens leave no room for a prompt: the model has "
            f"{num_positions(policy.model.config)} positions. Take a smaller max_response_tokens."
        )
    if room < limit:
        limit, advice = int(room), "take a smaller max_response_tokens: the model's positions must hold both"
    lengths = prompt_lengths(policy.tokenizer, policy.template, instructions)
    kept = up_to(limit, lengths, who=who, advice=advice)
    check_budget(micro_batch_tokens, max((lengths[number] for number in kept), default=0) + taken, who=who)
    return kept


def merge_folder(folder: str | Path, out: str | Path) -> None:
    """Writes the whole model that the adapter in `folder`, a policy's or a reward model's, and its base make.

    The adapter is added in float32, and the weights are saved in the type of the base's.

    Raises:
        CheckpointError: `folder` holds no adapter, its base is not there, or `out` has files.
        DataError: The folder has no prompt template.
    """
    if not is_adapter(folder):
        raise CheckpointError(f"{folder}: expected the folder of a LoRA adapter (adapter_config.json), found none.")
    if Path(out).exists() and (not Path(out).is_dir() or any(Path(out).iterdir())):
        raise CheckpointError(f"{out}: expected a new or empty folder to write the whole model to, found files.")
    dtype = load_config(adapter_base(folder)).dtype or torch.float32
    facts = {"adapter": Path(folder).resolve().name, "merged": "in float32 by alpacafarm merge"}
    if adapter_task(folder) != "SEQ_CLS":
        LanguageModel.from_pretrained(folder, dtype=dtype).save(out, merged=True, facts=facts)
        return
    tokenizer, settings = load_tokenizer(folder), check_folder(Path(folder))
    model: Any = merge(load_scorer(folder, dtype=dtype))
    for name, value in settings.items():
        setattr(model.config, name, value)
    ends = settings.get("alpacafarm_end_with_eos", True)
    save_files(out, model, tokenizer, load_template(folder, tokenizer), eos=ends, facts=facts)
