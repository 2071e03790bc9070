"""A real policy against reward models of noisy labels: best-of-n to n = 1,024, PPO and DPO, with two golds.

    python -m alpacafarm_env.benchmarks.real_policy --data FOLDER --policy FOLDER [--quick] [--parts PART ...]

The policy answers instructions of a folder of recorded judgements. Two golds are learned from the recorded verdicts on
other instructions; proxies are learned from few of a gold's labels, of which a share is flipped, and choose among the
policy's samples. The parts, each of which needs those before it:

    answers  the policy's samples, texts that stay in the study's folder (hours)
    states   its hidden states on them and on the recorded texts, for gold B (hours)
    golds    both golds' scores of all samples (minutes)
    curves   best-of-n by linear models and trees, of own and of recorded pairs (minutes each)
    lora     the same by the policy itself as a reward model, one number of labels
    ppo, grpo, rloo   the policy trained by LoRA against a noisy and a clean proxy (hours)
    dpo      the same on the proxies' labels (hours)
    texts    the answers that a proxy and a gold like best

Each is resumed where it was stopped, within a cell too. The page is made of what there is, and says what is not;
--parts page makes it alone.

Source of the setting: Gao, Schulman and Hilton 2022 (arXiv 2210.10760).
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from typing import Annotated, Any, ClassVar, Final, Literal, get_args

import tyro

from ...cli.options import Count
from ...data.load import recorded_dataset
from ...errors import DataError
from ...folders import check_model, hash_model
from ..harness.page import publish
from ..harness.runner import Cell, run_cells
from ..harness.sources import data_content
from ..harness.study import Row, Study, StudyOptions, run_command, write_csv
from ..surrogates.features import scikit_learn
from .curves import KINDS, SOURCES, curve_cell
from .golds import GOLDS, score_samples, state_models
from .page import TABLES, page
from .plan import Plan, Sizes, timed, world_of
from .sampling import draw_answers, read_recorded_states, read_states
from .texts import text_cell
from .training import lora_cell, runs_of, train_policy

NAME: Final = "real_policy"
Part = Literal["answers", "states", "golds", "curves", "lora", "ppo", "grpo", "rloo", "dpo", "texts", "page"]
PARTS: Final[tuple[Part, ...]] = get_args(Part)
AGENTS: Final[tuple[Part, ...]] = ("ppo", "grpo", "rloo", "dpo")
NEEDS: Final[Mapping[Part, tuple[Part, ...]]] = {
    "states": ("answers",),
    "golds": ("answers", "states"),
    **dict.fromkeys(("curves", "lora", *AGENTS, "texts"), ("golds",)),
}


@dataclass(frozen=True)
class RealPolicyOptions(StudyOptions):
    """Options of the study of a real policy. With --quick there are few instructions, samples and steps."""

    name: ClassVar[str] = NAME
    quick_defaults: ClassVar[Mapping[str, Any]] = {"seeds": 1, "state_models": 4}

    seeds: Count = 3
    """Number of runs of each method that trains the policy, by each share of flips: seeds 0 .. N-1."""
    policy: str = ""
    """The policy: a folder or hub name of a language model with a prompt template."""
    parts: tuple[Part, ...] = PARTS
    """What is done in this call."""
    upto: Count = 1024
    """Most samples of an instruction: 64 and 256 are smaller studies, whose cells are of use to larger ones."""
    tiers: tuple[tuple[int, int], ...] | None = None
    """Samples, and how many instructions have them or more, in pairs: 64 80 256 24. Default: the full study's."""
    state_models: Count | None = None
    """Recorded models whose texts the policy reads for gold B. Default: all."""
    precision: Literal["float32", "bfloat16"] = "bfloat16"
    """What matrices are multiplied in: where bfloat16 is slow, take float32. Not measured, so that all cells agree."""
    processes: Count = 2
    """Cells at a time, each in a process with one torch thread."""
    sizes: Annotated[Sizes | None, tyro.conf.Suppress] = None
    """Other sizes, for tests."""

    @property
    def plan(self) -> Plan:
        """The plan that the options ask for."""
        sizes = self.sizes or (Sizes.quick() if self.quick else Sizes())
        sizes = sizes if self.tiers is None else replace(sizes, tiers=self.tiers)
        upto = max((samples for samples, _ in sizes.tiers if samples <= self.upto), default=sizes.tiers[0][0])
        out = self.folder(NAME)
        given: dict[str, Any] = {name: getattr(self, name) for name in ("data", "state_models", "precision")}
        return Plan(out, policy=self.policy, sizes=sizes, upto=upto, **given)


def cells_of(plan: Plan, seeds: int) -> dict[Part, list[Cell]]:
    """The cells of each part."""
    upto = f"to {plan.upto} samples"

    def cell(part: Part, key: str, work: Any, *arguments: Any, weight: int = 1) -> Cell:
        return Cell(key, partial(timed, part, plan.out, key, partial(work, *arguments)), weight)

    def keyed(part: Part, key: str, work: Any, *arguments: Any, weight: int = 1) -> Cell:
        return cell(part, key, work, plan, key, *arguments, weight=weight)

    chunks = [(f"{blocks[0][0]:02}-{blocks[0][1]:04}", blocks) for blocks in plan.chunks()]
    reads = [keyed("states", f"states {x}", read_states, blocks, weight=len(blocks) // 2) for x, blocks in chunks]
    models = [None, *state_models(plan, len(world_of(plan).judged.models))]
    reads += [keyed("states", f"states of recorded {m}", read_recorded_states, m, weight=4) for m in models]
    shape = product(KINDS, GOLDS, SOURCES, plan.sizes.labels)
    flips = plan.sizes.flips[1::-1]
    cells: dict[Part, list[Cell]] = {
        "answers": [keyed("answers", f"answers {x}", draw_answers, each, weight=len(each)) for x, each in chunks],
        "states": reads,
        "golds": [keyed("golds", f"gold {gold}, {upto}", score_samples, gold) for gold in GOLDS],
        "curves": [
            keyed(
                "curves", f"curves, gold {g}, {source}, {kind}, {num} labels, {upto}", curve_cell, g, source, kind, num
            )
            for kind, g, source, num in shape
        ],
        "lora": [keyed("lora", f"lora, {100 * flip:g} % flips, {upto}", lora_cell, flip, weight=40) for flip in flips],
        "texts": [keyed("texts", f"texts, {upto}", text_cell)],
    }
    for agent in AGENTS:
        runs = runs_of(plan, agent, seeds)
        cells[agent] = [cell(agent, run.cell, train_policy, run, weight=run.units) for run in runs]
    return {part: cells[part] for part in PARTS if part in cells}


def run(options: RealPolicyOptions) -> int:
    """Runs the chosen parts, writes the page of what there is, and returns the exit status."""
    options.refuse_taken(NAME)
    if not options.policy:
        raise DataError("--policy: expected a folder or hub name of a language model, got none.")
    check_model(options.policy)
    dataset = recorded_dataset(options.data)
    scikit_learn()
    options = replace(options, data=str(dataset.path))
    plan = options.plan
    cells = cells_of(plan, options.seeds)
    sources = {"--data": partial(data_content, str(dataset.path)), "--policy": partial(hash_model, plan.policy)}
    config = {"sizes": asdict(plan.sizes), "state_models": plan.state_models, "precision": plan.precision}
    with options.study(NAME, config, sources=sources) as study:
        study.plan([cell.key for each in cells.values() for cell in each])
        for part in (part for part in PARTS if part in options.parts and part in cells):
            refuse_early(study, part, cells)
            print(f"{NAME} into {study.out}: {part} ({len(cells[part])} cells)", file=sys.stderr)
            run_cells(study, cells[part], processes=options.processes)
            if study.failed:
                break
        done = set(study.done)
        num = {part: sum(cell.key in done for cell in each) for part, each in cells.items()}
        counts = {part: f"{num[part]} of {len(each)}" for part, each in cells.items() if num[part] < len(each)}
        write_results(
            study,
            [row for each in cells.values() for cell in each if cell.key in done for row in study.rows(cell.key)],
            counts,
        )
        if study.failed or counts:
            study.write_manifest()
            return int(bool(study.failed))
        return study.finish()


def refuse_early(study: Study, part: Part, cells: Mapping[Part, Sequence[Cell]]) -> None:
    """Refuses a part before those that it needs are done; DataError."""
    done = set(study.done)
    for needed in NEEDS.get(part, ()):
        if missing := sum(cell.key not in done for cell in cells[needed]):
            text = f"expected {needed} before it, which lacks {missing} of {len(cells[needed])} cells"
            raise DataError(f"--parts {part}: {text}. Add it to --parts.")


def write_results(study: Study, rows: Sequence[Row], missing: Mapping[Part, str]) -> None:
    """The tables, a file each, and the page."""
    for name, columns in TABLES.items():
        chosen = [{column: row.get(column) for column in columns} for row in rows if row["table"] == name]
        if name == "curves":
            study.write_table(chosen, columns)
        else:
            write_csv(study.out / f"{name}.csv", chosen, columns)
    study.note(level="recorded and live", missing=dict(missing))
    publish(study, page(study.out))


def main() -> int:
    """Runs the command and returns its exit status."""
    return run_command(lambda: run(RealPolicyOptions.parse()))


if __name__ == "__main__":
    sys.exit(main())
