"""Annotations on the command line: pairs and outputs come in and are judged, annotations and a report go out.

Annotations are the records as they came, followed by these fields:

| field | value |
|---|---|
| preference | 1 = output_1, 2 = output_2, 1.5 = identical, between = 1 + P(output_2 preferred), null = no verdict |
| annotator | who judged; null: nobody was asked (identical, or noise) |
| shown_first | "output_1" or "output_2"; "both" where both orders were asked; null: nobody was asked |
| noised | the preference is a coin, see `oracles.judges.Flip` |
| cost_usd | of this run, replies without a verdict included; null: the model has no price |
| cached | answered before, nothing was asked |
| unscored_reason | null: there is a verdict |
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ..annotators.config import load_models, load_pool
from ..annotators.pool import make_pool
from ..annotators.served import Progress
from ..data.dataset import Dataset, RowDataset, instruction_in, join_outputs, read_outputs
from ..data.files import read_records, stem_of, write_atomic
from ..data.load import load_dataset
from ..data.schema import PAIR, TEXT, Fault, Field, Row, check_rows, is_text, raise_faults
from ..errors import DataError, PoolError, PriceError
from ..instructions import Instruction
from ..judge_server.sandbox_judge import BY_TASTE
from ..llm.endpoint import Endpoint
from ..llm.ledger import Ledger
from ..llm.ledger import operations as sql
from ..oracles.base import UNSCORED_REASON, Verdicts, compare
from ..oracles.judges import NO_VERDICT
from ..sandbox.tasks import known
from ..statistics import WinRateSummary, win_rate
from ..terminal import make_bar

FIELDS: Final = ("preference", "annotator", "shown_first", "noised", "cost_usd", "cached", "unscored_reason")
OUT_SUFFIXES: Final = (".json", ".jsonl")
_GENERATOR: Final = (Field("generator", TEXT, is_text, ""),)
_SHOWN: Final = {"a": "output_1", "b": "output_2", "": None}
_FORMAT = "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} pairs, {elapsed} gone, {remaining} left{postfix}"
_LOG_S = 5.0


@dataclass(frozen=True)
class Pairs:
    """The pairs to judge and the records to write, without the fields of an annotation."""

    records: Sequence[Mapping[str, Any]]
    instructions: Sequence[Instruction]
    first: Sequence[str]
    second: Sequence[str]


def read_pairs(path: Path) -> Pairs:
    """The pairs of a file of records with instruction, input (optional), output_1 and output_2.

    Raises:
        DataError: The file cannot be read, or records are faulty; names them.
    """
    rows, kept = read_rows(path, PAIR)
    return Pairs(
        [{name: value for name, value in record.items() if name not in FIELDS} for record in kept],
        [instruction_in(row) for row in rows],
        [row["output_1"] for row in rows],
        [row["output_2"] for row in rows],
    )


def read_rows(path: Path, fields: Sequence[Field]) -> tuple[list[Row], list[dict[str, Any]]]:
    """The checked rows of a file, and the records as they came, which can be written again.

    Raises:
        DataError: The file cannot be read, or records are faulty; names them.
    """
    records = read_records(path)
    rows = check_rows(records, fields, str(path))
    kept: list[dict[str, Any]] = [records[row.number - 1] for row in rows]  # type: ignore[misc]
    check_writable([row.number for row in rows], kept, str(path))
    return rows, kept


def read_contest(
    outputs: Path, reference: Path | None, data: str | None, *, subset: bool = False
) -> tuple[Pairs, str, str]:
    """References (output_1) and one generator's outputs (output_2), joined by their instructions' text.

    Args:
        outputs: A file of records with instruction, input (optional), output and generator (optional).
        reference: The same of the reference; or
        data: A dataset by name, see `load_dataset`: the references of its eval split.
        subset: Leave out references without an output, instead of the error.

    Returns:
        The pairs, the generator's name, the reference's name, of a subset with its size.

    Raises:
        DataError: A file cannot be read, a record is faulty, an instruction is missing, doubled or unknown, the outputs
            are of several generators, or the dataset has no references.
    """
    dataset: Dataset
    if reference is not None:
        dataset = RowDataset("reference", {"eval": (str(reference), read_records(reference))})
        name, of = _generator(reference), str(reference)
    else:
        dataset = load_dataset(str(data))
        name, of = str(getattr(dataset, "reference", dataset.name)), f"the eval split of {data}"
    instructions: Sequence[Instruction] = dataset.instructions("eval")
    references: Sequence[str] = dataset.references("eval")
    of_all = ""
    if subset:
        given, num = join_outputs(outputs, instructions, of=of), len(instructions)
        references = [text for each, text in zip(instructions, references, strict=True) if str(each) in given]
        instructions = [each for each in instructions if str(each) in given]
        of_all = f", {len(instructions)} of its {num} instructions"
    hint = " Give --subset to judge the instructions of your file alone."
    responses, generator = read_outputs(outputs, instructions, of=of, hint=hint), _generator(outputs)
    records = [
        {
            **({"dataset": instruction.source} if instruction.source else {}),
            "instruction": instruction.instruction,
            **({"input": instruction.input} if instruction.input else {}),
            "generator_1": name,
            "output_1": base,
            "generator_2": generator,
            "output_2": response,
        }
        for instruction, base, response in zip(instructions, references, responses, strict=True)
    ]
    return Pairs(records, instructions, references, responses), generator, name + of_all


def annotate(pairs: Pairs, verdicts: Verdicts) -> list[dict[str, Any]]:
    """The records with their verdicts, see the table above; `orders_agree` too where both orders were asked.

    `verdicts` are P(output_2 preferred), with the details of `AnnotatorPool`.
    """
    details = {key: np.asarray(values).tolist() for key, values in verdicts.details.items()}
    both = details.get("orders_agree")
    rows = []
    for n, (record, score) in enumerate(zip(pairs.records, verdicts.scores.tolist(), strict=True)):
        detail = {key: values[n] for key, values in details.items()}
        shown, cost = _SHOWN[detail.get("shown_first", "")], detail.get("cost_usd", 0.0)
        row = {
            **record,
            "preference": None if math.isnan(score) else int(1 + score) if score in (0, 1) else 1 + score,
            "annotator": detail.get("annotator") or None,
            "shown_first": "both" if both and shown else shown,
            "noised": bool(detail.get("noised", False)),
            "cost_usd": None if math.isnan(cost) else round(cost, 12),
            "cached": bool(detail.get("cached", False)),
            "unscored_reason": (detail.get(UNSCORED_REASON) or NO_VERDICT) if math.isnan(score) else None,
        }
        rows.append({**row, "orders_agree": both[n]} if both and shown else row)
    return rows


def check_out(out: Path, sources: Sequence[Path], fields: Sequence[str] = FIELDS) -> None:
    """Refuses a file that could not be written, or must not be overwritten, before anything is paid for.

    Ours are files whose records all have the `fields`.

    Raises:
        DataError: It has another suffix, no folder to lie in, is a folder, one of the `sources`, or holds something
            else than annotations.
    """
    if not out.name.endswith(OUT_SUFFIXES) or not stem_of(out):
        raise DataError(f"{out}: expected a file that ends in one of {', '.join(OUT_SUFFIXES)}, got {out.name!r}.")
    if not out.parent.is_dir():
        raise DataError(f"{out}: expected the folder {out.parent} to be there. Make it, or give another --out.")
    if any(out.exists() and source.exists() and out.samefile(source) for source in sources):
        raise DataError(f"{out}: expected another file than the input, which would be overwritten.")
    if out.exists() and not _is_ours(out, fields):
        raise DataError(
            f"{out}: it is there already and holds no annotations, or is damaged, so it is not overwritten: "
            "give another --out, or remove it."
        )


def write_annotations(out: Path, records: Sequence[Mapping[str, Any]]) -> None:
    """Writes records as JSON or JSON Lines, by the suffix; the whole file or nothing.

    Raises:
        DataError: It could not be written.
    """
    texts = [json.dumps(record, ensure_ascii=False, allow_nan=False) for record in records]
    text = "[\n" + ",\n".join(texts) + "\n]\n" if out.suffix == ".json" else "".join(f"{line}\n" for line in texts)
    try:
        write_atomic(out, text)
    except OSError as error:
        raise DataError(
            f"{out}: could not be written: {error}. The answers are kept: the same command asks nothing again."
        ) from error


def _is_ours(out: Path, fields: Sequence[str]) -> bool:
    """Whether a file is empty or holds annotations, which may be overwritten: their answers are in the ledger."""
    if not out.stat().st_size:
        return True
    try:
        records = read_records(out)
    except DataError:
        return False
    return all(isinstance(record, Mapping) and record.keys() >= set(fields) for record in records)


def check_writable(numbers: Sequence[int], records: Sequence[Mapping[str, Any]], source: str) -> None:
    """Further fields are written as they came, so they must be JSON; a NaN or a date of a Parquet file is not.

    Raises:
        DataError: Names the fields that are not, and the `numbers` of their records.
    """
    faults = []
    for number, record in zip(numbers, records, strict=True):
        for name, value in record.items():
            try:
                json.dumps({name: value}, ensure_ascii=False, allow_nan=False).encode()
            except (TypeError, ValueError) as error:
                wrong = f"{type(error).__name__}: {error}"
                faults.append(Fault(number, str(name), wrong, "a value that JSON can hold"))
    raise_faults(faults, source)


def _generator(path: Path) -> str:
    """Whose outputs a file holds; by default its own name."""
    rows = check_rows(read_records(path), _GENERATOR, str(path))
    names = list(dict.fromkeys(row["generator"] for row in rows))
    if len(names) > 1:
        shown = ", ".join(map(repr, names[:5])) + ", ..." * (len(names) > 5)
        raise DataError(f"{path}: expected the outputs of one generator, got those of {shown}. Split the file.")
    return names[0] or str(stem_of(path))


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
    foreign: int = 0
    """Instructions that the sandbox's annotators do not understand."""

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
            *[f"{self.foreign} instructions are not the sandbox's: its annotators judged {BY_TASTE}"][: self.foreign],
        ]
        if rate.num_unscored and noised.sum() == rate.num_total:
            lines.append(f"no win rate of {second}: no annotator judged, and verdicts by noise are coin flips")
        elif rate.num_total:
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
        foreign = sum(not known(each) for each in pairs.instructions) if "sandbox-" in str(played) else 0
        return AnnotationReport(verdicts, judge.name, options["seed"], endpoint.host, played, opened.path, usd, foreign)


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
