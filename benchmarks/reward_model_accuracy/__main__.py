"""`python -m alpacafarm_env.benchmarks.reward_model_accuracy`."""

import sys

from .command import main

if __name__ == "__main__":
    sys.exit(main())
