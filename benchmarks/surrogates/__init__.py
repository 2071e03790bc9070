"""Reward models on features of texts, which train in a second: features, linear and boosted trees, best-of-n curves."""
