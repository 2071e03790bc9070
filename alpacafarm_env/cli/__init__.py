"""The commands `annotate`, `evaluate`, `ledger` and `judge-server`: options, files, progress and reports."""
