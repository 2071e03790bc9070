"""The commands `annotate`, `evaluate` and `ledger`: options, files, progress and reports."""
