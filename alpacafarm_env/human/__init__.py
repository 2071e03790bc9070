"""People as annotators: the page they judge on, what they said, and how they agree."""
