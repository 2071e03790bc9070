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
from ..annotators.pool import make_pool, model_spec
from ..annotators.served import Progress
from ..errors import PoolError, PriceError, UnparsableVerdictError
from ..llm.endpoint import Endpoint
from ..llm.ledger import operations as sql
from ..llm.ledger.store import Ledger
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

    pairs: Pairs
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
        num = len(self.verdicts.scores)
        lines = [
            f"pairs: {num} ({int(noised.sum())} by noise, {rate.num_draws} undecided or identical), "
            f"{rate.num_unscored} without a verdict",
            *(f"  {count} {kind}{', the first: ' * bool(text)}{text}" for kind, (count, text) in self.reasons.items()),
        ]
        if rate.num_total:
            error = "" if math.isnan(rate.standard_error) else f" +- {rate.standard_error:.2f}"
            lines.append(f"win rate of {second}: {rate.win_rate:.2f} %{error} of {rate.num_total}")
        judged = Counter(self.models[name] for name in self._detail("annotator", "").tolist() if name)
        by_model = ", ".join(f"{model} {count}" for model, count in sorted(judged.items()))
        return [
            *lines,
            *self._by_taste(),
            *self._costs(),
            f"ledger: ${self.ledger_usd:.4f} in all, {self.ledger}",
            f"pairs by model: {by_model or 'none'}; at {self.host}",
        ]

    def bounds(self) -> list[str]:
        """Where the win rate lies, if some verdicts are missing."""
        rate, (low, high) = self.win_rate, self.win_rate.bounds
        if not rate.num_unscored:
            return []
        return [
            f"{rate.num_unscored} of {rate.num_total + rate.num_unscored} have no verdict: the win rate lies in "
            f"[{low:.2f}, {high:.2f}] [all lost, all won]."
        ]

    def missing(self, out: Path | None) -> list[str]:
        """How many verdicts are missing, if any are, and what giving the same command again would do about it.

        Only replies are stored. Refusals and failures are asked again; a reply that could not be read is final.
        """
        missing = self.win_rate.num_unscored
        if not missing:
            return []
        asked = {k: count for k, (count, _) in self.reasons.items() if k != UnparsableVerdictError.__name__}
        again = "The same command asks nothing again: replies that could not be read are final for this seed."
        if num := sum(asked.values()):
            kinds = ", ".join(f"{count} {kind}" for kind, count in asked.items())
            which = "them" if num == missing else f"{num} of them"
            again = f"The same command asks, and pays for, {which} again ({kinds}), and nothing else."
        where = f"; unscored_reason in {out} says why" if out else ""
        return [f"{missing} of {len(self.verdicts.scores)} pairs have no verdict{where}. {again}"]

    def _detail(self, key: str, blank: Any) -> NDArray[Any]:
        return np.asarray(self.verdicts.details.get(key, np.full(len(self.verdicts.scores), blank)))

    @cached_property
    def reasons(self) -> dict[str, tuple[int, str]]:
        """Why verdicts are missing: kind (mostly an error's type) -> how many, and the first one's text."""
        reasons = self._detail(UNSCORED_REASON, "")[np.isnan(self.verdicts.scores)].tolist()
        found: dict[str, tuple[int, str]] = {}
        for kind, _, text in ((reason or NO_VERDICT).partition(": ") for reason in reasons):
            count, first = found.get(kind, (0, text))
            found[kind] = count + 1, first
        return found

    def _by_taste(self) -> list[str]:
        """A warning if the sandbox's annotators, started with --anyway, judged what they do not understand."""
        from ..judge_server.sandbox_judge import BY_TASTE
        from ..sandbox import tasks

        asked = any(model.startswith("sandbox-") for model in self.models.values())
        judged = self._detail("annotator", "") != ""  # not the noise, nor the identical
        pairs = zip(self.pairs.instructions, judged, strict=True)
        foreign = sum(was and not tasks.known(instruction) for instruction, was in pairs) if asked else 0
        if not foreign:
            return []
        return [
            f"{foreign} instructions are not the sandbox's: its annotators judged them {BY_TASTE}. Their verdicts say "
            "nothing of how good the outputs are."
        ]

    def _costs(self) -> list[str]:
        cached, costs = self._detail("cached", False), self._detail("cost_usd", 0.0)
        judged = self._detail("annotator", "") != ""  # the others, noise or identical, are free
        num, unknown = int((judged & ~cached).sum()), bool(np.isnan(costs).any())
        spent = f"${np.nansum(costs):.4f}" + " and what has no known price" * unknown
        lines = [f"cost of this run: {spent} for {num} pairs asked; {int(cached.sum())} were answered before"]
        if num and not unknown and costs.any():
            each, share = 1000 * costs.sum() / num, float(judged.mean())
            # Pairs of which one order was answered before cost half.
            least = "at least " * ("orders_agree" in self.verdicts.details)
            text = f"price, by the {num} pairs asked in this run: {least}${each:.4f} per 1,000 pairs asked"
            if share < 1:
                rest = f"{100 * share:.0f} % of them are asked, noise and identical outputs are free"
                text += f", {least}${each * share:.4f} per 1,000 pairs ({rest})"
            lines.append(text)
        return lines


def judge_pairs(pairs: Pairs, *, ledger: str | PathLike[str] | None, **options: Any) -> AnnotationReport:
    """Judges pairs with a progress bar on stderr; options are those of `make_pool`.

    Raises:
        AlpacaFarmError: See `make_pool` and `AnnotatorPool.judge`, in terms of the command's options; answers so far
            are kept.
        KeyboardInterrupt: With a message that says how to go on.
    """
    pool = load_pool(options["pool"])
    roles = load_models(model_spec(options["models"], options["model"]), pool.roles)
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
        usd = opened.do(sql.spending).result().total.usd
        played = {member.name: roles[member.role].model for member in pool.annotators}
        return AnnotationReport(pairs, verdicts, judge.name, options["seed"], endpoint.host, played, opened.path, usd)


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
