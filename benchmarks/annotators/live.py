"""Judges behind an API, measured on the sandbox's pairs by the same functions as the sandbox's own.

The responses and the human majority are the sandbox's: the figures tell how a served judge behaves there, not how it
would agree with people. The paper's figures stand beside a pool of the same structure, with the same tolerance.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ...errors import DataError, PoolError, PriceError
from ...llm.endpoint import OPENAI_KEY, Endpoint, require_key_variable
from ...oracles.base import PreferenceOracle
from ..harness.study import Row
from .sandbox import Question, human_majority
from .targets import COST, SPENT, make_row, rows_of, targets_of
from .votes import Opinions, figures

if TYPE_CHECKING:
    from ...annotators.config import ModelConfig, PoolConfig
    from ...llm.ledger.store import Ledger

LEVEL: Final = "live"
OF_MEMBERS: Final = ("agreement", "prefers_first", "prefers_longer", "prefers_lists", COST)
"""What is told of each annotator of a pool."""
PASSED: Final = ("models", "model", "base_url", "api_key_env", "max_concurrency", "allow_insecure", "budget_usd")
"""What `make_pool` is told as it is."""
_NO_NOISE, _NOISE = 0.0, 0.25


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
    """What the ledger may have spent in all, in US dollars. Default: no limit."""
    ledger: Path | None = None
    """The file of answers and spending. Default: the user's own."""

    def check(self) -> None:
        """Everything that can be known without asking.

        Raises:
            AlpacaFarmError: The address, the key's variable, the pool, a prompt, the models, a price that the budget
                needs, or the ledger.
        """
        from ...llm.ledger.store import Ledger
        from ...llm.pricing import Prices

        try:
            endpoint = Endpoint(self.base_url or "", api_key_env=self.api_key_env, allow_insecure=self.allow_insecure)
        except ValueError as error:
            raise PoolError(f"--base-url: {str(error).rstrip('.')}.") from error
        self.digest()
        require_key_variable(self.api_key_env, "--api-key-env")
        endpoint.key()
        prices = Prices.load()
        for model in self.played.values() if self.budget_usd is not None else ():
            if model.price_usd_per_million is None and prices.price(model.model) is None:
                raise PriceError(
                    f"--budget-usd: expected models with a known price, got {model.model!r}, which has none. A "
                    "--models file gives it: price_usd_per_million: [input, output] beside the model's name. Or set no "
                    "budget."
                )
        with Ledger(self.ledger):
            pass

    def judge_of(self, seed: int, ledger: Ledger) -> PreferenceOracle:
        """The pool's opinion of a seed; keys are read from the environment, answers kept in the ledger."""
        from ...annotators.factory import make_pool

        asked = {name: getattr(self, name) for name in PASSED}
        return make_pool(self.pool, **asked, ledger=ledger, seed=seed, on_progress=_Printer(seed))

    @cached_property
    def config(self) -> PoolConfig:
        """The pool as its file says it.

        Raises:
            PoolError: The file is missing or not well written.
        """
        from ...annotators.config import load_pool

        return load_pool(self.pool)

    @cached_property
    def played(self) -> dict[str, ModelConfig]:
        """Role -> model.

        Raises:
            PoolError: The models are missing or not well written.
        """
        from ...annotators.config import load_models

        return load_models({"model": self.model} if self.model else self.models or "openai", self.config.roles)

    @property
    def name(self) -> str:
        """How the table calls the pool: a name that none of its annotators has there."""
        taken = {member.name for member in self.config.annotators}
        return f"{LEVEL} {self.config.name}{' (pool)' if self.config.name in taken and len(taken) > 1 else ''}"

    @property
    def like(self) -> str:
        """The judge of the paper that has the pool's structure, "" for none."""
        config, first = self.config, self.config.annotators[0]
        if len(config.annotators) == 1:
            return "sim_gpt4" if first.temperature == 0 and config.flip == _NO_NOISE else ""
        return {_NO_NOISE: "sim_eval", _NOISE: "sim_ann"}.get(config.flip, "")

    @property
    def host(self) -> str:
        """Where it is, without what else an address may hold."""
        return Endpoint(self.base_url or "", allow_insecure=True).host

    def digest(self) -> str:
        """Hash of what changes the answers: address, annotators, what their prompts say, models, noise.

        Raises:
            PoolError: A file of the pool, a prompt or the models is missing or not well written.
        """
        from ...annotators.config import load_prompt
        from ...llm.requests import content_key

        pool = self.config
        members = [
            {**member.model_dump(mode="json", exclude={"prompt"}), "prompt": load_prompt(member.prompt).digest}
            for member in pool.annotators
        ]
        models = {role: model.model_dump(mode="json") for role, model in self.played.items()}
        return content_key([self.base_url, self.pool, pool.stream, pool.flip, members, models])[:16]

    def rows(self, question: Question) -> list[Row]:
        """Asks for one seed's opinions; the rows of the pool, then of each annotator that gave any.

        Raises:
            APIError: The server refused for good, or stopped answering; answers so far are kept.
            LedgerError: The budget is reached.
            DataError: Not one verdict could be read.
        """
        from ...llm.ledger.store import Ledger

        human = human_majority(question.pairs, question.seeds(0))
        with Ledger(self.ledger) as ledger:
            opinions = question.ask(question.pairs, partial(self.judge_of, ledger=ledger), 0)
        if np.isnan(opinions.votes).all():
            why = f" The first says: {opinions.reason}" if opinions.reason else ""
            raise DataError(f"{self.pool} at {self.host}: expected verdicts, got none for any of the pairs.{why}")
        found = figures(opinions, question.pairs, human)
        rows = rows_of(self.name, [found], LEVEL, targets_of(self.like))
        names = sorted({str(name) for name in opinions.annotator.ravel().tolist() if name})
        for name in names if len(names) > 1 else []:
            found = figures(opinions.by(name), question.pairs, human)
            # An annotator of a pool has seldom two opinions on one pair: nothing to compare it with itself by.
            rows += rows_of(f"{LEVEL} {name}", [{figure: found[figure] for figure in OF_MEMBERS}], LEVEL)
        return rows + _spent(self.name, opinions)


class _Printer:
    """How far an opinion is, on stderr: on a terminal one line that is kept up to date, else its end."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def __call__(self, progress: Any) -> None:
        last = progress.done >= progress.total
        if last or sys.stderr.isatty():
            left = progress.seconds / max(progress.done, 1) * (progress.total - progress.done)
            cost = "price unknown" if math.isnan(progress.cost_usd) else f"${progress.cost_usd:.4f} so far"
            text = f"opinion {self._seed}: {progress.done} of {progress.total} pairs, {left:.0f} s left, {cost}"
            print(f"\r{text}" if sys.stderr.isatty() else text, end="\n" if last else "", file=sys.stderr, flush=True)


def _spent(judge: str, opinions: Opinions) -> list[Row]:
    """What a user wants to know besides: opinions without a verdict, and what was paid now, in US dollars."""
    paid = opinions.cost_usd[~np.isnan(opinions.cost_usd)]
    missing = rows_of(judge, [{"no_verdict": np.isnan(opinions.votes).mean(axis=0)}], LEVEL)
    return [*missing, make_row(judge, SPENT, float(paid.sum()), (math.nan, math.nan), len(paid), LEVEL)]
