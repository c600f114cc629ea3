"""Planner ``elastic``: the global balancing over living GPUs only."""
