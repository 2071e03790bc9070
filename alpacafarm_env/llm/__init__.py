"""Requests to served models: an endpoint, a client that loses nothing, and the ledger of what was answered and paid."""
