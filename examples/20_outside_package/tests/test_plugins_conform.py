"""Each plugin of this package passes the conformance suite of its point."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from crossdock.testing.conformance import Check, Outcome, PluginCase, run_check
from crossdock.testing.suites import checks_of, rank_pools
from crossdock.testing.world import RankPool

PLUGINS = (("dispatcher", "gather_scatter"), ("padding", "nearly_equal"), ("strategy", "by_layer"))
CASES = [
    pytest.param(point, name, check, id=f"{point}-{check.name}")
    for point, name in PLUGINS
    for check in checks_of(point)
]


@pytest.fixture(scope="module")
def pool_of() -> Iterator[Callable[[int], RankPool]]:
    with rank_pools() as pools:
        yield pools


@pytest.mark.parametrize(("point", "name", "check"), CASES)
def test_the_plugin_conforms(point: str, name: str, check: Check, pool_of: Callable[[int], RankPool]) -> None:
    result = run_check(check, PluginCase(point=point, name=name, pool_of=pool_of))
    if result.outcome is Outcome.NOT_CHECKED:
        pytest.skip(result.message)
    assert result.outcome is Outcome.PASSED, result.message
