"""Trains one method's policy, lets it answer eval, and saves it; or trains a reward model.

    alpacafarm train METHOD [--quick] [--feedback ann|human] [--out DIR]
    alpacafarm train reward_modeling --dataset DATA --policy FOLDER [--out DIR]

In the sandbox it starts from the shipped SFT policy and prints the row that the ranking of methods would have. With
--dataset, --policy and --reward-model it runs on your own data and models; --judge then gives a win rate against the
data's references. The answers are outputs.json in AlpacaEval's form, the references references.json:

    alpacafarm judge evaluate DIR/outputs.json --reference DIR/references.json

has them judged by annotators over an API. reward_modeling trains a reward model from --policy on the data's
preferences, the --reward-model of other methods, and tests it on pairs that it leaves out. Options are kept in
DIR/run.yaml, which --config takes.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from inspect import signature
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Literal

import numpy as np
import pydantic
import tyro
from huggingface_hub import HfApi

from .. import sandbox
from ..arguments import match_name
from ..bases import base_of
from ..cli.options import RUN_FILE, Count, Seed
from ..cli.options import parse as parse_options
from ..data.files import write_atomic
from ..data.load import training_dataset
from ..errors import CheckpointError, DataError
from ..folders import hash_model
from ..plugins import source_mark
from ..sandbox.writers import API_MODELS
from ..statistics import win_rate
from .experiment.dry_run import has_weights, rehearse, report, sizes
from .experiment.engine import COLUMNS, Experiment, Form, cell_of, read_evaluation
from .experiment.engine import run as run_experiment
from .experiment.evaluation import OWN_WIN_RATE, subset
from .experiment.own_judge import has_references, judge_name, refuse_trained_on, settled_judge
from .experiment.reward_models import RewardModelRun
from .experiment.reward_models import train as train_reward_model
from .harness.runner import Progress, clock_text, quiet
from .harness.stored import file_name, is_helper, refuse_taken, take_folder
from .harness.study import Row, run_command, write_csv
from .methods.job import FEEDBACK_OF, Job, Labellers, ModelOptions
from .methods.methods import RANKED, REWARD_MODELING, check_splits, find_method
from .methods.presets import Dtype, choose_preset, option_of

NAME = "train"
SPECS: Final = {
    **{method.name: method.name for method in RANKED if method.name not in API_MODELS},
    "sft": "fine_tuning",  # the ranking's sft is the policy that all methods start from
    REWARD_MODELING: REWARD_MODELING,
}
"""Method -> what it is among all methods of the studies."""


@dataclass(frozen=True)
class TrainOptions(ModelOptions):
    """Options of a single method's training."""

    quick_defaults: ClassVar[Mapping[str, Any]] = {"num_eval": 201}

    method: tyro.conf.Positional[str]
    """Name of a method, or module:attribute of a Method of your own."""
    feedback: Labellers = "ann"
    """Whose labels it learns from (sandbox): the noisy pool of annotators', or the human raters'."""
    quick: bool = False
    """A small run of the same shape."""
    seed: Seed = 0
    """Seed of the training and of the annotators' labels."""
    out: Path | None = None
    """Folder for checkpoints, metrics, policy and answers, of one method, its labels and seed. Default:
    results/train/METHOD-DATA-POLICY-SEED, in the sandbox results/train/METHOD-FEEDBACK-SEED; with --quick its name ends
    with -quick."""
    num_eval: Count = 805
    """Instructions of eval to answer; with --quick 201 unless given."""
    lora: Annotated[int, pydantic.Field(ge=0)] | None = None
    """Rank of the LoRA adapters to train, 8 for instance; 0 trains all weights. Default: the preset's."""
    max_prompt_tokens: Count | None = None
    """Longest prompt to train on, in tokens; longer ones are counted and left out, and still answered where the model
    can. Default: AlpacaFarm's 192."""
    steps: Count | None = None
    """Steps of methods that sample as they learn. Default, as of all settings below: the preset's. A method names those
    that it has."""
    epochs: Count | None = None
    """Passes over the data, of methods that learn from a fixed set."""
    batch_size: Count | None = None
    """Examples of an update; of best-of-n the responses sampled at once."""
    sample_batch_size: Count | None = None
    """Responses that expert iteration samples at once."""
    num_instructions: Count | None = None
    """Instructions that expert iteration learns from."""
    keep_rollouts: Annotated[int, pydantic.Field(ge=0)] | None = None
    """Responses of a step that are kept in the run's rollouts.jsonl.gz, to be looked at later; 0: none. Default: 64."""
    dtype: Dtype | None = None
    """Type of the policy's weights. Adapters are trained in float32; all weights (--lora 0) by float32 masters."""
    reward_dtype: Dtype | None = None
    """Type of the reward model's weights where it only scores."""
    save: Form = "merged"
    """How a model trained by LoRA is saved: a whole model, which any library loads, or the adapter, a few MB that need
    their base. Both can be --policy, --reward-model and --judge of later runs."""
    trackers: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = ()
    """Trackers that are given each step's metrics; each needs its package."""
    push_to_hub: str | None = None
    """Name of a repository of the Hugging Face hub, such as me/my_model, that the saved model is uploaded to. Whether
    it can be written is checked first; a new one is private."""
    dry_run: bool = False
    """Make three steps, or what a minute allows, and keep nothing: prints memory and seconds by phase, hours and the
    micro-batch."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.template and self.policy == "sandbox":
            raise ValueError("--template: expected --policy with it; the sandbox's models have theirs")
        if (self.data == "sandbox") != (self.policy == "sandbox"):
            raise ValueError(
                f"--dataset and --policy: expected both or none, got {self.data!r} and {self.policy!r}; the sandbox's "
                "policy knows the sandbox's world only"
            )

    @property
    def spec(self) -> str:
        """The method among those of the studies, or module:attribute."""
        return self.method if ":" in self.method else SPECS[self.method]

    @property
    def method_name(self) -> str:
        """For folders and tables."""
        return find_method(self.spec).name

    @property
    def labels(self) -> str:
        """The feedback as tables call it."""
        return FEEDBACK_OF[self.feedback] if self.data == "sandbox" else "own labels"

    @property
    def name(self) -> str:
        """The mark of its folder: nothing else may write there. Data and models are compared by content."""
        return f"{NAME} {self.method_name}{source_mark(self.method)}, {self.labels}, seed {self.seed}"

    @property
    def folder(self) -> Path:
        """Where everything goes."""
        own = (self.data, self.policy) if self.data != "sandbox" else ()
        names = "-".join(Path(name).resolve().name for name in own) or self.feedback
        name = file_name(f"{self.method_name}-{names}-{self.seed}{'-quick' * self.quick}")
        return self.out if self.out is not None else Path("results") / NAME / name

    def job(self, reward: str | None = None) -> Job:
        """The job that an agent is made from."""
        return Job(folder=self.folder / "runs", **self._for_job(reward))

    def plan(self, reward: str | None) -> Experiment:
        """The cell of the ranking that this run is."""
        data = training_dataset(self.data, allow_overlap=self.allow_overlap)
        num_eval = min(self.num_eval, len(data.instructions("eval")) if "eval" in data.splits else 0)
        own: dict[str, Any] = {"agent": self.spec, "save": self.save, "trackers": self.trackers}
        own["judge"] = settled_judge(self.judge, data)
        own["cell"] = cell_of(self.spec, self.labels, self.seed)
        own["splits"] = () if self.spec == REWARD_MODELING else (("eval", num_eval),)
        return Experiment(out=self.folder, **own, **self._for_job(reward))

    def _for_job(self, reward: str | None) -> dict[str, Any]:
        same = ("seed", "quick", "template", "lora", "dtype", "reward_dtype", "changed", "allow_overlap")
        options = {name: getattr(self, name) for name in (*same, "max_prompt_tokens", "max_response_tokens")}
        options |= {"preset": self.preset or choose_preset(self.policy)[0], "feedback": FEEDBACK_OF[self.feedback]}
        return {**options, "dataset": self.data, "sft": self.policy, "reward": reward}


def run(options: TrainOptions) -> int:
    """Trains, answers, saves; prints the result and returns the exit status.

    Processes that torchrun has started do it together; only the main one judges, writes and prints.
    """
    data = training_dataset(options.data, allow_overlap=options.allow_overlap)
    check_splits(options.spec, data, judged=options.judge is not None and options.spec != REWARD_MODELING)
    options = options.settled()
    if options.dry_run:
        return dry_run(options)
    lacks_reward = options.reward_model == "sandbox" and find_method(options.spec).needs == "reward"
    if options.data != "sandbox" and lacks_reward:
        raise DataError(f"{options.method}: expected --reward-model with --dataset {options.data}, got none.")
    refuse_taken(options.folder)
    for model in (options.policy, options.reward_model):
        if model != "sandbox":
            hash_model(model)  # refused before anything is written
    pushed_to = None if is_helper() else options.push_to_hub
    if pushed_to is not None:
        check_push(pushed_to, options.job(), adapter=options.save == "adapter")
    with take_folder(options.folder, options.name):
        kept = (options.folder / RUN_FILE).exists()  # another run's, perhaps: then this one is refused
        if not (kept or is_helper()):
            options.write(options.folder)
        saved = train(options)
        if not is_helper():
            options.write(options.folder)
    if pushed_to is not None:
        print(f"Pushed to {push(saved, pushed_to)}")
    return 0


def dry_run(options: TrainOptions) -> int:
    """Prints what the run would take; 0 if that fits into the machine's memory."""
    from ..agents.processes import Processes

    quiet()
    job = options.job(options.reward_model)
    made = rehearse(job, options.spec) if has_weights(job) else None
    if Processes().is_main:
        print(sizes(job) if made is None else report(job, made))
    return 0 if made is None or made.fits else 1


def train(options: TrainOptions) -> Path:
    """Trains a method's model; a policy answers, and the main process writes the results. Returns its folder."""
    if options.spec == REWARD_MODELING and (options.judge is not None or options.reward_model != "sandbox"):
        raise DataError("--judge, --reward-model: expected none for reward_modeling, which answers no instruction.")
    method = find_method(options.spec)
    if options.changed and method.needs == "nothing" and method.fixed:
        names = ", ".join(option_of(field) for field, _ in options.changed)
        raise DataError(f"{names}: expected none for {method.name}, whose settings are fixed.")
    reward = reward_model(options) if method.needs == "reward" else None
    if options.judge is not None and reward is not None:
        refuse_trained_on(options.judge, hash_model(reward))
    from ..agents.processes import Processes

    plan = options.plan(reward)
    if plan.splits and (num := plan.splits[0][1]) < options.num_eval and Processes().is_main:
        print(f"--num-eval {options.num_eval}: eval has {num} instructions, all are answered.", file=sys.stderr)
    for row in run_experiment(plan, Progress({plan.cell: plan.units} if Processes().is_main else {}).update):
        write_results(plan, row)  # only the main process has one
    return plan.saved


def write_results(plan: Experiment, result: Row) -> None:
    """Writes table.csv, outputs.json and references.json, and prints the row and three answers."""
    if plan.agent == REWARD_MODELING:
        row = {name: value for name, value in result.items() if name not in ("feedback", "seconds", "tokens")}
        write_csv(plan.out / "table.csv", [row])
        print(f"Reward model of {plan.sft} on {plan.dataset}: {clock_text(result['seconds'])}")
        print(*(f"  {name}: {row[name]:.4g}" for name in list(row)[2:]), sep="\n")
        print(f"\nThe reward model: {plan.saved}. Metrics and table.csv: {plan.out}.")
        return
    method, out, own = plan.method, plan.out, plan.dataset != "sandbox"
    answers, row = read_evaluation(plan)["splits"]["eval"], {name: result[name] for name in COLUMNS}
    if plan.judge is not None:
        rate = win_rate(np.array(answers[OWN_WIN_RATE], dtype=np.float64)).row()
        row |= {name: rate[name] for name in (OWN_WIN_RATE, "standard_error", "n_total")}
    write_csv(out / "table.csv", [{**row, "feedback": "own"} if own else row])
    what = f"{method.name} on {plan.dataset}" if own else f"{method.title}, {plan.feedback} feedback"
    print(f"{what}, seed {plan.seed}: {clock_text(row['seconds'])}")
    print(*(f"  {name}: {row[name]:.4g}" for name in list(row)[3:] if row[name] == row[name]), sep="\n")
    if plan.judge is not None:
        missing, num = answers["win_rate"].count(None), len(answers["win_rate"])
        name = f"{judge_name(plan.judge, plan.data)} against the references of {plan.dataset}"
        print(f"  win_rate and its standard_error are in %, by {name}; {missing} of {num} responses have no verdict")
    if answers["responses"]:
        write_outputs(plan, answers["responses"])
    else:
        print(f"  nothing was evaluated: {plan.dataset} has no split eval")
    for instruction, response in list(zip(answers["instructions"], answers["responses"], strict=True))[:3]:
        print(f"\n> {instruction}\n{response}")
    saved = plan.saved if plan.saved.is_dir() else "nothing was trained"
    print(f"\nThe policy: {saved}. Metrics, table.csv and answers: {out}.")


def write_outputs(plan: Experiment, responses: Sequence[str]) -> None:
    """outputs.json, and references.json where the data has references: AlpacaEval's form, which `evaluate` reads."""
    data = plan.data
    labels = plan.feedback if plan.dataset == "sandbox" else "own labels"
    files = {"outputs": (f"{plan.method.name}, {labels}, seed {plan.seed}", responses)}
    if has_references(data, "eval"):
        references = data.references("eval")
        name = str(getattr(data, "reference", f"references of {plan.dataset}"))
        files["references"] = (name, [references[place] for place in subset(len(references), len(responses))])
    for name, (generator, outputs) in files.items():
        rows = [
            {"instruction": each.instruction, "input": each.input, "output": output, "generator": generator}
            for each, output in zip(plan.instructions("eval"), outputs, strict=True)
        ]
        write_atomic(plan.out / f"{name}.json", json.dumps(rows, ensure_ascii=False, allow_nan=False, indent=1) + "\n")


def reward_model(options: TrainOptions) -> str:
    """The reward model to learn from: the user's own, the shipped surrogate, or one trained first on human labels."""
    if options.reward_model != "sandbox":
        return options.reward_model
    if options.feedback == "ann" and (options.seed == 0 or options.quick):
        return str(sandbox.REWARD_MODEL)
    cell = f"reward model, {options.labels}, seed {options.seed}"
    plan = RewardModelRun(cell=cell, seed=options.seed, out=options.folder, pairs=options.job().preferences)
    print("First the reward model on this feedback's labels:", file=sys.stderr)
    train_reward_model(plan, Progress({plan.cell: plan.units}).update)
    return str(plan.target)


def check_push(name: str, job: Job, *, adapter: bool) -> None:
    """Makes the hub's repository, private if it is new.

    Raises:
        DataError: What will be saved is an adapter whose base nobody else has.
        CheckpointError: This machine may not write there.
    """
    base = Path(base_of(job.policy_folder))
    if adapter and job.trains_adapter and base.is_dir():
        wanted = "Give --save merged, or a --policy by its hub name"
        raise DataError(f"--push-to-hub: expected a base that others have, got {base} for an adapter. {wanted}.")
    api = HfApi()
    with _reaching(f"--push-to-hub {name}: expected a repository to write to", f"{name} FOLDER, after training"):
        api.create_repo(name, private=True, exist_ok=True)
        if "write" in signature(api.auth_check).parameters:
            api.auth_check(name, write=True)


def push(folder: Path, name: str) -> str:
    """Uploads a saved model; its address. CheckpointError, with how to do it by hand, if the hub does not take it."""
    with _reaching(f"Expected to push {folder} to {name}", f"{name} {shlex.quote(str(folder))}"):
        return str(HfApi().upload_folder(repo_id=name, folder_path=folder, commit_message="A model by alpacafarm-env"))


@contextmanager
def _reaching(expected: str, by_hand: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # the hub's client and the network each have errors of their own
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        todo = f"What was saved is kept. Log in with a token that may write (hf auth login), or: hf upload {by_hand}"
        raise CheckpointError(f"{expected}, got: {reason}. {todo}") from error


def parse(args: Sequence[str] | None = None) -> TrainOptions:
    """Options from the command line.

    Raises:
        DataError: As `parse_options`.
        UnknownNameError: There is no such method.
    """
    about = f"{__doc__}\nMethods: {', '.join(SPECS)}."
    options = parse_options(TrainOptions, args, prog=f"alpacafarm {NAME}", description=about)
    method = options.method if ":" in options.method else match_name("method", options.method, SPECS)
    return replace(options, method=method)


def main(args: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status."""
    return run_command(lambda: run(parse(args)), joins=True)


if __name__ == "__main__":
    sys.exit(main())
