"""For mkdocs: the page of all commands."""

import io
import os
import sys
from contextlib import redirect_stdout, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
STUDIES = sorted(each.parent.name for each in ROOT.glob("benchmarks/*/__main__.py")) + [
    each.stem for each in sorted(ROOT.glob("benchmarks/[!_]*.py")) if each.stem != "train"
]


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Adds what `--help` prints to the page of the command line."""
    if page.file.src_uri != "reference/command_line.md":
        return markdown
    sys.path.insert(0, str(ROOT))
    os.environ["COLUMNS"] = "110"
    from alpacafarm_env.__main__ import COMMANDS

    commands = [name for name in COMMANDS if name not in ("study", "leaderboard")]
    texts = [(f"alpacafarm {name}", _help("alpacafarm_env.__main__", *name.split())) for name in commands]
    texts += [(f"alpacafarm study {name}", _help(_main_of(name))) for name in STUDIES]
    return markdown + "".join(f"\n## {name}\n\n```text\n{text}\n```\n" for name, text in texts)


def _main_of(study: str) -> str:
    command = ROOT / "benchmarks" / study / "command.py"
    return f"alpacafarm_env.benchmarks.{study}" + (".command" if command.is_file() else "")


def _help(module: str, *args: str) -> str:
    printed, given = io.StringIO(), sys.argv
    sys.argv = [module, *args, "--help"]
    try:
        with redirect_stdout(printed), suppress(SystemExit):
            import_module(module).main()
    finally:
        sys.argv = given
    return printed.getvalue().strip()
