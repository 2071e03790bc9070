"""Whether ratings teach a reward model more than the pairs they can be turned into."""
