"""`python -m alpacafarm_env.benchmarks.method_ranking`."""

import sys

from .plan import main

if __name__ == "__main__":
    sys.exit(main())
