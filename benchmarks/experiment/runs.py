"""One cell of the method ranking: makes the agent, trains it, lets it answer eval, and asks the judges.

An interrupted cell continues from its checkpoints; its seconds and tokens are those of all calls.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any, Literal

from ... import agents, sandbox
from ...data.files import write_atomic
from ...errors import DataError
from ...folders import hash_model
from ...instructions import Instruction
from ...oracles.reward_model import num_positions
from ...plugins import check_unchanged, source_mark
from ...statistics import win_rate
from ..harness.runner import ProgressFn, ProgressUpdate, quiet
from ..harness.sources import data_content
from ..harness.stored import SETTINGS, ElapsedTime, check_settings, file_name, read_stored
from ..harness.study import Row
from ..methods.job import Feedback, Job
from ..methods.methods import Actor, find_method
from .evaluation import OWN_WIN_RATE, Evaluation, Judges, describe, evaluate, judges_of, subset
from .own_judge import judge_content, judge_settings

VERDICTS = ("gold", "win_rate_simulated", "win_rate_human")
"""What is measured of each answer."""
COLUMNS = ("method", "feedback", "seed", "win_rate_simulated", "win_rate_human", "gold", "length", "seconds", "tokens")
"""Columns of table.csv: one row per method, feedback and seed."""
OWN_COLUMNS = (OWN_WIN_RATE, "standard_error", "n_total")
"""And by a judge of one's own: its win rate and the standard error, in percent, over so many verdicts."""
FEEDBACKS = ("simulated", "human")
"""Whose labels a method was trained on; also the two columns of the paper's Table 2."""
ANSWERED_AT_ONCE = 161
"""Instructions of eval whose answers are stored together; draws of `act` are keyed on all of them."""
ANSWERS = {"responses": [str], "tokens": int}
Form = Literal["merged", "adapter"]
"""What is saved of a model with LoRA: a whole model, or the adapter alone."""


@dataclass(frozen=True, kw_only=True)
class MethodPlan(Job):
    """All that decides one cell; picklable, to be sent to a process."""

    method: str
    """Name, or module:attribute."""
    out: Path
    """The study's folder."""
    num_eval: int
    judge: str | None = None
    """One's own, as `own_judge` reads it."""
    save: Form = "merged"
    trackers: tuple[str, ...] = ()
    """What else is given each step's metrics."""
    folder: Path = field(init=False)
    """The cell's own within `out`, for checkpoints."""
    mark: str = field(init=False)
    """Marks the source of a method of one's own, as loaded where the plan was made."""

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "mark", source_mark(self.method))
        object.__setattr__(self, "folder", self.out / "runs" / file_name(self.cell))

    @property
    def cell(self) -> str:
        """Name of the study's cell; a method that needs no feedback has one cell for both."""
        method = find_method(self.method)
        middle = "" if method.needs == "nothing" else f"{self.labels}, "
        return f"{method.name}{self.mark}, {middle}seed {self.seed}"

    @property
    def labels(self) -> str:
        """Whose labels the method learns from: a feedback of the sandbox, or those of one's own data."""
        return self.feedback if self.dataset == "sandbox" else "own labels"

    @property
    def columns(self) -> tuple[str, ...]:
        """The feedbacks for which the cell has a row."""
        return FEEDBACKS if find_method(self.method).needs == "nothing" else (self.feedback,)

    @property
    def units(self) -> int:
        """Its weight in the progress report."""
        return find_method(self.method).effort

    @property
    def evaluation_file(self) -> Path:
        """Where answers and verdicts are kept."""
        return self.out / "evaluations" / f"{file_name(self.cell)}.json"

    @property
    def instructions(self) -> list[Instruction]:
        """Those of eval that every method answers; none where the data has no eval."""
        if "eval" not in self.data.splits:
            return []
        found = self.data.instructions("eval")
        return [found[index] for index in subset(len(found), self.num_eval)]

    def settings(self) -> dict[str, Any]:
        """What decides the cell's rows, JSON-able; data and models by their content."""
        from ...agents.settings import FREE_TO_CHANGE

        left_out = {"out", "folder", "mark", "allow_overlap", "dataset", "sft", "reward", "save", "trackers"}
        if self.has_presets_limit:
            left_out.add("max_response_tokens")  # the preset says it
        found = {each.name: getattr(self, each.name) for each in fields(self) if each.name not in left_out}
        found["changed"] = {name: value for name, value in self.changed if name not in FREE_TO_CHANGE}
        found["judge"] = judge_settings(self.judge)
        found["dataset"] = data_content(self.dataset, allow_overlap=self.allow_overlap)
        found["policy"] = hash_model(self.policy_folder)
        if self.reward is not None:
            found["reward_model"] = hash_model(self.reward_model)
        if self.judge is not None:
            found["--judge"] = judge_content(self.judge)
        return found


def run_method(plan: MethodPlan, on_progress: ProgressFn) -> list[Row]:
    """Trains and evaluates; one row of `COLUMNS`, or one per feedback for a method that needs none.

    In a world of processes all train and answer together; only the main one judges, writes and has rows.

    Raises:
        CheckpointError: The folder was made with other settings, or the method was edited after the start.
    """
    from ...agents.processes import Processes

    world = Processes()
    quiet()
    check_unchanged(plan.method, plan.mark)

    def tell(done: float, text: str = "", state: str = "") -> None:
        if world.is_main:
            on_progress(ProgressUpdate(plan.cell, done * plan.units, text, state))

    tell(0)
    settle = partial(_settle, plan, main=world.is_main)
    if world.from_main((plan.folder / SETTINGS).is_file()):
        world.together(settle)
    spent = ElapsedTime(plan.folder)
    judges = judges_of(plan.data, proxy=None, own=plan.judge) if world.is_main else Judges()
    actor = find_method(plan.method).make(plan)
    longest = longest_asked(actor, plan.instructions)
    world.together(settle)  # settings that were refused until here leave the folder to others
    learning = 0.9 if hasattr(actor, "updates") else 0.0

    def progress(done: float, state: str = "") -> None:
        if world.is_main:
            spent.keep()
        tell(done, state=state)

    tokens = train(actor, lambda share, state: progress(learning * share, state), plan.trackers)
    if learning and hasattr(actor, "save") and world.is_main:
        form = {"merged": True} if plan.save == "merged" and isinstance(actor, agents.PolicyActor) else {}
        actor.save(plan.folder / "policy", **form)
    if longest > 0:
        actor.policy.max_prompt_tokens = max(actor.policy.max_prompt_tokens, longest)  # type: ignore[attr-defined]
    files, asked = plan.folder / "answers", plan.instructions
    responses, answered = answer(
        actor, asked, files, lambda done: progress(learning + (1 - learning) * done, "answers")
    )
    if not world.is_main:
        return []
    spent.keep(now=True)
    settle()  # models and data are still what they were at the start
    costs = {"seconds": round(spent.seconds, 2), "tokens": max(tokens, _tokens(plan.folder)) + answered}
    rows = _rows(plan, evaluate(asked, responses, judges), costs)
    if learning and isinstance(actor, agents.PolicyActor):
        complete_card(plan.folder / "policy", actor, actor.policy.model, plan.dataset, rows[0])
    tell(1, f"{plan.cell}: {describe(rows[0])}")
    return rows


def complete_card(folder: Path, agent: Any, model: Any, data: str, metrics: Mapping[str, Any]) -> None:
    """Writes the model card anew, with data and metrics beside what the agent says of itself."""
    from ...agents.saving import public_name, write_card

    numbers = {name: f"{value:.4g}" for name, value in metrics.items() if isinstance(value, float) and value == value}
    write_card(folder, model.name_or_path, {**(agent.facts or {}), "data": public_name(data), "metrics": numbers})


def _settle(plan: MethodPlan, *, main: bool) -> None:
    """Makes the cell's folders, and stores its settings or compares them with those that are stored."""
    if main:
        for folder in (plan.folder / "answers", plan.evaluation_file.parent):
            folder.mkdir(parents=True, exist_ok=True)
        check_settings(plan.folder, plan.settings())


def _rows(plan: MethodPlan, found: Evaluation, costs: Row) -> list[Row]:
    """Stores the evaluation, and returns the cell's rows."""
    write_atomic(plan.evaluation_file, json.dumps(found.per_response()) + "\n")
    row = {"method": find_method(plan.method).name, "seed": plan.seed, **found.means(), **costs}
    columns: tuple[str, ...] = COLUMNS
    if plan.judge is not None:
        own = win_rate(found.scores[OWN_WIN_RATE]).row()
        columns, row = (*COLUMNS, *OWN_COLUMNS), row | {name: own[name] for name in OWN_COLUMNS}
    return [{name: {**row, "feedback": feedback}[name] for name in columns} for feedback in plan.columns]


def train(actor: Any, tell: Callable[[float, str], None], trackers: Sequence[str] = ()) -> int:
    """Does what the agent still has to learn, telling the share done and where it is; the tokens that it sampled."""
    tokens, total = 0.0, getattr(actor, "num_steps", 0)
    for metrics in tracked(actor, trackers) if hasattr(actor, "updates") else ():
        tokens += metrics.get("tokens", 0)
        tell(min(1.0, metrics["step"] / total) if total else 0.0, state_of(metrics, total))
    return int(tokens)


def tracked(agent: Any, trackers: Sequence[str]) -> Iterator[dict[str, float]]:
    """The agent's updates, reported to trackers, which end with them."""
    from ...agents.tracking import flat, reporting

    if not trackers:
        yield from agent.updates()
        return
    run = agent._run()
    settings = {**flat(asdict(run["config"])), "seed": run["seed"]}
    with reporting(None, trackers, settings, run["out"], run["processes"]) as report:
        for metrics in agent.updates():
            report(metrics)
            yield metrics


def state_of(metrics: Mapping[str, float], total: int) -> str:
    """A step's number and its main metrics, as shown beside a progress bar."""
    from ...agents.tracking import SHOWN

    shown = (f"{name}={metrics[name]:.4g}" for name in SHOWN if name in metrics)
    return ", ".join([f"step {metrics['step']:.0f}" + (f"/{total}" if total else ""), *shown])


def longest_asked(actor: Actor, instructions: Sequence[Instruction]) -> int:
    """Tokens of the longest prompt to answer, which training may have left out; 0 for an actor without a policy.

    Raises:
        DataError: A prompt and a response do not fit the policy's positions.
    """
    policy: Any = getattr(actor, "policy", None)
    if not hasattr(policy, "max_response_tokens"):
        return 0
    from ...agents.prompts import prompt_lengths
    from ...agents.special_tokens import own_control_token

    width = policy.max_response_tokens + (own_control_token(policy.model) is not None)
    room = num_positions(policy.model.config) - width
    lengths = prompt_lengths(policy.tokenizer, policy.template, instructions)
    if too_long := [length for length in lengths if length > room]:
        raise DataError(
            f"{len(too_long)} of {len(lengths)} prompts of eval do not fit the policy with a response of {width} "
            f"tokens: the longest has {max(too_long)}, and there is room for {room:g}. Leave them out of the data (a "
            "prompt is never cut)."
        )
    return max(lengths, default=0)


def answer(
    actor: Actor, instructions: Sequence[Instruction], folder: Path, tell_share: Callable[[float], None]
) -> tuple[tuple[str, ...], int]:
    """One response per instruction and the tokens sampled for all; answers stored by an earlier call are kept.

    Processes of a world share the missing files; a response does not depend on which one gives it. Best-of-n has its
    own number of instructions to a file: 161 times 1024 samples of a large model would take hours.
    """
    from ...agents.processes import Processes

    world, size = Processes(), getattr(actor, "instructions_at_once", ANSWERED_AT_ONCE)
    starts = range(0, len(instructions), size)
    blocks = {folder / f"{first:06}-{size}.json": instructions[first : first + size] for first in starts}
    missing = world.from_main([file for file in blocks if not file.is_file()])
    joined = partial(actor.joined, world) if hasattr(actor, "joined") else nullcontext
    for first in range(0, len(missing), world.count):
        files = missing[first : first + world.count]
        done = world.spread(files, lambda file: respond(actor, blocks[file]), within=joined)
        for file, block in zip(files, done, strict=True):
            if world.is_main:
                write_atomic(file, json.dumps(block))
        left = sum(len(blocks[file]) for file in missing[first + world.count :])
        tell_share(1 - left / len(instructions))
    stored = world.from_main([read_stored(file, *ANSWERS, shape=ANSWERS) for file in blocks if world.is_main])
    responses = tuple(response for block in stored for response in block["responses"])
    return responses, sum(block["tokens"] for block in stored)


def respond(actor: Actor, instructions: Sequence[Instruction]) -> dict[str, Any]:
    """The responses to some instructions, and the tokens sampled for them."""
    before = getattr(actor, "num_tokens", 0)
    found = list(actor.act(instructions))
    if len(found) != len(instructions):
        raise ValueError(
            f"{type(actor).__name__}.act: expected a response to each of {len(instructions)} instructions, got "
            f"{len(found)} responses"
        )
    return {"responses": found, "tokens": getattr(actor, "num_tokens", 0) - before}


@dataclass(frozen=True)
class RewardPlan:
    """The reward model of one feedback and seed."""

    feedback: Feedback
    seed: int
    out: Path
    quick: bool

    units = 70

    @property
    def cell(self) -> str:
        """Name of the study's cell."""
        return f"reward model, {self.feedback}, seed {self.seed}"

    @property
    def folder(self) -> Path:
        """Where the reward model is: the shipped one for simulated feedback in a quick study."""
        if self.quick and self.feedback == "simulated":
            return sandbox.REWARD_MODEL
        name = f"{self.feedback}-seed-{self.seed}" + ("-quick" if self.quick else "")
        return self.out / "reward_models" / name


def run_reward_model(plan: RewardPlan, on_progress: ProgressFn) -> list[Row]:
    """Trains the reward model on this feedback's labels of the 10k pairs; a row about it."""
    from ...agents import RewardModelingConfig
    from ...agents.processes import Processes
    from .reward_models import LAST_FILE, fit

    quiet()
    folder = plan.out / "runs" / file_name(plan.cell)
    job = Job(seed=plan.seed, folder=folder, feedback=plan.feedback, quick=plan.quick)
    folder.mkdir(parents=True, exist_ok=True)
    spent, main = ElapsedTime(folder), Processes().is_main

    def progress(share: float, text: str = "") -> None:
        if main:
            spent.keep()
            on_progress(ProgressUpdate(plan.cell, share * plan.units, text))

    progress(0)
    if plan.folder != sandbox.REWARD_MODEL and not (plan.folder / LAST_FILE).is_file():
        instructions, config = job.data.instructions("val"), RewardModelingConfig.sandbox()
        options: dict[str, Any] = {"config": config, "seed": plan.seed, "out": folder, "on_progress": progress}
        fit(sandbox.POLICY, job.preferences(), plan.folder, val=instructions, **options)
    progress(1, f"{plan.cell}: {spent.seconds:.0f} s")
    return [{"feedback": plan.feedback, "seed": plan.seed, "seconds": round(spent.seconds, 2)}]


def _tokens(folder: Path) -> int:
    """What a run has sampled by its metrics.jsonl, in all calls."""
    lines = [line for file in folder.rglob("metrics.jsonl") for line in file.read_text(encoding="utf-8").splitlines()]
    return int(sum(json.loads(line).get("tokens") or 0 for line in lines))
