"""How judges judge, beside the paper's: agreement, bias, variance, and likings for place, length and lists."""
