"""Which method over-optimizes least: all of them on one gold axis."""
