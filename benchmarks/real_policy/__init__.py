"""The study real_policy: a real language model, optimized against reward models of gold's noisy labels."""
