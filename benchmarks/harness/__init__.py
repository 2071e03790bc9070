"""What every study shares: cells and their storage, one runner, options, statistics, plots, report."""
