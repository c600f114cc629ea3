"""Fixtures of the whole test tree."""

from crossdock.testing.fixtures import rank_pool

__all__ = ["rank_pool"]
