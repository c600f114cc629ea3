"""Planner ``global``: DeepSeek's balancing over all GPUs alike."""
