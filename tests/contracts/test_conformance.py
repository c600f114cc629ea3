"""Every installed plugin passes the conformance suite of its point; a new plugin joins without an edit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from crossdock.points import POINTS
from crossdock.registry import installed
from crossdock.testing.conformance import Check, Outcome, PluginCase, run_check
from crossdock.testing.suites import SUITES, checks_of
from crossdock.testing.world import RankPool

CASES = [
    pytest.param(plugin.point, plugin.name, check, id=f"{plugin.point}-{plugin.name}-{check.name}")
    for point in POINTS
    for plugin in installed(point)
    for check in checks_of(point)
]


@pytest.mark.parametrize(("point", "name", "check"), CASES)
def test_the_plugin_conforms(point: str, name: str, check: Check, rank_pool: Callable[[int], RankPool]) -> None:
    result = run_check(check, PluginCase(point=point, name=name, pool_of=rank_pool))
    if result.outcome is Outcome.NOT_CHECKED:
        pytest.skip(result.message)
    assert result.outcome is Outcome.PASSED, result.message


def test_every_point_has_a_suite() -> None:
    assert set(SUITES) == set(POINTS)
