"""Planner ``hierarchical``: DeepSeek's balancing with expert groups kept on nodes."""
