"""For mkdocs: the page of all commands."""

import io
import os
import sys
from contextlib import redirect_stdout, suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Adds what `--help` prints to the page of the command line."""
    if page.file.src_uri != "reference/command_line.md":
        return markdown
    sys.path.insert(0, str(ROOT))
    os.environ["COLUMNS"] = "110"
    from alpacafarm_env.__main__ import COMMANDS
    from alpacafarm_env.benchmarks.__main__ import summaries

    commands = [name for name in COMMANDS if name not in ("study", "leaderboard")]
    texts = {name: _help(*name.split()) for name in (*commands, *(f"study {name}" for name in summaries()))}
    return markdown + "".join(f"\n## alpacafarm {name}\n\n```text\n{text}\n```\n" for name, text in texts.items())


def _help(*words: str) -> str:
    from alpacafarm_env.__main__ import main

    printed, given = io.StringIO(), sys.argv
    sys.argv = ["alpacafarm", *words, "--help"]
    try:
        with redirect_stdout(printed), suppress(SystemExit):
            main()
    finally:
        sys.argv = given
    return printed.getvalue().strip()
