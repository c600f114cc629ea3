"""pytest fixtures for plugins' tests: ``from crossdock.testing.fixtures import rank_pool`` in a ``conftest.py``."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from crossdock.testing.world import RankPool


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[Callable[[int], RankPool]]:
    """``rank_pool(2)`` is the pool of two ranks, started once a session."""
    pools: dict[int, RankPool] = {}

    def pool_of(world_size: int) -> RankPool:
        return pools.setdefault(world_size, RankPool(world_size))

    yield pool_of
    for pool in pools.values():
        pool.close()
