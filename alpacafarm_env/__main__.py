"""The package's command line, `python -m alpacafarm_env COMMAND`.

`show` prints the sandbox; `annotate` and `evaluate` let LLM annotators judge, `ledger` says what that cost, and
`judge-server` is a server to try them on; `annotate-human` lets people judge. `export` and `serve` hand data and
rewards to other frameworks; `merge` makes a whole model of an adapter and its base.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence

from . import __version__
from .arguments import SEED, whole_number
from .cli.commands import Report, add_commands
from .errors import AlpacaFarmError
from .human.command import add_command as add_human_command


def main(args: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status.

    0: done. 1: done, but not all pairs have a verdict. 2: an error in what was asked for. 130: interrupted.
    """
    given = list(sys.argv[1:] if args is None else args)
    parser = _parser(given[:1])
    options = parser.parse_args(given)
    if options.command is None:
        parser.print_help()
        return 0
    report = Report("")
    try:
        report = options.run(options)
        print(*report.notes, sep="\n", end="\n" * bool(report.notes), file=sys.stderr, flush=True)
        print(report.text, end="\n" * bool(report.text), flush=True)
    except KeyboardInterrupt as stop:
        print(f"interrupted: {stop}" if str(stop) else "interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader has seen enough: `... show | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python would complain when it flushes
    except (AlpacaFarmError, OSError) as error:  # an OSError names its file: a full disk, a folder that may not be read
        print(f"error: {error}", file=sys.stderr)
        return 2
    return report.status


def _show(options: argparse.Namespace) -> Report:
    from transformers.utils import logging

    from .sandbox.show import show

    hide_progress: Callable[[], None] = logging.disable_progress_bar
    hide_progress()  # a bar for 2 MB of weights
    for block in show(options.split, num=options.num, seed=options.seed, temperature=options.temperature):
        print(block, flush=True)
    return Report("")


def _serve(options: argparse.Namespace) -> Report:
    from .judge_server.server import run_server

    given = {name: value for name, value in vars(options).items() if name not in ("command", "run")}
    return Report("", status=run_server(**given))


def _parser(chosen: Sequence[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m alpacafarm_env", description="AlpacaFarm as Gymnasium environments.")
    parser.add_argument("--version", action="version", version=f"alpacafarm_env {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    text = (
        "print instructions of the sandbox, a reference, a policy's response, its gold, and every annotator's opinion"
    )
    show = commands.add_parser(
        "show", help=text, description=text, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    show.add_argument("--split", default="eval", help="sft, preference, unlabeled, val or eval")
    show.add_argument("--num", type=whole_number(1), default=5, metavar="N", help="how many instructions")
    show.add_argument("--seed", type=SEED, default=0, metavar="N", help="picks instructions and responses")
    text = "of the policy's sampling; 0 for its likeliest response"
    show.add_argument("--temperature", type=_temperature, default=0.7, metavar="T", help=text)
    show.set_defaults(run=_show)
    add_commands(commands)
    add_human_command(commands)
    text = "serve the sandbox's annotators over an OpenAI-compatible API on this machine"
    serve = commands.add_parser("judge-server", help=text, description=text)
    serve.set_defaults(run=_serve)
    if "judge-server" in chosen:  # its options come from a module that takes a while to load
        from .judge_server.server import add_arguments

        add_arguments(serve)
    return parser


def _temperature(text: str) -> float:
    from .sandbox.show import check_temperature

    try:
        return check_temperature(float(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


if __name__ == "__main__":
    sys.exit(main())
