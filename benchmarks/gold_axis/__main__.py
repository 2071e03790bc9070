"""The study of methods on one gold axis: which of them gains most gold, and which loses it?

    python -m alpacafarm_env.benchmarks.gold_axis [--quick] [--seeds N] [--methods ...] [--processes N]

PPO, GRPO and its kin, online DPO, DPO, KTO, Quark, expert iteration and best-of-n learn from equal labels by judges
that agree with gold on equally many pairs: gold itself, gold with flips, and gold with a taste for length. All that
sample draw as many responses. Gold, the proxy and both win rates are measured along the way, against KL. What was
predicted before the first run is `analysis.PREDICTED`.

Sources: Gao, Schulman and Hilton 2022 (arXiv 2210.10760); Dubois et al. 2023, AlpacaFarm (arXiv 2305.14387).
"""

import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Annotated, Any, ClassVar

import tyro
from pydantic import Field

from ...arguments import match_name
from ...cli.options import Count
from ..experiment.faults import CLEAN
from ..experiment.fresh import draw_pairs
from ..harness.page import publish
from ..harness.runner import Cell, run_cells
from ..harness.sources import sandbox_sources
from ..harness.study import Row, Study, StudyOptions, run_command, write_csv
from .analysis import claims, curve_rows, method_rows, tracks_of
from .page import page
from .runs import LABELLINGS, METHODS, AxisPlan, AxisSizes

NAME = "gold_axis"
QUICK = ("best_of_n", "ppo", "grpo", "dpo")
"""Methods of --quick."""


@dataclass(frozen=True)
class AxisOptions(StudyOptions):
    """Options of the study of methods. With --quick there are 2 seeds, four methods and small sizes."""

    name: ClassVar[str] = NAME
    no_data: ClassVar[str] = "only the sandbox knows the true reward."
    quick_defaults: ClassVar[Mapping[str, Any]] = {"seeds": 2, "methods": QUICK}

    seeds: Count = 10
    """Number of repeats, each with pairs, labels, samples, reward models and policies of its own."""
    methods: Annotated[tuple[str, ...], Field(min_length=1)] = tuple(METHODS)
    """Which methods; PPO is what the others are compared with. A later call in the same folder may name others."""
    processes: Count = 2
    """Cells at a time, each in a process with one torch thread."""
    sizes: Annotated[AxisSizes | None, tyro.conf.Suppress] = None
    """Other sizes, for tests."""


def run(options: AxisOptions) -> int:
    """Runs the study, writes its folder, prints the summary and returns the exit status."""
    options.refuse_taken(NAME)
    named = {match_name("method", name, METHODS) for name in options.methods}
    sizes = options.sizes or (AxisSizes.quick() if options.quick else AxisSizes())
    out = options.folder(NAME)
    # Seed by seed, so that a part of the study is a smaller one.
    plans = [AxisPlan(out, seed, sizes, kind) for seed in range(options.seeds) for kind in LABELLINGS]
    runs = [plan.run(method) for plan in plans for method in METHODS if method in named - {"best_of_n"}]
    first = [plan for plan in plans if plan.kind == CLEAN]
    parts = {
        "pairs": [Cell(plan.pairs_cell, partial(draw_pairs, plan), plan.units) for plan in first],
        "samples": [Cell(plan.samples.cell, plan.samples.draw, plan.samples.units) for plan in first],
        "reward models, best-of-n": [
            Cell(plan.cell(plan.setting), partial(AxisPlan.best_of_n, plan), plan.units) for plan in plans
        ],
        "methods": [Cell(each.cell, each.rows, each.units) for each in runs],
    }
    with options.study(NAME, {"sizes": asdict(sizes)}, sources=sandbox_sources()) as study:
        study.plan([cell.key for cells in parts.values() for cell in cells])
        rows: list[Row] = []
        for part, cells in parts.items():
            print(f"{NAME} into {study.out}: {part} ({len(cells)} cells)", file=sys.stderr)
            rows = [*rows, *run_cells(study, cells, processes=options.processes)]
            if study.failed:
                return study.exit_status
        write_results(study, [row for row in rows if row.get("method") in named])
        return study.finish()


def write_results(study: Study, rows: list[Row]) -> None:
    """The tables and the page."""
    tracks = tracks_of(rows)
    study.write_table(method_rows(tracks))
    write_csv(study.out / "curves.csv", curve_rows(tracks))
    write_csv(study.out / "claims.csv", claims(tracks))
    study.note(level="sandbox")
    publish(study, page(study.out))


def main() -> int:
    """Runs the command and returns its exit status."""
    return run_command(lambda: run(AxisOptions.parse()))


if __name__ == "__main__":
    sys.exit(main())
