"""`python -m alpacafarm_env.benchmarks.recorded_surrogate`."""

import sys

from .command import main

if __name__ == "__main__":
    sys.exit(main())
