"""Best-of-n of the over-optimization study: every n up to the largest, from one pool of samples."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...agents import best_of_k, best_of_n_kl
from ..harness.evaluation import SCORES, WIN_RATES
from ..harness.runner import ProgressFn, ProgressUpdate, quiet
from ..harness.stored import check_settings
from ..harness.study import Row
from .plans import BestOfNPlan, SamplesPlan
from .runs import ask, describe, known_mean, make_row, write_evaluation
from .samples import StoredSamples, read_samples
from .treatments import DISAGREEMENT


def run_best_of_n(plan: BestOfNPlan, on_progress: ProgressFn) -> list[Row]:
    """Asks the treatment's reward about all samples; rows of `COLUMNS` for n = 1, 2, 4 ... and the largest.

    Each is the mean over instructions of the unbiased estimator from all samples that the reward has a verdict on
    (`best_of_k`; an instruction with fewer than n of them counts with its best of the largest n that it reaches); the
    KL is the upper bound log n - (n - 1) / n. Stored beside each is what is chosen of the first n samples.
    """
    quiet()
    on_progress(ProgressUpdate(plan.cell, 0))
    plan.folder.mkdir(parents=True, exist_ok=True)
    check_settings(plan.folder, plan.settings())
    samples = read_samples(SamplesPlan(plan.seed, plan.out, plan.sizes))
    proxy = plan.found.proxy(plan.trained())
    scores, spread = ask(proxy, samples.asked, samples.texts)
    rows = best_rows(plan, samples, scores, spread)
    for n, row in zip(plan.sizes.ns, rows, strict=True):
        write_evaluation(plan, n, row, content(samples, scores, spread, n))
    on_progress(ProgressUpdate(plan.cell, plan.units, describe(plan.cell, rows)))
    return rows


def best_rows(
    plan: BestOfNPlan, samples: StoredSamples, scores: NDArray[np.float64], spread: NDArray[np.float64]
) -> list[Row]:
    """The rows, from the proxy's scores [D] of the distinct responses and their disagreement [D]."""
    ns, index = plan.sizes.ns, samples.index
    measures = {**samples.measures, "proxy": scores, DISAGREEMENT: spread}
    # Every n is a mean over the same instructions: one with fewer scored samples stays at the largest n it reaches.
    last = np.searchsorted(ns, (~np.isnan(scores[index])).sum(axis=1), side="right") - 1
    places = np.minimum(np.arange(len(ns))[:, None], last.clip(0))

    def worth(values: NDArray[np.float64]) -> list[float | None]:
        found = np.take_along_axis(best_of_k(scores[index], values[index], ns), places, axis=0)
        return [known_mean(row) for row in found]

    means = {name: worth(measures[name]) for name in (*SCORES, "length", DISAGREEMENT)}
    for name in WIN_RATES:
        means[name] = [None if credit is None else 100 * credit for credit in means[name]]
    return [
        make_row(plan, n=n, kl=best_of_n_kl(n), means={name: values[place] for name, values in means.items()})
        for place, n in enumerate(ns)
    ]


def content(
    samples: StoredSamples, scores: NDArray[np.float64], spread: NDArray[np.float64], n: int
) -> dict[str, list[Any]]:
    """The best of the first n samples of each instruction with what is known of it, JSON-able; NaN as null."""
    chosen = choose(samples, scores, n)
    columns = {"proxy": scores, **samples.measures, DISAGREEMENT: spread}
    values = {name: [None if x != x else x for x in column[chosen].tolist()] for name, column in columns.items()}
    responses = [samples.texts[number] for number in chosen.tolist()]
    return {"instructions": list(samples.instructions), "responses": responses, **values}


def choose(samples: StoredSamples, scores: NDArray[np.float64], n: int) -> NDArray[np.int64]:
    """[P], which distinct response is the best of the first n samples of each instruction; the first of equals."""
    pool = samples.index[:, :n]
    known = np.where(np.isnan(scores[pool]), -np.inf, scores[pool])
    best: NDArray[np.int64] = pool[np.arange(len(pool)), known.argmax(axis=1)]
    return best
