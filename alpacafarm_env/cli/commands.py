"""The commands `annotate`, `evaluate`, `ledger`, `export`, `merge` and `serve` of `python -m alpacafarm_env`.

Heavy modules are imported when a command runs: the command line's help needs none of them.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

from ..arguments import SEED, positive_number, real_number, whole_number
from ..data.forms import FORMATS
from ..data.load import DATA_VARIABLE
from ..errors import AlpacaFarmError, DataError, LedgerError
from ..llm.endpoint import OPENAI_KEY, require_key_variable
from ..llm.limits import ClientConfig
from ..plugins import find_attribute
from .serve import add_serve_arguments

if TYPE_CHECKING:
    from .annotation_report import AnnotationReport


_DEFAULTS: Final = ClientConfig()
_LIMITS: Final = ("max_concurrency", "attempt_timeout_s", "deadline_s", "requests_per_minute")
"""Options with the client's own defaults."""
MERGE: Final = "alpacafarm_env.agents.merge:merge_folder"
_PASSED: Final = (
    *("ledger", "pool", "models", "model", "base_url", "api_key_env", "allow_insecure", "seed", "budget_usd"),
    *("replay", "flip", "both_orders", "compat", *_LIMITS),
)
"""Options of `judge_pairs`."""
_EPILOG: Final = (
    "Answers are kept in the ledger: a command that was interrupted, or is given again, asks only what is missing. "
    "Exit status: 0 all pairs have a verdict, 1 some have none, 2 an error, 130 interrupted."
)


@dataclass(frozen=True)
class Report:
    """A command's output, notes for stderr, and exit status."""

    text: str
    notes: tuple[str, ...] = ()
    status: int = 0


def add_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the commands; each sets `run`, a function of the options that returns a `Report`."""
    text = "let LLM annotators say which of two outputs is better, for each pair of a file"
    pairs = _command(commands, "annotate", text, epilog=_EPILOG)
    text = "JSON or JSON Lines: instruction, input (optional), output_1, output_2; further fields are kept"
    pairs.add_argument("pairs", metavar="PAIRS", type=Path, help=text)
    text = "where the records go, with preference (1, 2, 1.5 = identical, null = no verdict), annotator, cost ..."
    pairs.add_argument("--out", metavar="FILE", type=Path, required=True, help=text)
    _add_pool_options(pairs)
    pairs.set_defaults(run=annotate)

    text = "one generator's win rate against reference outputs, judged by LLM annotators: a leaderboard's row"
    outputs = _command(commands, "evaluate", text, epilog=_EPILOG)
    text = "JSON or JSON Lines of one generator: instruction, input (optional), output, generator"
    outputs.add_argument("outputs", metavar="OUTPUTS", type=Path, help=text)
    source = outputs.add_mutually_exclusive_group()
    source.add_argument("--reference", metavar="FILE", type=Path, help="the same file of the reference")
    text = f"a data set with references: a folder or 'sandbox'; ${DATA_VARIABLE} if neither is given"
    source.add_argument("--data", metavar="NAME", help=text)
    text = "judge the instructions of OUTPUTS alone; without it, each reference needs an output"
    outputs.add_argument("--subset", action="store_true", help=text)
    outputs.add_argument("--out", metavar="FILE", type=Path, help="where the annotations go, as those of annotate")
    _add_pool_options(outputs)
    outputs.set_defaults(run=evaluate)

    spent = _command(commands, "ledger", "what was asked and paid, by host, model and annotator")
    spent.add_argument("--ledger", metavar="FILE", type=Path, help="the ledger (default: your own)")
    spent.set_defaults(run=ledger)

    text = "write a split as data for TRL or AlpacaFarm, or as prompts and a reward for verl or OpenRLHF"
    exported = _command(commands, "export", text)
    text = "who is to read them: trl and alpacafarm get demonstrations or preferences, verl and openrlhf prompts"
    exported.add_argument("--format", choices=["trl", "alpacafarm", "verl", "openrlhf"], required=True, help=text)
    text = "sft, preference, unlabeled, val or eval (default: unlabeled)"
    exported.add_argument("--split", default="unlabeled", metavar="NAME", help=text)
    text = "of trl and alpacafarm, the kind of file (default: jsonl); a hub-folder is Parquet with a dataset card"
    exported.add_argument("--to", choices=["jsonl", "parquet", "hub-folder"], help=text)
    exported.add_argument("--out", type=Path, required=True, metavar="DIR", help="where the files go")
    text = "a data set's name, folder or hub name (default: sandbox)"
    exported.add_argument("--dataset", default="sandbox", metavar="NAME", help=text)
    text = "who rewards: a name such as gold or win_rate, or a mapping as JSON, as gym.make takes them"
    exported.add_argument("--oracle", metavar="SPEC", help=f"{text}; trl and alpacafarm may do without")
    text = "seeds the oracle's draws (default: 0)"
    exported.add_argument("--seed", type=SEED, default=0, metavar="N", help=text)
    exported.set_defaults(run=export)

    text = "make a whole model of a LoRA adapter's folder, a policy's or a reward model's, and its base"
    joined = _command(commands, "merge", text)
    joined.add_argument("folder", metavar="FOLDER", type=Path, help="the adapter's")
    joined.add_argument("out", metavar="OUT", type=Path, help="a new folder for the whole model")
    joined.set_defaults(run=merge)

    served = _command(commands, "serve", "serve an environment's rewards over HTTP, to any trainer")
    add_serve_arguments(served)
    served.set_defaults(run=serve)


def annotate(options: argparse.Namespace) -> Report:
    """Judges the pairs of a file and writes them with their verdicts.

    Raises:
        AlpacaFarmError: A file, an option or the server; nothing is written then, and answers so far are kept.
    """
    from . import annotation_files as files

    files.check_out(options.out, [options.pairs])
    pairs = files.read_pairs(options.pairs)
    judged = _judge(options, pairs)
    files.write_annotations(options.out, files.annotate(pairs, judged.verdicts))
    notes = [f"{options.pairs}: its fields {', '.join(pairs.replaced)} are written anew."] if pairs.replaced else []
    return _report([f"written: {options.out}", *judged.summary()], judged, notes, options.out)


def evaluate(options: argparse.Namespace) -> Report:
    """Judges a generator's outputs against the references and makes its leaderboard row.

    Raises:
        AlpacaFarmError: A file, an option or the server; nothing is written then, and answers so far are kept.
    """
    from ..statistics import LEADERBOARD_COLUMNS, LENGTH_CONTROL, leaderboard_row
    from ..tables import format_table
    from . import annotation_files as files

    data = options.data or (None if options.reference else os.environ.get(DATA_VARIABLE))
    if not data and not options.reference:
        raise DataError(
            "expected references: give --reference FILE, or --data with a folder or 'sandbox', or set "
            f"{DATA_VARIABLE} to a folder."
        )
    if options.out:
        files.check_out(options.out, [path for path in (options.outputs, options.reference) if path])
    pairs, generator, reference = files.read_contest(options.outputs, options.reference, data, subset=options.subset)
    judged = _judge(options, pairs)
    if options.out:
        files.write_annotations(options.out, files.annotate(pairs, judged.verdicts))
    row = leaderboard_row(generator, judged.verdicts.scores, pairs.second, pairs.first)
    lines = [
        format_table(LEADERBOARD_COLUMNS, [row]),
        f"judge: {judged.label} | reference: {reference}",
        *judged.bounds(),
        f"{LENGTH_CONTROL}.",
        *([f"written: {options.out}"] if options.out else []),
        *judged.summary(generator),
    ]
    return _report(lines, judged, [], options.out)


def ledger(options: argparse.Namespace) -> Report:
    """The spending of a ledger, by host, model and annotator.

    Raises:
        LedgerError: There is no such ledger, or it cannot be read.
    """
    from ..llm.ledger import operations as sql
    from ..llm.ledger.file import default_path
    from ..llm.ledger.store import Ledger
    from ..tables import format_table

    path = options.ledger or default_path()
    if not os.path.lexists(path):
        raise LedgerError(f"There is no ledger at {path}. Name the --ledger of a run; the first run makes one.")
    with Ledger(path, replay=True) as opened:
        spending = opened.do(sql.spending).result()
    counts = ("answered", "failed", "unknown", "running", "questions", "prompt_tokens", "completion_tokens", "unpriced")
    columns = ("host", "model", "annotator", *counts, "usd")
    total = spending.total
    rows = [
        dict(zip(columns, [*names, *(getattr(tally, count) for count in counts), f"{tally.usd:.4f}"], strict=True))
        for names, tally in [*spending.groups.items(), (("total", "", ""), total)]
    ]
    lines = [f"{path}", format_table(columns, rows, left=3)]
    lines.append(
        "answered, failed, unknown, running: attempts at a request; questions: pairs or responses judged in those "
        "answered, a pair asked in both orders counted twice."
    )
    if total.unknown or total.running:
        reserved = total.unknown_usd + total.running_usd
        lines.append(
            f"Of the total, ${reserved:.4f} may not have been paid: attempts that are running, or ended without an "
            "answer that came through (unknown), count the most they can cost."
        )
    if total.unpriced:
        lines.append(f"Attempts that count nothing, as their models have no known price: {total.unpriced}.")
    return Report("\n".join(lines))


def merge(options: argparse.Namespace) -> Report:
    """Writes the whole model that an adapter and its base make.

    Raises:
        AlpacaFarmError: There is no adapter, no base, or no room for the model.
    """
    # The agents lie above the commands, so nothing of theirs is imported.
    find_attribute("function", MERGE)(options.folder, options.out)
    return Report(f"written: {options.out}, a whole model. Its README.md says how to load it.")


def export(options: argparse.Namespace) -> Report:
    """Writes a split's data, or its prompts and a reward, and says how they are read.

    Raises:
        AlpacaFarmError: The data, the oracle, the folder, or an option that the format does not have.
    """
    from . import export as files

    oracle = None if options.oracle is None else files.read_oracle(options.oracle)
    given = {"dataset": options.dataset, "split": options.split, "oracle": oracle, "seed": options.seed}
    if options.format in FORMATS:
        from .export_data import export_split

        written = export_split(options.format, to=options.to or "jsonl", out=options.out, **given)
        return Report("\n".join(f"written: {path}" for path in written))
    if oracle is None or options.to is not None:
        wanted = "an --oracle, for the rewards" if oracle is None else "no --to: it has one kind of file"
        raise DataError(f"--format {options.format}: expected {wanted}.")
    written = files.export(options.format, out=options.out, **given)
    if options.format == "verl":
        use = f"data.train_files={written[0]} reward.custom_reward_function.path={written[1]}"
    else:
        told = f"AlpacaFarm-PPO-v0 --dataset {options.dataset} --oracle '{options.oracle}' --seed {options.seed}"
        keys = "--data.input_key input --data.label_key label --data.apply_chat_template"
        use = f"--data.prompt_dataset {written[0]} {keys} --reward.remote_url URL"
        use += f"\nURL: printed by python -m alpacafarm_env serve {told} --tokenizer MODEL"
    return Report("\n".join([*(f"written: {path}" for path in written), f"{options.format}: {use}"]))


def serve(options: argparse.Namespace) -> Report:
    """Serves rewards until Ctrl-C, or until the process is asked to end.

    Raises:
        AlpacaFarmError: The data, the oracle, the tokenizer, or the address.
    """
    from .serve import run

    return Report("", status=run(options))


def _judge(options: argparse.Namespace, pairs: Any) -> AnnotationReport:
    from .annotation_report import judge_pairs

    if not options.replay:
        require_key_variable(options.api_key_env, "--api-key-env")
    if options.attempt_timeout_s > options.deadline_s:
        raise AlpacaFarmError(
            f"--timeout-s: expected at most the {options.deadline_s:g} s of --deadline-s, which one request has with "
            f"all its attempts, got {options.attempt_timeout_s:g}. Raise --deadline-s too."
        )
    return judge_pairs(pairs, **{name: getattr(options, name) for name in _PASSED})


def _report(lines: Sequence[str], judged: AnnotationReport, notes: list[str], out: Path | None) -> Report:
    missing = judged.missing(out)
    return Report("\n".join(lines), (*notes, *missing), 1 if missing else 0)


def _command(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], name: str, text: str, **more: Any
) -> argparse.ArgumentParser:
    # No abbreviations: --api-key would be read as --api-key-env, and the key printed as the name of a variable.
    return commands.add_parser(name, help=text, description=text, allow_abbrev=False, **more)


def _add_pool_options(parser: argparse.ArgumentParser) -> None:
    options = parser.add_argument_group("the annotators")
    text = (
        "ann (13 annotators, 25 %% noise), eval or alpaca_farm (without), greedy, weighted, or a YAML file "
        "(default: eval)"
    )
    options.add_argument("--pool", default="eval", metavar="NAME", help=text)
    text = (
        "the server's address up to /v1 (default: $OPENAI_BASE_URL, or OpenAI's own); what was answered at another "
        "spelling or port of it is asked again"
    )
    options.add_argument("--base-url", metavar="URL", help=text)
    played = options.add_mutually_exclusive_group()
    text = "take an http:// address of another machine, where anybody on the way can read the key and the texts"
    options.add_argument("--allow-insecure", action="store_true", help=text)
    text = "which model plays which role: openai, sandbox (for judge-server), or a YAML file (default: openai)"
    played.add_argument("--models", metavar="SPEC", help=text)
    played.add_argument("--model", metavar="NAME", help="one model for all roles")
    text = "probability that a verdict is flipped, 0 to 0.5 (default: the pool's own)"
    options.add_argument("--flip", type=real_number(0, 0.5), metavar="P", help=text)
    order = options.add_mutually_exclusive_group()
    order.add_argument("--both-orders", action="store_true", help="ask each pair in both orders and average")
    text = "draw annotators, orders and noise as the released AlpacaFarm does"
    order.add_argument("--compat", choices=["alpacafarm"], help=text)
    text = "another seed is another opinion on the same pairs, asked and paid for anew (default: 0)"
    options.add_argument("--seed", type=SEED, default=0, metavar="N", help=text)

    spending = parser.add_argument_group("answers and money")
    text = (
        "keeps costs, and answers by server address (--base-url as given), model, prompt and seed (default: your own)"
    )
    spending.add_argument("--ledger", type=Path, metavar="FILE", help=text)
    text = "what the ledger may have spent in all, US dollars; a request that could pass it is not sent"
    spending.add_argument("--budget-usd", type=_dollars, metavar="X", help=text)
    spending.add_argument("--replay", action="store_true", help="answer from the ledger alone, ask nothing")
    text = f"requests in flight at once, each reserving its highest price (default: {_DEFAULTS.max_concurrency})"
    spending.add_argument("--max-concurrency", type=whole_number(1), metavar="N", help=text)
    text = "requests started in a minute at most (default: any number)"
    spending.add_argument("--requests-per-minute", type=positive_number, metavar="X", help=text)
    text = f"seconds for one attempt, its whole reply included (default: {_DEFAULTS.attempt_timeout_s:g})"
    spending.add_argument("--timeout-s", type=positive_number, dest="attempt_timeout_s", metavar="S", help=text)
    text = f"seconds for one request, its repeats and waits included (default: {_DEFAULTS.deadline_s:g})"
    spending.add_argument("--deadline-s", type=positive_number, metavar="S", help=text)
    text = f"the environment variable that holds the API key (default: {OPENAI_KEY})"
    spending.add_argument("--api-key-env", default=OPENAI_KEY, metavar="NAME", help=text)
    parser.set_defaults(**{name: getattr(_DEFAULTS, name) for name in _LIMITS})
    parser.add_argument("--api-key", nargs="?", action=_RefuseKey, help=argparse.SUPPRESS)


def _dollars(text: str) -> float:
    from ..llm.ledger.operations import MAX_USD

    return real_number(0, MAX_USD)(text)


class _RefuseKey(argparse.Action):
    """Refuses --api-key without printing its value."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        parser.error(
            "a key is never an argument, where the list of processes shows it: put it into the environment variable "
            f"{OPENAI_KEY}, or into another one and name that by --api-key-env"
        )
