"""Self-rewarding rounds in the sandbox: gold, length and the judge's agreement with gold, by who rates."""
