"""The page on which runs are looked at: their curves, and responses that they kept."""
