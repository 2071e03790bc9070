"""One command per table or figure: `python -m alpacafarm_env.benchmarks.<name> --help`."""
