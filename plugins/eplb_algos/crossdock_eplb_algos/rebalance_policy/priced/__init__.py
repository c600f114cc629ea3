"""Rebalances when what a plan wins is more than what it costs to get there."""
