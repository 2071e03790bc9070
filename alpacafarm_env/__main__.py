"""The package's command line: `python -m alpacafarm_env show` prints the sandbox readably."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence

from .errors import AlpacaFarmError


def main(args: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status: 0, or 2 for an error in what was asked for."""
    parser = _parser()
    options = parser.parse_args(args)
    if options.command is None:
        parser.print_help()
        return 0
    try:
        _show(options)
    except AlpacaFarmError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader has seen enough: `... show | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python would complain when it flushes
    return 0


def _show(options: argparse.Namespace) -> None:
    from transformers.utils import logging

    from .sandbox.show import show

    hide_progress: Callable[[], None] = logging.disable_progress_bar
    hide_progress()  # a bar for loading 2 MB of weights only gets between the lines
    for block in show(options.split, num=options.num, seed=options.seed, temperature=options.temperature):
        print(block, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m alpacafarm_env", description="AlpacaFarm as Gymnasium environments.")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    text = (
        "print instructions of the sandbox, a reference, a policy's response, its gold, and every annotator's opinion"
    )
    show = commands.add_parser(
        "show", help=text, description=text, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    show.add_argument("--split", default="eval", help="sft, preference, unlabeled, val or eval")
    show.add_argument("--num", type=_positive, default=5, metavar="N", help="how many instructions")
    show.add_argument("--seed", type=int, default=0, metavar="N", help="picks instructions and responses")
    text = "of the policy's sampling; 0 for its likeliest response"
    show.add_argument("--temperature", type=_temperature, default=0.7, metavar="T", help=text)
    return parser


def _positive(text: str) -> int:
    """A type of argparse: a whole number above zero."""
    value = int(text) if text.strip().isdecimal() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a positive int, got {text!r}")
    return value


def _temperature(text: str) -> float:
    """A type of argparse: what `sandbox.show.check_temperature` accepts."""
    from .sandbox.show import check_temperature

    try:
        return check_temperature(float(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


if __name__ == "__main__":
    sys.exit(main())
