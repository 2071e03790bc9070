"""How often the sandbox's reward models are right: accuracy against gold on fresh pairs, with intervals."""
