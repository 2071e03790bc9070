"""The ledger: what was asked, answered and paid, in one SQLite file that processes share."""
