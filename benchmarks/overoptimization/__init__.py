"""The over-optimization study: what a noisy reward does to a policy that is optimized against it for too long."""
