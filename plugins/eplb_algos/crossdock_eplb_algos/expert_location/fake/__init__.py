"""Routing overwritten with random scores, to measure a perfectly mixed load."""
