"""`python -m alpacafarm_env.benchmarks.win_rate_curve`."""

import sys

from .plan import main

if __name__ == "__main__":
    sys.exit(main())
