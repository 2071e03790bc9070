"""The commands `judge annotate` and `judge evaluate`: LLM annotators say which of two outputs is better.

Heavy modules are imported when a command runs: the command line's help needs none of them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import pydantic
import tyro

from ..data.load import DATA_VARIABLE
from ..errors import DataError
from ..llm.endpoint import OPENAI_KEY, require_key_variable
from ..llm.ledger.operations import MAX_USD
from ..llm.limits import ClientConfig
from .options import Count, Options, Positive, Report, Seed

if TYPE_CHECKING:
    from .annotations import AnnotationReport, Pairs

_LIMITS: Final = ClientConfig()


@dataclass(frozen=True, kw_only=True)
class JudgeOptions(Options):
    """Who judges, and what that may cost."""

    pool: str = "eval"
    """The annotators: ann (13, whose verdicts have 25 % noise), eval (the 13 without noise), greedy (one), weighted, or
    a YAML file."""
    base_url: str | None = None
    """The server's address up to /v1; default: $OPENAI_BASE_URL, or OpenAI's own. What was answered at another spelling
    or port of it is asked again."""
    allow_insecure: bool = False
    """Take an http:// address of another machine, where anybody on the way can read the key and the texts."""
    models: str | None = None
    """Which model plays which role: openai (the default), sandbox (for judge-server), or a YAML file."""
    model: str | None = None
    """One model for all roles, instead of --models."""
    flip: Annotated[float, pydantic.Field(ge=0, le=0.5)] | None = None
    """Probability that a verdict is flipped, 0 to 0.5. Default: the pool's own."""
    both_orders: bool = False
    """Ask each pair in both orders and average."""
    seed: Seed = 0
    """Another seed is another opinion on the same pairs, asked and paid for anew."""
    ledger: Path | None = None
    """Keeps costs, and answers by server address (--base-url as given), model, prompt and seed. Default: your own."""
    budget_usd: Annotated[float, pydantic.Field(ge=0, le=MAX_USD)] | None = None
    """What the ledger may have spent in all, US dollars; a request that could pass it is not sent."""
    replay: bool = False
    """Answer from the ledger alone, ask nothing."""
    max_concurrency: Count = _LIMITS.max_concurrency
    """Requests in flight at once, each reserving its highest price."""
    requests_per_minute: Positive | None = _LIMITS.requests_per_minute
    """Requests started in a minute at most."""
    timeout_s: Positive = _LIMITS.attempt_timeout_s
    """Seconds for one attempt, its whole reply included."""
    deadline_s: Positive = _LIMITS.deadline_s
    """Seconds for one request, its repeats and waits included."""
    api_key_env: str = OPENAI_KEY
    """The environment variable that holds the API key; a key is never an argument."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.refuse_both("models", "model")
        if self.timeout_s > self.deadline_s:
            raise ValueError(
                f"--timeout-s: expected at most the {self.deadline_s:g} s of --deadline-s, which one request has with "
                f"all its attempts, got {self.timeout_s:g}. Raise --deadline-s too."
            )

    def judge(self, pairs: Pairs) -> AnnotationReport:
        """The verdicts on some pairs.

        Raises:
            AlpacaFarmError: An option or the server; answers so far are kept.
        """
        from .annotations import judge_pairs

        if not self.replay:
            require_key_variable(self.api_key_env, "--api-key-env")
        passed = {each.name: getattr(self, each.name) for each in fields(JudgeOptions)}  # named as those of make_pool
        del passed["config"]
        return judge_pairs(pairs, attempt_timeout_s=passed.pop("timeout_s"), **passed)


@dataclass(frozen=True, kw_only=True)
class Annotate(JudgeOptions):
    """Verdicts on the pairs of a file."""

    pairs: tyro.conf.Positional[Path]
    """JSON or JSON Lines: instruction, input (optional), output_1, output_2; further fields are kept, those of an
    annotation written anew."""
    out: Path
    """Where the records go, with preference (1, 2, 1.5 = identical, null = no verdict), annotator, cost ..."""

    def run(self) -> Report:
        """Judges the pairs of a file and writes them with their verdicts.

        Raises:
            AlpacaFarmError: A file, an option or the server; nothing is written then, and answers so far are kept.
        """
        from . import annotations as files

        files.check_out(self.out, [self.pairs])
        pairs = files.read_pairs(self.pairs)
        judged = self.judge(pairs)
        files.write_annotations(self.out, files.annotate(pairs, judged.verdicts))
        return _report([f"written: {self.out}", *judged.summary()], judged, self.out)


@dataclass(frozen=True, kw_only=True)
class Evaluate(JudgeOptions):
    """A generator's win rate against references."""

    outputs: tyro.conf.Positional[Path]
    """JSON or JSON Lines of one generator: instruction, input (optional), output, generator."""
    reference: Path | None = None
    """The same file of the reference."""
    data: str | None = None
    """Instead, a data set with references: a folder or 'sandbox'; $ALPACAFARM_DATA if neither is given."""
    subset: bool = False
    """Judge the instructions of OUTPUTS alone; without it, each reference needs an output."""
    out: Path | None = None
    """Where the annotations go, as those of judge annotate."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.refuse_both("reference", "data")

    def run(self) -> Report:
        """Judges a generator's outputs against the references and makes its leaderboard row.

        Raises:
            AlpacaFarmError: A file, an option or the server; nothing is written then, and answers so far are kept.
        """
        from ..statistics import LEADERBOARD_COLUMNS, leaderboard_row, length_control_note
        from ..terminal import format_table
        from . import annotations as files

        data = self.data or (None if self.reference else os.environ.get(DATA_VARIABLE))
        if not data and not self.reference:
            raise DataError(
                "expected references: give --reference FILE, or --data with a folder or 'sandbox', or set "
                f"{DATA_VARIABLE} to a folder."
            )
        if self.out:
            files.check_out(self.out, [path for path in (self.outputs, self.reference) if path])
        pairs, generator, reference = files.read_contest(self.outputs, self.reference, data, subset=self.subset)
        judged = self.judge(pairs)
        if self.out:
            files.write_annotations(self.out, files.annotate(pairs, judged.verdicts))
        row = leaderboard_row(generator, judged.verdicts.scores, pairs.second, pairs.first)
        lines = [
            format_table(LEADERBOARD_COLUMNS, [row]),
            f"judge: {judged.label} | reference: {reference}",
            length_control_note(""),
            *([f"written: {self.out}"] if self.out else []),
            *judged.summary(generator),
        ]
        return _report(lines, judged, self.out)


def _report(lines: Sequence[str], judged: AnnotationReport, out: Path | None) -> Report:
    missing = judged.missing(out)
    return Report("\n".join(lines), notes=tuple(missing), status=1 if missing else 0)
