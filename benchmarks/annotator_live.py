"""Judges behind an API, measured on the sandbox's pairs by the same functions as the sandbox's own.

The responses and the human majority are the sandbox's: the figures tell how a served judge behaves there, not how it
would agree with people. The paper's figures stand beside, and no tolerance is asked of a live judge.
"""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import numpy as np

from ..errors import DataError
from ..oracles.base import PreferenceOracle
from .annotator_sandbox import Question, human_majority
from .annotator_targets import COST, Target, complete, make_row, rows_of, targets_of
from .annotator_votes import Opinions, figures
from .study import Row

LEVEL: Final = "live"
LIKE: Final = {"alpaca_farm": "sim_eval", "eval": "sim_eval", "ann": "sim_ann", "greedy": "sim_gpt4"}
"""Pool -> the judge of the paper that it has the structure of."""
OF_MEMBERS: Final = ("agreement", "prefers_first", "prefers_longer", "prefers_lists", COST)
"""What is told of each annotator of a pool."""


@dataclass(frozen=True)
class LivePool:
    """Who is asked, where, and for how much."""

    base_url: str
    pool: str = "alpaca_farm"
    models: str = "openai"
    ledger: Path | None = None
    budget_usd: float | None = None

    def judge_of(self, seed: int) -> PreferenceOracle:
        """The pool's opinion of a seed; keys are read from the environment, answers kept in the ledger."""
        from ..annotators.make import make_pool

        return make_pool(
            self.pool,
            models=self.models,
            base_url=self.base_url,
            ledger=self.ledger,
            seed=seed,
            budget_usd=self.budget_usd,
            on_progress=_Printer(seed),
        )

    @property
    def host(self) -> str:
        """Where it is, without what else an address may hold."""
        try:
            parts = urlsplit(self.base_url)
            return f"{parts.hostname}{f':{parts.port}' if parts.port else ''}"
        except ValueError:
            return "unreadable"

    def digest(self) -> str:
        """Hash of what changes the answers: address, pool and models, the content of YAML files included."""
        found = hashlib.blake2b(digest_size=8)
        for text in (self.base_url, self.pool, self.models):
            path = Path(text)
            content = path.read_bytes() if path.suffix in (".yaml", ".yml") and path.is_file() else b""
            found.update(repr((text, content)).encode())
        return found.hexdigest()

    def rows(self, question: Question) -> list[Row]:
        """Asks for one seed's opinions; the rows of the pool, then of each annotator that gave any.

        Raises:
            APIError: The server refused for good, or stopped answering; answers so far are kept.
            LedgerError: The budget is reached.
            DataError: Not one verdict could be read.
        """
        human = human_majority(question.pairs, question.seeds(0))
        opinions = question.ask(question.pairs, self.judge_of, 0)
        if np.isnan(opinions.votes).all():
            raise DataError(f"{self.pool} at {self.host}: expected verdicts, got none for any of the pairs.")
        rows = rows_of(f"live {self.pool}", [figures(opinions, question.pairs, human)], LEVEL, self._beside())
        names = sorted({str(name) for name in opinions.annotator.ravel().tolist() if name})
        for name in names if len(names) > 1 else []:
            found = figures(opinions.by(name), question.pairs, human)
            # An annotator of a pool has seldom two opinions on one pair: nothing to compare it with itself by.
            rows += rows_of(f"live {name}", [{figure: found[figure] for figure in OF_MEMBERS}], LEVEL)
        return rows + _spent(f"live {self.pool}", opinions)

    def _beside(self) -> Mapping[str, Target]:
        found = targets_of(LIKE.get(self.pool, ""))
        return {figure: replace(target, tolerance=None) for figure, target in found.items()}


class _Printer:
    """How far an opinion is, on stderr: on a terminal one line that is kept up to date, else its end."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def __call__(self, progress: Any) -> None:
        last = progress.done >= progress.total
        if last or sys.stderr.isatty():
            text = f"opinion {self._seed}: {progress.done} of {progress.total} asked, ${progress.cost_usd:.4f}"
            print(f"\r{text}" if sys.stderr.isatty() else text, end="\n" if last else "", file=sys.stderr, flush=True)


def _spent(judge: str, opinions: Opinions) -> list[Row]:
    """What a user wants to know besides: opinions without a verdict, and what was paid now, in US dollars."""
    paid, nothing = opinions.cost_usd[~np.isnan(opinions.cost_usd)], (math.nan, math.nan)
    missing = make_row(judge, "no_verdict", [np.isnan(opinions.votes).mean(axis=0)], LEVEL)
    spent = complete(judge, "spent_usd", float(paid.sum()), nothing, len(paid), LEVEL)
    return [missing, spent] if missing else [spent]
