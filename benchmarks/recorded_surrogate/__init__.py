"""Reward models learned from recorded verdicts: what they know beyond length, and what their best is worth."""
