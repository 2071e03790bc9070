"""Every method of the paper, trained, decoded and ranked by simulated and by human feedback."""
