"""The ground of every study: cells and their storage, one runner, options, statistics, plots, the page."""
