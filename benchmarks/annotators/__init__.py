"""How judges judge, next to the paper's: agreement, bias, variance, and likings for place, length and lists."""
