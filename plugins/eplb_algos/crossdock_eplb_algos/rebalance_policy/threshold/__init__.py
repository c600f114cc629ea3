"""Rebalances when the load is less even than a threshold."""
