"""The package's command line: `alpacafarm COMMAND`, or `python -m alpacafarm_env COMMAND`."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from . import __version__
from .arguments import match_name
from .errors import AlpacaFarmError

if TYPE_CHECKING:
    from .cli.options import Report

EPILOGS: Final = {
    "judge": "Answers are kept in the ledger: a command that was interrupted, or is given again, asks only what is "
    "missing. Exit status: 0 all pairs have a verdict, 1 some have none, 2 an error, 130 interrupted.",
    "annotate-human": "Every answer is stored at once, in a database beside --out: stop the command, or kill it, at "
    "any time, and give it again to go on at the same address. --out has all labels so far when the command starts, "
    "when it ends, and after --export, which may be given while it serves; as long as there are none, no such file is "
    "made.",
}
COMMANDS: Final[Mapping[str, tuple[str, str]]] = {
    "train": ("benchmarks.train:main", "train a policy or a reward model, in the sandbox or on your own data"),
    "study": ("benchmarks.__main__:main", "run a study, named by the next word; without one, list them all"),
    "leaderboard": ("benchmarks.leaderboard:main", "replay recorded judgements of published responses"),
    "judge annotate": ("cli.judge:Annotate", "let LLM annotators say which output is better, for each pair of a file"),
    "judge evaluate": ("cli.judge:Evaluate", "one generator's win rate against references, by LLM annotators"),
    "ledger": ("cli.commands:ShowLedger", "what was asked and paid, by host, model and annotator"),
    "annotate-human": ("human.command:AnnotateHuman", "let people say which output is better, or how good one is"),
    "look": ("look.command:Look", "write a page about runs: their curves, and the responses of any step, sorted"),
    "show": ("cli.commands:Show", "print instructions of the sandbox, responses, gold, and annotators' opinions"),
    "data alpaca-eval": ("cli.commands:DataAlpacaEval", "make recorded judgements of a checkout of AlpacaEval"),
    "export": ("cli.commands:Export", "write a split as data for TRL or AlpacaFarm, or prompts for verl or OpenRLHF"),
    "merge": ("cli.commands:Merge", "make a whole model of a LoRA adapter and its base"),
    "serve": ("cli.commands:Serve", "serve an environment's rewards over HTTP, to any trainer"),
    "judge-server": ("cli.commands:ServeJudges", "serve the sandbox's annotators over an OpenAI-compatible API"),
}
"""Command -> where its options or its function are, and what it does."""
_MOVED: Final = {"annotate": ["judge", "annotate"], "evaluate": ["judge", "evaluate"]}
_COMPLETION: Final = "--tyro-print-completion"


def main(args: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status.

    0: done. 1: done, but not all pairs have a verdict. 2: an error in what was asked for. 130: interrupted.
    """
    try:
        return _run(list(sys.argv[1:] if args is None else args))
    except KeyboardInterrupt as stop:
        print(f"interrupted: {stop}" if str(stop) else "interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader has seen enough: `... show | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python would complain when it flushes
        return 0
    except (AlpacaFarmError, OSError) as error:  # an OSError names its file: a full disk, a folder that may not be read
        print(f"error: {error}", file=sys.stderr)
        return 2


def _run(words: list[str]) -> int:
    if any(word.partition("=")[0].replace("_", "-") == "--api-key" for word in words):  # its value is not repeated
        raise AlpacaFarmError(
            "--api-key: a key is never an argument, where the list of processes shows it. Put it into the environment "
            "variable OPENAI_API_KEY, or into another one and name that by --api-key-env."
        )
    if words[:1] == ["--version"]:
        print(f"alpacafarm_env {__version__}")
        return 0
    if words[:1] == [_COMPLETION]:
        from .cli.options import print_completion

        print_completion(_all_options(), words)
    words = [*_MOVED.get(words[0], words[:1]), *words[1:]] if words else []
    name, words = _take_command(words)
    if name not in COMMANDS:
        print(_listing(name))
        return 0
    target, about = load(name), COMMANDS[name][1]
    if not isinstance(target, type):
        return int(target(words))
    from .cli.options import parse

    about = f"{about[0].upper()}{about[1:]}. {EPILOGS.get(name.split()[0], '')}"
    report: Report = parse(target, words, prog=f"alpacafarm {name}", description=about).run()
    print(*report.notes, sep="\n", end="\n" * bool(report.notes), file=sys.stderr, flush=True)
    for block in filter(None, (report.text, *report.blocks)):
        print(block, flush=True)
    return report.status


def load(name: str) -> Any:
    """A command's options, a type, or its function of the words that follow."""
    module, _, attribute = COMMANDS[name][0].partition(":")
    return getattr(import_module(f"{__package__}.{module}"), attribute)


def _all_options() -> dict[str, Any]:
    """Command, of studies each, -> its options."""
    module = import_module(f"{__package__}.benchmarks.__main__")
    loaded = {name: load(name) for name in COMMANDS if name != "study"}
    own = {name: each if isinstance(each, type) else module.options_of(each) for name, each in loaded.items()}
    return own | {f"study {name}": module.options_of(module.entry(name).main) for name in module.summaries()}


def _take_command(words: Sequence[str]) -> tuple[str, list[str]]:
    """The command that the words begin with, or as much of it as they name: "", "judge"; and the words that follow."""
    name, rest = "", list(words)
    while name not in COMMANDS and rest and rest[0] not in ("-h", "--help"):
        nexts = [word for word, *_ in (each.split() for each in _below(name))]
        name = f"{name} {match_name('command', rest.pop(0), dict.fromkeys(nexts))}".strip()
    return name, rest


def _below(name: str) -> dict[str, str]:
    """The commands that begin with `name`, without it, and what they do."""
    start = f"{name} ".lstrip()
    return {each.removeprefix(start): about for each, (_, about) in COMMANDS.items() if each.startswith(start)}


def _listing(name: str) -> str:
    usage = f"usage: {' '.join(['alpacafarm', *name.split()])} COMMAND [OPTIONS]"
    rows = [f"  {each:<18}{about}" for each, about in _below(name).items()]
    more = f"COMMAND --help says more; --version prints the version; {_COMPLETION} bash (zsh, tcsh) a completion."
    return "\n".join([usage, "", "AlpacaFarm as Gymnasium environments.", "", "commands:", *rows, "", more])


if __name__ == "__main__":
    sys.exit(main())
