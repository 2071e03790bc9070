"""Best-of-n of the over-optimization study: one set of samples a seed, from which every treatment chooses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from ... import agents
from ...oracles.base import judge
from ...oracles.ensemble import DISAGREEMENT
from ..experiment.engine import checked, read_evaluation, write_evaluation
from ..experiment.evaluation import WIN_RATES, Evaluation
from ..experiment.samples import JUDGED
from ..experiment.treated import TreatmentRun
from ..harness.runner import ProgressFn, ProgressUpdate, quiet
from ..harness.stored import check_settings
from ..harness.study import Row
from .analysis import MEASURES


def run_best_of_n(plan: TreatmentRun, on_progress: ProgressFn) -> list[Row]:
    """Asks the treatment's reward about all samples of its seed; rows for n = 1, 2, 4 ... and the largest.

    Stored with each row is what is chosen of the first n samples.
    """
    quiet()
    plan.check_source()
    plan.folder.mkdir(parents=True, exist_ok=True)
    check_settings(plan.folder, plan.settings())
    on_progress(ProgressUpdate(plan.cell, 0))
    drawn = plan.samples.read()
    texts = drawn.responses.text
    verdicts = judge(plan.proxy(), drawn.prompts, list(texts))
    spread = verdicts.details.get(DISAGREEMENT, np.full(len(texts), np.nan))
    measures = drawn.responses[[*JUDGED, "length"]].assign(**{"proxy": verdicts.scores, DISAGREEMENT: spread})
    for row in best_rows(plan, drawn.index, measures):
        best = choose(drawn.index[:, : row["step"]], verdicts.scores)
        values = {str(name): measures[name].to_numpy()[best] for name in measures}
        chosen = Evaluation(tuple(drawn.instructions), tuple(texts.iloc[best]), values)
        write_evaluation(plan, row["step"], [checked(plan, row)], {"eval": chosen.per_response()})
    rows = [{**plan.facts, **read_evaluation(plan, n)["rows"][0]} for n in plan.places]
    on_progress(ProgressUpdate(plan.cell, plan.units, f"{plan.cell}: gold {rows[-1]['gold']:.2f}"))
    return rows


def best_rows(plan: TreatmentRun, index: NDArray[np.int64], measures: pd.DataFrame) -> list[Row]:
    """A row for each n, from the measures [D] of the distinct responses, and which of them each sample [P, N] is.

    Each is the mean over instructions of the unbiased estimator from all samples that the reward has a verdict on
    (`best_of_k`; an instruction with fewer than n of them counts with its best of the largest n that it reaches); the
    KL is the upper bound log n - (n - 1) / n.
    """
    ns, proxies = plan.places, measures["proxy"].to_numpy()[index]
    # Every n is a mean over the same instructions: one with fewer scored samples stays at the largest n it reaches.
    last = np.searchsorted(ns, (~np.isnan(proxies)).sum(axis=1), side="right") - 1
    reached = np.minimum(np.arange(len(ns))[:, None], last.clip(0))
    rows: list[Row] = [{"split": "eval", "step": n, "kl_exact": agents.best_of_n_kl(n)} for n in ns]
    for name in MEASURES[1:]:
        worth: Any = agents.best_of_k(proxies, measures[name].to_numpy()[index], ns)
        for row, values in zip(rows, np.take_along_axis(worth, reached, axis=0), strict=True):
            scored = values[~np.isnan(values)]
            mean = float(scored.mean()) if len(scored) else float("nan")
            row[name] = 100 * mean if name in WIN_RATES else mean
    return rows


def choose(pool: NDArray[np.int64], scores: NDArray[np.float64]) -> NDArray[np.int64]:
    """[P], the best scored of each row of distinct responses [P, n]; the first of equals."""
    ranked = np.where(np.isnan(scores[pool]), -np.inf, scores[pool])
    best: NDArray[np.int64] = pool[np.arange(len(pool)), ranked.argmax(axis=1)]
    return best
