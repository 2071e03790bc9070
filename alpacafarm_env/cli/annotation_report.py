"""Pairs judged by a pool for the command line, and what there is to say about them."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..annotators.config import load_models, load_pool
from ..annotators.factory import make_pool, model_spec
from ..errors import AlpacaFarmError, PermanentAPIError, PoolError, PriceError, UnparsableVerdictError
from ..llm.endpoint import NO_KEY, OPENAI_KEY, Endpoint
from ..llm.ledger import operations as sql
from ..llm.ledger.store import Ledger
from ..oracles.base import UNSCORED_REASON, Verdicts, compare
from ..oracles.judges import NO_VERDICT
from ..statistics import WinRateSummary, win_rate
from .annotation_files import Pairs
from .progress import progress_bar


@dataclass(frozen=True)
class AnnotationReport:
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

    def summary(self, second: str = "output_2") -> list[str]:
        """Counts, reasons, costs and models, a line each; `second` is whose win rate it is."""
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
        return [
            *lines,
            *self._by_taste(),
            *self._costs(),
            f"ledger: ${self.ledger_usd:.4f} in all, {self.ledger}",
            self._asked(),
        ]

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

    @property
    def asked_again(self) -> dict[str, int]:
        """Kind of reason -> pairs without a verdict that the same command asks, and pays for, again.

        Only replies are kept. What was no reply, or refused, leaves nothing to read; one that could not be read is
        final.
        """
        final = UnparsableVerdictError.__name__
        return {kind: count for kind, (count, _) in self.reasons.items() if kind != final}

    def _by_taste(self) -> list[str]:
        """That the sandbox's annotators, started with --anyway, did not understand what they judged."""
        from ..judge_server.sandbox_judge import BY_TASTE
        from ..sandbox import tasks

        asked = any(model.startswith("sandbox-") for model in self.models.values())
        judged = self._detail("annotator", "") != ""  # the others are noise or identical: nobody judged them
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
        judged = self._detail("annotator", "") != ""  # the others are noise or identical, and nobody's to pay for
        num, unknown = int((judged & ~cached).sum()), bool(np.isnan(costs).any())
        spent = f"${np.nansum(costs):.4f}" + " and what has no known price" * unknown
        lines = [f"cost of this run: {spent} for {num} pairs asked; {int(cached.sum())} were answered before"]
        if num and not unknown and costs.any():
            each, share = 1000 * costs.sum() / num, float(judged.mean())
            # A pair of which one order was answered before cost half, and is not told apart.
            least = "at least " * ("orders_agree" in self.verdicts.details)
            text = f"price: {least}${each:.4f} per 1,000 pairs asked"
            if share < 1:
                rest = f"{100 * share:.0f} % of them are asked, noise and identical outputs are free"
                text += f", {least}${each * share:.4f} per 1,000 pairs ({rest})"
            lines.append(text)
        return lines

    def _asked(self) -> str:
        judged = Counter(self.models[name] for name in self._detail("annotator", "").tolist() if name)
        by_model = ", ".join(f"{model} {count}" for model, count in sorted(judged.items()))
        return f"pairs by model: {by_model or 'none'}; at {self.host}"


def judge_pairs(pairs: Pairs, *, ledger: str | PathLike[str] | None, **options: Any) -> AnnotationReport:
    """Judges pairs with a progress bar on stderr.

    Args:
        pairs: What to judge.
        ledger: The file of answers and spending; None: the user's own.
        **options: Those of `make_pool`.

    Raises:
        AlpacaFarmError: See `make_pool` and `AnnotatorPool.judge`; answers so far are kept. What a caller of those is
            told of keywords is told of the command's options instead.
        KeyboardInterrupt: With a message that says how to go on.
    """
    pool = load_pool(options["pool"])
    roles = load_models(model_spec(options["models"], options["model"]), pool.roles)
    endpoint = _endpoint(options)
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
            except PermanentAPIError as error:
                raise _without_key(endpoint, options["api_key_env"]) or error from None
            except PriceError as error:
                raise PriceError(
                    f"{error} A --models file gives it: price_usd_per_million: [input, output] beside the model's name."
                ) from None
        usd = opened.do(sql.spending).result().total.usd
        played = {member.name: roles[member.role].model for member in pool.annotators}
        return AnnotationReport(pairs, verdicts, judge.name, options["seed"], endpoint.host, played, opened.path, usd)


def _endpoint(options: Mapping[str, Any]) -> Endpoint:
    where = "--base-url (or $OPENAI_BASE_URL)"
    base_url, key_env = options["base_url"], options["api_key_env"]
    try:
        endpoint = Endpoint(base_url, api_key_env=key_env, allow_insecure=True)
    except ValueError as error:
        raise PoolError(f"{where}: {str(error).rstrip('.')}.") from error
    if not options["allow_insecure"]:
        try:
            Endpoint(base_url, api_key_env=key_env)
        except ValueError as error:  # what was refused is only that it is not encrypted
            raise PoolError(
                f"{where}: http:// to {endpoint.host}, so anybody on the way could read the key and the texts. Use "
                "https://, or --allow-insecure on a network that you trust."
            ) from error
    return endpoint


def _without_key(endpoint: Endpoint, variable: str) -> AlpacaFarmError | None:
    """The error that says so in the command's words, if there is no key that could be sent."""
    try:
        endpoint.key()
    except PermanentAPIError:
        # A name that was given is not printed: it may be the key itself.
        name = OPENAI_KEY if variable == OPENAI_KEY else "that --api-key-env names"
        holds = "a key with characters that no key has" if os.environ.get(variable, "").strip() else "none"
        return AlpacaFarmError(
            f"The server {endpoint.host} needs a key, and the environment variable {name} holds {holds}. Set it to "
            f"the key ({NO_KEY!r} if the server wants none), or name another variable by --api-key-env."
        )
    return None
