"""The conformance kit for dispatchers on GPUs: each protocol and wire of ``deepep``, and the others that run there."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator

import pytest
import torch
from crossdock.testing.conformance import Check, Outcome, PluginCase, run_check
from crossdock.testing.dispatcher_conformance import CHECKS
from crossdock.testing.world import RankPool

FP8_WIRE_TOLERANCE = 0.08
"""float8_e4m3 keeps 3 bits: 2**-4 of a value, on values up to the largest, and bf16 rounding."""
LOW_LATENCY_ROWS = 128
NEEDS_GPU = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
NEEDS_DEEP_EP = pytest.mark.skipif(importlib.util.find_spec("deep_ep") is None, reason="deep_ep is not installed")
CASES = [
    pytest.param(
        "deepep",
        {"mode": mode, "wire": wire, "low_latency_rows": LOW_LATENCY_ROWS},
        id=f"deepep-{mode}-{wire}",
        marks=NEEDS_DEEP_EP,
    )
    for mode in ("normal", "low_latency", "auto")
    for wire in ("bf16", "fp8")
]
CASES += [
    pytest.param("allgatherv", {}, id="allgatherv"),
    pytest.param("alltoallv", {}, id="alltoallv"),
    pytest.param("nvlink", {}, id="nvlink"),
]


@pytest.fixture(scope="module")
def gpu_pool() -> Iterator[Callable[[int], RankPool]]:
    pools: dict[int, RankPool] = {}

    def pool_of(world_size: int) -> RankPool:
        return pools.setdefault(world_size, RankPool(world_size, device="cuda"))

    yield pool_of
    for pool in pools.values():
        pool.close()


@pytest.mark.gpu
@NEEDS_GPU
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
@pytest.mark.parametrize(("name", "options"), CASES)
def test_the_dispatcher_conforms_on_gpus(
    name: str, options: dict[str, object], check: Check, gpu_pool: Callable[[int], RankPool]
) -> None:
    tolerance = FP8_WIRE_TOLERANCE if options.get("wire") == "fp8" else 0.0
    case = PluginCase(
        point="dispatcher", name=name, options=options, pool_of=gpu_pool, device="cuda", tolerance=tolerance
    )
    result = run_check(check, case)
    if result.outcome is Outcome.NOT_CHECKED:
        pytest.skip(result.message)
    assert result.outcome is Outcome.PASSED, result.message
