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
    show.add_argument("--num", type=_positive(int), default=5, metavar="N", help="how many instructions")
    show.add_argument("--seed", type=int, default=0, metavar="N", help="picks instructions and responses")
    show.add_argument("--temperature", type=_positive(float), default=0.7, metavar="T", help="of the policy's sampling")
    return parser


def _positive(kind: type[int] | type[float]) -> Callable[[str], int | float]:
    """A type of argparse: a number above zero."""

    def parse(text: str) -> int | float:
        try:
            value = kind(text)
        except ValueError:
            value = kind(0)
        if not 0 < value < float("inf"):
            raise argparse.ArgumentTypeError(f"expected a positive {kind.__name__}, got {text!r}")
        return value

    return parse


if __name__ == "__main__":
    sys.exit(main())
