"""Judges behind an API, measured on the sandbox's pairs just as the sandbox's own.

Responses and human majority are the sandbox's: the figures say how a served judge behaves there, not how it would agree
with people. They stand next to the paper's figures of a pool of the same structure, with the same tolerance.
"""

from __future__ import annotations

import math
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ...annotators.analysis import COST, figures
from ...errors import DataError
from ...llm.endpoint import OPENAI_KEY, Endpoint, require_key_variable
from ...oracles.base import PreferenceOracle
from ..harness.study import Row
from .rows import SPENT, TARGETS, make_row, rows_of
from .sandbox import Question

if TYPE_CHECKING:
    from ...annotators.config import ModelConfig, PoolConfig

LEVEL: Final = "live"
OF_MEMBERS: Final = ("agreement", "prefers_first", "prefers_longer", "prefers_lists", COST)
"""Figures of single annotators of a pool, which seldom have two opinions on one pair to compare with each other."""
PASSED: Final = ("models", "model", "base_url", "api_key_env", "max_concurrency", "allow_insecure", "budget_usd")
"""Options that `make_pool` gets as they are."""
PAPERS_POOLS: Final = {0.0: "sim_eval", 0.25: "sim_ann"}
"""Noise of a pool of several annotators -> the paper's judge of that structure."""


@dataclass(frozen=True)
class LivePool:
    """Who is asked, where, and for how much: options of the command, and of `make_pool`."""

    base_url: str | None = None
    """The address of a live judge, up to "/v1"; none: no live judge."""
    pool: str = "alpaca_farm"
    """The live pool: a name (alpaca_farm, eval, ann, greedy, weighted) or a YAML file."""
    models: str | None = None
    """Which model plays which role: openai, sandbox (for judge-server), or a YAML file. Default: openai."""
    model: str | None = None
    """One model for all roles, instead of --models."""
    api_key_env: str = OPENAI_KEY
    """The environment variable that holds the API key."""
    max_concurrency: int = 64
    """Requests in flight at once; fewer when the server asks for it."""
    allow_insecure: bool = False
    """Take an http:// address of another machine, where anybody on the way can read the key and the texts."""
    budget_usd: float | None = None
    """The most that the ledger may have spent in all, in US dollars. Default: no limit."""
    ledger: Path | None = None
    """The file of answers and spending. Default: the user's own."""

    def check(self) -> None:
        """Checks everything that can be known without asking.

        Raises:
            AlpacaFarmError: The address, the key's variable, the pool, a prompt, the models, a number, or the ledger.
        """
        from ...cli.annotation_report import option_endpoint
        from ...llm.ledger.store import Ledger

        endpoint = option_endpoint(self.base_url, self.api_key_env, self.allow_insecure)
        require_key_variable(self.api_key_env, "--api-key-env")
        endpoint.key()
        try:
            with Ledger(self.ledger) as ledger:
                self.judge_of(0, ledger=ledger)
        except ValueError as error:  # a number that the pool cannot take
            raise DataError(str(error)) from error

    def judge_of(self, seed: int, **more: Any) -> PreferenceOracle:
        """The pool with a seed; `more` are further options of `make_pool`."""
        from ...annotators.pool import make_pool

        return make_pool(self.pool, **{name: getattr(self, name) for name in PASSED}, seed=seed, **more)

    @cached_property
    def pool_config(self) -> PoolConfig:
        """The pool as in its file; PoolError if that is missing or malformed."""
        from ...annotators.config import load_pool

        return load_pool(self.pool)

    @cached_property
    def played(self) -> dict[str, ModelConfig]:
        """Role -> model; PoolError if they are missing or malformed, or `models` and `model` are both given."""
        from ...annotators.config import load_models
        from ...annotators.pool import model_spec

        return load_models(model_spec(self.models, self.model), self.pool_config.roles)

    @property
    def name(self) -> str:
        """The pool's name in the table, which none of its annotators has there."""
        members, pool = {member.name for member in self.pool_config.annotators}, self.pool_config.name
        return f"{LEVEL} {pool}{' (pool)' if pool in members and len(members) > 1 else ''}"

    @property
    def like(self) -> str:
        """The judge of the paper that has the pool's structure, "" for none."""
        if len(self.pool_config.annotators) > 1:
            return PAPERS_POOLS.get(self.pool_config.flip, "")
        return "sim_gpt4" if self.pool_config.annotators[0].temperature == 0 and self.pool_config.flip == 0 else ""

    @property
    def host(self) -> str:
        """The server, without the rest of its address."""
        return Endpoint(self.base_url or "", allow_insecure=True).host

    def digest(self) -> str:
        """Hash of what changes the answers: address, annotators, the content of their prompts, models, noise."""
        from ...annotators.pool import content
        from ...llm.requests import content_key

        files = content({"pool": self.pool, "models": self.models})
        return content_key([self.base_url, self.pool, self.model, files])[:16]

    def rows(self, question: Question) -> list[Row]:
        """Asks for one seed's opinions; the rows of the pool, then of each annotator that gave any.

        Raises:
            APIError: The server refused for good, or stopped answering; answers so far are kept.
            LedgerError: The budget is reached.
            DataError: No verdict could be read.
        """
        from ...cli.annotation_report import progress_bar
        from ...llm.ledger.store import Ledger

        human = question.humans[0]
        with Ledger(self.ledger) as ledger, ExitStack() as bars:

            def judge_of(seed: int) -> PreferenceOracle:
                show = bars.enter_context(progress_bar(f"opinion {seed}"))
                return self.judge_of(seed, ledger=ledger, on_progress=show)

            opinions = question.ask(judge_of, 0)
        missing = np.isnan(opinions.votes)
        if missing.all():
            why = f" The first says: {opinions.reason}" if opinions.reason else ""
            raise DataError(f"{self.pool} at {self.host}: expected verdicts, got none for any of the pairs.{why}")
        rows = rows_of(self.name, [figures(opinions, question.pairs, human)], LEVEL, TARGETS.get(self.like))
        names = sorted({str(name) for name in opinions.annotator.ravel().tolist() if name})
        for name in names if len(names) > 1 else []:
            values = figures(opinions.by(name), question.pairs, human)
            rows += rows_of(f"{LEVEL} {name}", [{figure: values[figure] for figure in OF_MEMBERS}], LEVEL)
        rows += rows_of(self.name, [{"no_verdict": missing.mean(axis=0)}], LEVEL)
        paid = opinions.cost_usd[~np.isnan(opinions.cost_usd)]
        return [*rows, make_row(self.name, SPENT, float(paid.sum()), (math.nan, math.nan), len(paid), LEVEL)]
