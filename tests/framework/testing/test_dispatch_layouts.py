"""Which layouts the dispatchers' kit flies, where a plugin does not serve every number of ranks."""

from __future__ import annotations

import pkgutil

import pytest
import torch
from crossdock.testing.conformance import NotCheckable, PluginCase
from crossdock.testing.dispatch_layouts import layouts_of, two_ranks, world_sizes
from crossdock.testing.suites import checks_of
from crossdock.testing.world import RankPool


def no_pool(world_size: int) -> RankPool:
    raise AssertionError("a pool was asked for")


def case_of(name: str, device: str) -> PluginCase:
    return PluginCase(point="dispatcher", name=name, pool_of=no_pool, device=device)


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a machine with two GPUs and deep_ep says."""
    found = [*pkgutil.iter_modules(), pkgutil.ModuleInfo(pkgutil.get_importer("."), "deep_ep", ispkg=True)]  # type: ignore[arg-type]
    monkeypatch.setattr(pkgutil, "iter_modules", lambda: found)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


def test_a_number_of_ranks_that_is_refused_is_left_out(two_gpus: None) -> None:
    case = case_of("deepep", "cuda")
    assert world_sizes(case) == [2]
    assert layouts_of(case, 1) == []
    assert two_ranks(case).moe_ep_size == 2


def test_checks_are_made_where_any_number_of_ranks_is_served(two_gpus: None) -> None:
    check = next(check for check in checks_of("dispatcher") if "identity" in check.name)
    with pytest.raises(AssertionError, match="a pool was asked for"):
        check.run(case_of("deepep", "cuda"))


def test_every_layout_of_the_kit_is_flown_by_a_dispatcher_that_takes_all() -> None:
    case = case_of("allgatherv", "cpu")
    assert world_sizes(case) == [1, 2, 4]
    assert len(layouts_of(case, 4)) == 5


def test_a_dispatcher_of_another_device_says_so() -> None:
    with pytest.raises(NotCheckable, match="no layout of 1, 2, 4 ranks: runs on cuda only"):
        world_sizes(case_of("nvlink", "cpu"))
