"""The engine: an experiment's agent is trained, evaluated at places, judged, and its rows are stored.

    rows = run(Experiment(cell="seed 0", agent="ppo", out=folder, seed=0, reward="sandbox", places=(0, 5, 10)))

Of an agent, reward, data and seed (a `Job`) it makes rows, one for each place and split. A place is a step, a round of
expert iteration, or the end of training. Each evaluation is a file of the run's folder and agents keep checkpoints, so
an interrupted run continues where it stopped, with the same numbers. The processes of a world (torchrun) train and
answer together; the main one judges, writes and has the rows.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, Literal

from ... import agents
from ...data.files import write_atomic
from ...errors import DataError
from ...folders import hash_model
from ...instructions import Instruction
from ...oracles.base import RewardOracle
from ...plugins import check_unchanged, source_mark
from ..harness.runner import ProgressFn, ProgressUpdate, quiet
from ..harness.sources import data_content
from ..harness.stored import SETTINGS, ElapsedTime, cell_file, check_settings, file_name, read_stored
from ..harness.study import Row
from ..methods.job import Job
from ..methods.methods import REWARD_MODELING, Method, find_method, hold_out
from .evaluation import OWN_WIN_RATE, Judges, answer, describe, evaluate, judges_of, longest_prompt, room_for, subset
from .own_judge import has_references, judge_content, judge_settings

COLUMNS = ("method", "feedback", "seed", "win_rate_simulated", "win_rate_human", "gold", "length", "seconds", "tokens")
"""Columns of a table of runs that are evaluated once, at their end."""
Form = Literal["merged", "adapter"]
"""The form in which a model with LoRA is saved: a whole model, or the adapter alone."""
TRAINING = 0.9
"""Share of a run's time that training takes, roughly; answers take the rest."""


@dataclass(frozen=True)
class Sampling:
    """How a policy is asked at a place: common random numbers of a seed, so that places differ by the policy alone."""

    temperature: float
    kl: Literal["kl", "kl_exact"] = "kl"
    """Which estimate of KL(policy || SFT) is measured: see `agents.evaluation`."""


@dataclass(frozen=True, kw_only=True)
class Experiment(Job):
    """All that decides one run; picklable, as a cell is sent to a process or another machine."""

    agent: str
    """Name of a method, or module:attribute of one's own."""
    out: Path
    """The study's folder."""
    cell: str
    """Its name in the study."""
    splits: tuple[tuple[str, int], ...] = (("eval", 805),)
    """Each with the number of its instructions to answer, spread evenly."""
    places: tuple[int, ...] = ()
    """Steps (rounds of expert iteration) after which the policy is evaluated, ascending; training ends at the last.
    Empty: once, at the end of training."""
    sampling: Sampling | None = None
    """None: the agent answers as it does by itself (`act`)."""
    judge: str | None = None
    """One's own, as `own_judge` reads it."""
    measures_reward: bool = False
    """Whether the reward it learns from is measured too, as the proxy."""
    required: tuple[str, ...] = ()
    """Measures of which every row needs a finite mean."""
    save: Form | None = None
    """The form in which a trained policy is saved: a whole model, or a LoRA adapter alone; None: nothing."""
    trackers: tuple[str, ...] = ()
    """Trackers that are given each step's metrics."""
    alone: bool = False
    """Whether no other cell runs meanwhile, so that it takes as many threads as torch does by itself."""
    folder: Path = field(init=False)
    """The cell's own within `out`, for checkpoints and evaluations."""
    mark: str = field(init=False)
    """Marks the source of a method of one's own, as loaded where the experiment was made."""

    NOT_DECIDING: ClassVar[frozenset[str]] = frozenset(
        ("out", "folder", "cell", "mark", "allow_overlap", "dataset", "sft", "reward", "save", "required", "trackers")
    ) | {"alone"}

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "mark", source_mark(self.source))
        object.__setattr__(self, "folder", self.out / "runs" / file_name(self.cell))

    @property
    def source(self) -> str:
        """The part that may be of one's own, as module:attribute."""
        return self.agent

    def check_source(self) -> None:
        """Raises CheckpointError if what is of one's own was edited after the study began."""
        check_unchanged(self.source, self.mark)

    @property
    def method(self) -> Method:
        """The method that `agent` names."""
        return find_method(self.agent)

    @property
    def saved(self) -> Path:
        """Folder of the trained model."""
        return self.out / "reward_model" if self.agent == REWARD_MODELING else self.folder / "policy"

    @property
    def units(self) -> int:
        """Its weight in the progress report: seconds on one core, roughly."""
        return self.method.effort

    @property
    def facts(self) -> Row:
        """Columns that tell the rows of a study's runs apart."""
        return {"method": self.method.name, "feedback": self.feedback, "seed": self.seed}

    def evaluation_file(self, place: int | None = None) -> Path:
        """Where answers and verdicts at a place are kept; None is the end of training."""
        return self.folder / "evaluations" / ("end.json" if place is None else f"step-{place:05}.json")

    def instructions(self, split: str) -> list[Instruction]:
        """Those that are answered; none where the data has no such split."""
        if split not in self.data.splits:
            return []
        rows = self.data.instructions(split)
        return [rows[index] for index in subset(len(rows), dict(self.splits)[split])]

    def proxy(self) -> RewardOracle | None:
        """The reward that it learns from, where it is measured."""
        return self.oracle() if self.measures_reward else None

    def settings(self) -> dict[str, Any]:
        """All that decides the rows, JSON-able; data and models by their content."""
        from ...agents.settings import FREE_TO_CHANGE

        left_out = self.NOT_DECIDING | ({"max_response_tokens"} if self.has_presets_limit else set())
        values = {each.name: getattr(self, each.name) for each in fields(self) if each.name not in left_out}
        values["changed"] = {name: value for name, value in self.changed if name not in FREE_TO_CHANGE}
        values["sampling"] = self.sampling and vars(self.sampling)
        values["judge"] = judge_settings(self.judge)
        values["dataset"] = data_content(self.dataset, allow_overlap=self.allow_overlap)
        values["policy"] = hash_model(self.policy_folder)
        if self.reward is not None:
            values["reward_model"] = hash_model(self.reward_model)
        if self.judge is not None:
            values["--judge"] = judge_content(self.judge)
        return values


def cell_of(agent: str, labels: str, seed: int) -> str:
    """Name of a method's cell; one that needs no feedback has a single cell for all labels."""
    method = find_method(agent)
    middle = "" if method.needs == "nothing" else f"{labels}, "
    return f"{method.name}{source_mark(agent)}, {middle}seed {seed}"


def run(experiment: Experiment, on_progress: ProgressFn) -> list[Row]:
    """Trains and evaluates; a row for each place and split, with `Experiment.facts`, all means, seconds and tokens.

    Raises:
        CheckpointError: The folder was made with other settings, or the method was edited after the start.
        DataError: A prompt does not fit the policy, or a required measure has no value.
    """
    quiet(alone=experiment.alone)
    experiment.check_source()
    return _Run(experiment, on_progress).rows()


class _Run:
    def __init__(self, experiment: Experiment, on_progress: ProgressFn) -> None:
        from ...agents.processes import Processes

        self.plan, self.world, self.on_progress = experiment, Processes(), on_progress
        self.instructions = {split: experiment.instructions(split) for split, _ in experiment.splits}
        self.report(0)
        settled = self.world.from_main((experiment.folder / SETTINGS).is_file())
        if settled:
            self.world.together(self.settle)
        self.spent = ElapsedTime(experiment.folder)
        judges = partial(judges_of, experiment.data, proxy=experiment.proxy(), own=experiment.judge)
        self.judges: Judges = judges() if self.world.is_main else {}
        self.actor: Any = experiment.method.make(experiment)
        self.longest = longest_prompt(self.actor, list(chain.from_iterable(self.instructions.values())))
        self.world.together(self.settle)  # settings that were refused until here leave the folder to others

    def settle(self) -> None:
        """Makes the folder, and stores the settings or compares them with those that are stored."""
        if self.world.is_main:
            self.plan.folder.mkdir(parents=True, exist_ok=True)
            check_settings(self.plan.folder, self.plan.settings())

    def report(self, share: float, text: str = "", state: str = "") -> None:
        if self.world.is_main:
            if share:
                self.spent.keep()
            self.on_progress(ProgressUpdate(self.plan.cell, share * self.plan.units, text, state))

    def rows(self) -> list[Row]:
        plan, learns = self.plan, hasattr(self.actor, "updates")
        sampled = self.train() if learns else 0
        ours = isinstance(self.actor, agents.PolicyActor | agents.RewardModeling)
        if learns and plan.save and hasattr(self.actor, "save") and self.world.is_main:
            self.actor.save(plan.saved, **({"merged": True} if plan.save == "merged" and ours else {}))
        tested = self.test() if isinstance(self.actor, agents.RewardModeling) else None
        answered = 0 if plan.places or tested else self.evaluate(None)
        if not self.world.is_main:
            return []
        self.spent.keep(now=True)
        self.settle()  # models and data are still what they were at the start
        costs = {"seconds": round(self.spent.seconds, 2), "tokens": max(sampled, _tokens(plan.folder)) + answered}
        places = () if tested else plan.places or (None,)
        measured = [row for place in places for row in read_evaluation(plan, place)["rows"]]
        rows = [{**plan.facts, **row, **costs} for row in ([tested] if tested else measured)]
        if plan.saved.is_dir() and ours:
            complete_card(plan, self.actor, rows[0])
        return rows

    def test(self) -> Row:
        """How a reward model predicts the pairs that were held out: accuracy, loss (nats) and margin."""
        kept, held_out = hold_out(self.plan.preferences())
        counts = {"num_train": len(kept) - self.actor.num_left_out, "num_test": len(held_out)}
        return {**counts, **self.actor.evaluate(held_out)}

    def train(self) -> int:
        """Does what the agent still has to learn, evaluating on the way; the tokens that it sampled."""
        actor = self.actor
        last, tokens = self.plan.places[-1] if self.plan.places else math.inf, 0.0
        total = last if self.plan.places else getattr(actor, "num_steps", 0)
        # A checkpoint is written before its place is evaluated: of a resumed run the evaluation of where it is may be
        # missing, but none before it.
        self.visit()
        if place_of(actor) < last:
            for metrics in tracked(actor, self.plan.trackers):
                tokens += metrics.get("tokens", 0)
                done = place_of(actor) if self.plan.places else metrics["step"]
                self.report(TRAINING * min(1.0, done / total) if total else 0, state=state_of(metrics, total))
                self.visit()
                if place_of(actor) >= last:
                    break
            self.visit()  # a round of expert iteration is complete after its last step only
        return int(tokens)

    def visit(self) -> None:
        """Evaluates the policy where it is, if that is due and not done."""
        place = place_of(self.actor) if self.plan.places else None
        if self.world.from_main(place in self.plan.places and not self.plan.evaluation_file(place).exists()):
            self.evaluate(place)

    def evaluate(self, place: int | None) -> int:
        """Answers, judges and stores; the tokens that were sampled."""
        rows, parts, tokens = [], {}, 0
        for split, instructions in self.instructions.items():
            with room_for(self.actor, self.longest):
                sampling = self.plan.sampling
                answers = self.act(instructions) if sampling is None else self.sample(split, instructions, sampling)
            responses, values, sampled = answers
            tokens += sampled
            if self.world.is_main:
                left_out = () if instructions and has_references(self.plan.data, split) else (OWN_WIN_RATE,)
                judges = {name: oracle for name, oracle in self.judges.items() if name not in left_out}
                result = evaluate(instructions, responses, judges, values)
                rows.append(checked(self.plan, {"split": split, "step": place, **result.means()}))
                parts[split] = result.per_response()
        if self.world.is_main:
            write_evaluation(self.plan, place, rows, parts)
            where = "" if place is None else f", step {place} of {self.plan.places[-1]}"
            share = TRAINING * place / self.plan.places[-1] if place else float(place is None)
            self.report(share, f"{self.plan.cell}{where}: {describe(rows[-1])}")
        return tokens

    def sample(
        self, split: str, instructions: Sequence[Instruction], sampling: Sampling
    ) -> tuple[Sequence[str], dict[str, Any], int]:
        """Responses at the plan's temperature with whether they ended and their KL; each process gives its share."""
        import numpy as np

        from ...agents import evaluation
        from ...agents.processes import Processes

        actor, world = self.actor, Processes(self.actor.policy.device)
        mine = slice(world.rank, None, world.count)
        rollouts = evaluation.answer(
            actor.policy,
            instructions,
            seed=self.plan.seed,
            split=split,
            temperature=sampling.temperature,
            batch_size=getattr(actor.config, "sampling_batch_size", None),
            rows=mine,
        )
        measure = {"kl": evaluation.sequence_kl, "kl_exact": evaluation.exact_response_kl}[sampling.kl]
        with actor.whole() if world.count > 1 else nullcontext():  # processes have other numbers of passes
            kl = np.asarray(measure(actor.policy, rollouts, sampling.temperature))
        own = zip(range(len(instructions))[mine], rollouts.texts, rollouts.finished.tolist(), kl.tolist(), strict=True)
        texts, finished, kls = list(zip(*sorted(chain.from_iterable(world.gather(list(own)))), strict=True))[1:]
        return texts, {"finished": finished, sampling.kl: np.array(kls, dtype=kl.dtype)}, 0

    def act(self, instructions: Sequence[Instruction]) -> tuple[Sequence[str], dict[str, Any], int]:
        """The agent's own answers."""
        share = TRAINING if hasattr(self.actor, "updates") else 0.0

        def tell(done: float) -> None:
            self.report(share + (1 - share) * done, state="answers")

        responses, tokens = answer(self.actor, instructions, self.plan.folder / "answers", tell)
        return responses, {}, tokens


def place_of(agent: Any) -> int:
    """How far an agent is: completed rounds of expert iteration, steps of the others."""
    return int(agent.num_rounds_done if isinstance(agent, agents.ExpertIteration) else getattr(agent, "step", 0))


def state_of(metrics: Mapping[str, float], total: float) -> str:
    """A step's number and its main metrics, as shown beside a progress bar."""
    from ...agents.tracking import SHOWN

    shown = (f"{name}={metrics[name]:.4g}" for name in SHOWN if name in metrics)
    return ", ".join([f"step {metrics['step']:.0f}" + (f"/{total}" if total else ""), *shown])


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


def checked(experiment: Experiment, row: Row) -> Row:
    """The row; a cell without a measure that its study needs fails, and not the page of all others (DataError)."""
    for name in experiment.required:
        if not math.isfinite(row[name]):
            where = f"{experiment.cell}, place {row['step']}"
            raise DataError(f"{where}: expected a {name} of one response at least, got none.")
    return row


def write_evaluation(
    experiment: Experiment, place: int | None, rows: Sequence[Row], splits: Mapping[str, Mapping[str, Any]]
) -> None:
    """Stores an evaluation: a row a split, and of each split instructions, responses and their values."""
    content = {"rows": list(rows), "splits": dict(splits)}
    experiment.evaluation_file(place).parent.mkdir(parents=True, exist_ok=True)
    write_atomic(experiment.evaluation_file(place), json.dumps(content) + "\n")


def read_evaluation(experiment: Experiment, place: int | None = None) -> dict[str, Any]:
    """The content that `write_evaluation` stored; CheckpointError where it is gone or damaged."""
    cell = cell_file(experiment.out, experiment.cell)
    remedy = f"To run it anew remove {experiment.folder} and, if it is there, {cell}, and call again."
    part = {"instructions": list, "responses": list}
    shape = {"rows": [{"split": str, "length": object}], "splits": {split: part for split, _ in experiment.splits}}
    return read_stored(experiment.evaluation_file(place), *shape, shape=shape, remedy=remedy)


def complete_card(experiment: Experiment, agent: Any, metrics: Mapping[str, Any]) -> None:
    """Writes the model card anew, with data and metrics beside what the agent says of itself."""
    from ...agents.saving import public_name, write_card

    numbers = {name: f"{value:.4g}" for name, value in metrics.items() if isinstance(value, float) and value == value}
    model = agent.policy.model if isinstance(agent, agents.PolicyActor) else agent.model
    facts = {**(agent.facts or {}), "data": public_name(experiment.dataset), "metrics": numbers}
    write_card(experiment.saved, model.name_or_path, facts)


def _tokens(folder: Path) -> int:
    """Tokens that a run has sampled by its metrics.jsonl, in all calls."""
    lines = [line for file in folder.rglob("metrics.jsonl") for line in file.read_text(encoding="utf-8").splitlines()]
    return int(sum(json.loads(line).get("tokens") or 0 for line in lines))
