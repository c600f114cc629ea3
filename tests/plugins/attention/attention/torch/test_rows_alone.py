"""``rows = "alone"`` is the same attention: the kit of the point holds for it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from crossdock.testing.conformance import Check, Outcome, PluginCase, run_check
from crossdock.testing.suites import SUITES
from crossdock.testing.world import RankPool


@pytest.mark.parametrize("decode", ["auto", "gather"])
@pytest.mark.parametrize("check", SUITES["attention"](), ids=lambda check: check.name)
def test_the_backend_conforms_row_by_row(check: Check, decode: str, rank_pool: Callable[[int], RankPool]) -> None:
    options = {"rows": "alone", "decode": decode}
    result = run_check(check, PluginCase(point="attention", name="torch", options=options, pool_of=rank_pool))
    if result.outcome is Outcome.NOT_CHECKED:
        pytest.skip(result.message)
    assert result.outcome is Outcome.PASSED, result.message
