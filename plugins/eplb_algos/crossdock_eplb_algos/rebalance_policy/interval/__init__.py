"""Rebalances at every decision."""
