"""Planner ``crossdock``: balance near the limit, few moves, nodes, forecasts."""
