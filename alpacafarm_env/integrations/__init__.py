"""For other libraries: each module imports its own, and nothing else here imports any."""
