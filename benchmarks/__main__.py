"""`python -m alpacafarm_env.benchmarks [NAME]`: runs a study, or says which there are."""

import ast
import sys
from collections.abc import Callable, Sequence
from dataclasses import make_dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, get_type_hints

from ..__main__ import main as run_command_line
from ..arguments import match_name


def main(args: Sequence[str] = ()) -> int:
    """Runs the study that the first word names, with the options that follow; lists them all without a name."""
    studies = summaries()
    if not args or args[0] in ("-h", "--help"):
        print(f"Each is a command, alpacafarm study NAME or python -m {__package__}.NAME, and says more with --help:")
        print(*(f"  {name:<24}{about}" for name, about in studies.items()), sep="\n")
        return 0
    module = entry(match_name("study", args[0], studies))
    sys.argv[1:] = args[1:]
    return int(module.main())


def entry(name: str) -> Any:
    """The module of a study whose `main` is its command."""
    inner = ".__main__" if (Path(__file__).parent / name).is_dir() else ""
    return import_module(f"{__package__}.{name}{inner}")


def options_of(command: Callable[..., int]) -> Any:
    """The options of a command's function, which its module gives to `run(options)`."""
    run = getattr(import_module(command.__module__), "run", None)
    return get_type_hints(run)["options"] if run else make_dataclass("NoOptions", [])


def summaries() -> dict[str, str]:
    """Study -> the first line of what it says about itself. Not imported: torch takes seconds."""
    root = Path(__file__).parent
    files = {path.parent.name: path.with_name("__init__.py") for path in root.glob("*/__main__.py")}
    files |= {path.stem: path for path in root.glob("[!_]*.py") if path.stem != "train"}
    docs = {name: ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) for name, path in files.items()}
    return {name: str(docs[name]).splitlines()[0] for name in sorted(docs)}


if __name__ == "__main__":
    sys.exit(run_command_line(["study", *sys.argv[1:]]))
