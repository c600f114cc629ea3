"""Placement planners (point ``eplb_algo``), one folder each."""
