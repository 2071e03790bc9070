"""`python -m alpacafarm_env.benchmarks`: which commands there are."""

import ast
import sys
from pathlib import Path


def main() -> int:
    """Prints the commands with the first line of what each says about itself; 2 if anything else was asked."""
    root = Path(__file__).parent
    packages = {path.parent.name: path.with_name("__init__.py") for path in root.glob("*/__main__.py")}
    commands = packages | {path.stem: path for path in root.glob("[!_]*.py")}
    print(f"Each is a command, python -m {__package__}.NAME, and says more with --help:")
    for name, path in sorted(commands.items()):
        about = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))  # not imported: torch takes seconds
        print(f"  {name:<24}{str(about).splitlines()[0]}")
    return 0 if len(sys.argv) == 1 else 2


if __name__ == "__main__":
    sys.exit(main())
