"""Judges pairs by a pool for the command line, and reports on them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..annotators.config import load_models, load_pool
from ..annotators.pool import make_pool
from ..annotators.served import Progress
from ..errors import PoolError, PriceError
from ..llm.endpoint import Endpoint
from ..llm.ledger import Ledger
from ..llm.ledger import operations as sql
from ..oracles.base import UNSCORED_REASON, Verdicts, compare
from ..oracles.judges import NO_VERDICT
from ..statistics import WinRateSummary, win_rate
from ..terminal import make_bar
from .annotation_files import Pairs

_FORMAT = "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} pairs, {elapsed} gone, {remaining} left{postfix}"
_LOG_S = 5.0


@dataclass(frozen=True)
class AnnotationReport:
    """A file's verdicts and their judge."""

    verdicts: Verdicts
    """P(output_2 preferred)."""
    name: str
    """The judge's, with its noise and orders."""
    seed: int
    host: str
    models: dict[str, str]
    """Annotator -> model."""
    ledger: Path
    ledger_usd: float
    """All that the ledger counts as spent."""

    @property
    def label(self) -> str:
        """The judge: pool, seed, models, server."""
        return f"{self.name}, seed {self.seed}, {' and '.join(dict.fromkeys(self.models.values()))} at {self.host}"

    @cached_property
    def win_rate(self) -> WinRateSummary:
        """Of output_2 over output_1."""
        return win_rate(self.verdicts.scores)

    def summary(self, second: str = "output_2") -> list[str]:
        """Lines with counts, reasons, costs and models; `second` names output_2."""
        rate, noised = self.win_rate, self._detail("noised", False)
        lines = [
            f"pairs: {len(noised)} ({int(noised.sum())} by noise, {rate.num_draws} undecided or identical), "
            f"{rate.num_unscored} without a verdict",
            *self._reasons(),
        ]
        if rate.num_total:
            error = "" if math.isnan(rate.standard_error) else f" +- {rate.standard_error:.2f}"
            lines.append(f"win rate of {second}: {rate.win_rate:.2f} %{error} of {rate.num_total}")
        cached, costs = self._detail("cached", False), self._detail("cost_usd", 0.0)
        names = self._detail("annotator", "")
        num = int(((names != "") & ~cached).sum())  # noise and identical outputs are free
        unknown = " and what has no known price" * bool(np.isnan(costs).any())
        judged = Counter(self.models[name] for name in names.tolist() if name)
        by_model = ", ".join(f"{model} {count}" for model, count in sorted(judged.items()))
        return [
            *lines,
            f"cost of this run: ${np.nansum(costs):.4f}{unknown} for {num} pairs asked; {int(cached.sum())} were "
            "answered before",
            f"ledger: ${self.ledger_usd:.4f} in all, {self.ledger}",
            f"pairs by model: {by_model or 'none'}; at {self.host}",
        ]

    def missing(self, out: Path | None) -> list[str]:
        """How many verdicts are missing, if any are, where the win rate lies, and what the same command would do."""
        rate, (low, high) = self.win_rate, self.win_rate.bounds
        if not rate.num_unscored:
            return []
        where = f"; unscored_reason in {out} says why" if out else ""
        return [
            f"{rate.num_unscored} of {len(self.verdicts.scores)} pairs have no verdict{where}: the win rate lies in "
            f"[{low:.2f}, {high:.2f}] [all lost, all won]. The same command asks, and pays for, these again, but for "
            "replies that could not be read, which are final for this seed."
        ]

    def _detail(self, key: str, blank: Any) -> NDArray[Any]:
        return np.asarray(self.verdicts.details.get(key, np.full(len(self.verdicts.scores), blank)))

    def _reasons(self) -> list[str]:
        """Why verdicts are missing: how many of a kind (mostly an error's type), and the first one's text."""
        reasons = self._detail(UNSCORED_REASON, "")[np.isnan(self.verdicts.scores)].tolist()
        parts = [(reason or NO_VERDICT).partition(": ") for reason in reasons]
        first = {kind: text for kind, _, text in reversed(parts)}
        counts = Counter(kind for kind, *_ in parts).items()
        return [f"  {count} {kind}{', the first: ' * bool(first[kind])}{first[kind]}" for kind, count in counts]


def judge_pairs(pairs: Pairs, *, ledger: str | PathLike[str] | None, **options: Any) -> AnnotationReport:
    """Judges pairs with a progress bar on stderr; options are those of `make_pool`.

    Raises:
        AlpacaFarmError: See `make_pool` and `AnnotatorPool.judge`, in terms of the command's options; answers so far
            are kept.
        KeyboardInterrupt: With a message that says how to go on.
    """
    pool = load_pool(options["pool"])
    roles = load_models(options["models"], pool.roles, options["model"])
    endpoint = option_endpoint(options["base_url"], options["api_key_env"], options["allow_insecure"])
    with Ledger(ledger, replay=options["replay"]) as opened:
        with progress_bar(pool.name) as show:
            loaded = {"pool": pool, "models": roles, "model": None}
            judge = make_pool(ledger=opened, on_progress=show, **{**options, **loaded})
            try:
                verdicts = compare(judge, pairs.instructions, pairs.first, pairs.second)
            except KeyboardInterrupt:
                raise KeyboardInterrupt(
                    f"answers so far are kept in {opened.path}. The same command goes on from there and asks only what "
                    "is missing."
                ) from None
            except PriceError as error:
                raise PriceError(
                    f"{error} A --models file gives it: price_usd_per_million: [input, output] beside the model's name."
                ) from None
        usd = float(opened.do(sql.spending).result()["usd"].sum())
        played = {member.name: roles[member.role].model for member in pool.annotators}
        return AnnotationReport(verdicts, judge.name, options["seed"], endpoint.host, played, opened.path, usd)


def option_endpoint(base_url: str | None, api_key_env: str, allow_insecure: bool) -> Endpoint:
    """The server of a command's options.

    Raises:
        PoolError: The address, in terms of the options.
    """
    try:
        return Endpoint(base_url, api_key_env=api_key_env, allow_insecure=allow_insecure)
    except ValueError as error:
        raise PoolError(f"--base-url (or $OPENAI_BASE_URL): {str(error).rstrip('.')}.") from error


@contextmanager
def progress_bar(name: str) -> Iterator[Callable[[Progress], None]]:
    """A bar on stderr from the first answer on: pairs, time left, dollars. Yields the pool's `on_progress`."""
    bars: list[Any] = []

    def show(progress: Progress) -> None:
        if not bars:
            bars.append(make_bar(progress.total, name, log_s=_LOG_S, bar_format=_FORMAT))
        bar = bars[0]
        cost = "price unknown" if math.isnan(progress.cost_usd) else f"${progress.cost_usd:.4f} so far"
        bar.set_postfix_str(cost, refresh=False)
        bar.update(progress.done - bar.n)

    try:
        yield show
    finally:
        for bar in bars:
            bar.close()
