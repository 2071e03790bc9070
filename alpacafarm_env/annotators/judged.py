"""Pairs judged by a pool for the command line, and what there is to say about them."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..api import ledger_sql as sql
from ..api.endpoint import Endpoint
from ..api.ledger import Ledger
from ..errors import AlpacaFarmError, PoolError
from ..oracles.base import UNSCORED_REASON, Verdicts, compare
from ..oracles.judges import NO_VERDICT
from ..statistics import WinRateSummary, win_rate
from .annotation_files import Pairs
from .config import load_models, load_pool
from .make import make_pool
from .progress import progress_bar


@dataclass(frozen=True)
class Judged:
    """A file's verdicts.

    Attributes:
        pairs: What was judged.
        verdicts: P(output_2 preferred), with details.
        name: The judge's name, with its noise and orders.
        seed: Its seed.
        host: The server.
        models: Annotator -> model.
        ledger: The ledger's file.
        ledger_usd: All that it counts as spent.
    """

    pairs: Pairs
    verdicts: Verdicts
    name: str
    seed: int
    host: str
    models: dict[str, str]
    ledger: Path
    ledger_usd: float

    @property
    def label(self) -> str:
        """Who judged: pool, seed, models, server."""
        return f"{self.name}, seed {self.seed}, {' and '.join(dict.fromkeys(self.models.values()))} at {self.host}"

    @cached_property
    def win_rate(self) -> WinRateSummary:
        """Of output_2 over output_1."""
        return win_rate(self.verdicts.scores)

    def summary(self) -> list[str]:
        """Counts, reasons, costs and models, a line each."""
        rate, noised = self.win_rate, self._detail("noised", False)
        num = len(self.verdicts.scores)
        lines = [
            f"pairs: {num} ({int(noised.sum())} by noise, {rate.num_draws} undecided or identical), "
            f"{rate.num_unscored} without a verdict",
            *(f"  {count} {kind}{', the first: ' * bool(text)}{text}" for kind, (count, text) in self.reasons.items()),
        ]
        if rate.num_total:
            error = "" if math.isnan(rate.standard_error) else f" +- {rate.standard_error:.2f}"
            lines.append(f"prefers output_2: {rate.win_rate:.2f} %{error} of {rate.num_total}")
        return [*lines, self._cost(), f"ledger: ${self.ledger_usd:.4f} in all, {self.ledger}", self._asked()]

    def _detail(self, key: str, blank: Any) -> NDArray[Any]:
        return np.asarray(self.verdicts.details.get(key, np.full(len(self.verdicts.scores), blank)))

    @cached_property
    def reasons(self) -> dict[str, tuple[int, str]]:
        """Kind of reason why there is no verdict (mostly an error's type) -> how many, and what the first one says."""
        told = self._detail(UNSCORED_REASON, "")[np.isnan(self.verdicts.scores)].tolist()
        found: dict[str, tuple[int, str]] = {}
        for kind, _, text in ((reason or NO_VERDICT).partition(": ") for reason in told):
            count, first = found.get(kind, (0, text))
            found[kind] = count + 1, first
        return found

    def _cost(self) -> str:
        cached, costs = self._detail("cached", False), self._detail("cost_usd", 0.0)
        asked = int((~cached & (self._detail("annotator", "") != "")).sum())
        fresh = int((~cached).sum())
        known = f"${np.nansum(costs):.4f}" + (" and what has no known price" if np.isnan(costs).any() else "")
        rate = "" if np.isnan(costs).any() or not asked else f", ${1000 * costs.sum() / fresh:.4f} per 1,000 pairs"
        return f"cost of this run: {known} for {asked} pairs asked{rate}; {int(cached.sum())} were answered before"

    def _asked(self) -> str:
        judged = Counter(self.models[name] for name in self._detail("annotator", "").tolist() if name)
        by_model = ", ".join(f"{model} {count}" for model, count in sorted(judged.items()))
        return f"pairs by model: {by_model or 'none'}; at {self.host}"


def judge_pairs(pairs: Pairs, *, ledger: str | PathLike[str] | None, **options: Any) -> Judged:
    """Judges pairs with a progress bar on stderr.

    Args:
        pairs: What to judge.
        ledger: The file of answers and spending; None: the user's own.
        **options: Those of `make_pool`.

    Raises:
        AlpacaFarmError: See `make_pool` and `AnnotatorPool.judge`; answers so far are kept.
        KeyboardInterrupt: With a message that says how to go on.
    """
    pool = load_pool(options["pool"])
    models = options["models"] or ({"model": options["model"]} if options["model"] else "openai")
    roles = load_models(models, roles=pool.roles)
    host = _endpoint(options["base_url"]).host
    with Ledger(ledger, replay=options["replay"]) as opened:
        with progress_bar(pool.name) as show:
            judge = make_pool(ledger=opened, on_progress=show, **options)
            try:
                verdicts = compare(judge, pairs.instructions, pairs.first, pairs.second)
            except KeyboardInterrupt:
                raise KeyboardInterrupt(
                    f"answers so far are kept in {opened.path}. The same command goes on from there and asks only what "
                    "is missing."
                ) from None
        usd = opened.do(sql.spending).result().total.usd
        played = {member.name: roles[member.role].model for member in pool.annotators}
        return Judged(pairs, verdicts, judge.name, options["seed"], host, played, opened.path, usd)


def _endpoint(base_url: str | None) -> Endpoint:
    try:
        return Endpoint(base_url)
    except AlpacaFarmError:
        raise
    except ValueError as error:
        raise PoolError(f"--base-url (or $OPENAI_BASE_URL): {error}.") from error
