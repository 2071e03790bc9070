"""Does noise in the labels make best-of-n over-optimize on real text? GPT-4's recorded verdicts, flipped."""
