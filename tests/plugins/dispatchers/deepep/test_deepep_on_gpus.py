"""The conformance kit for dispatchers on GPUs: each protocol and wire of ``deepep``, and the others that run there."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator

import attrs
import pytest
import torch
from crossdock.groups import resolve_sizes
from crossdock.testing.conformance import Check, Outcome, PluginCase, run_check
from crossdock.testing.dispatch_flights import build_dispatcher
from crossdock.testing.dispatch_scenarios import DispatchScenario, on_device, routed_rows, toy_experts
from crossdock.testing.dispatcher_conformance import CHECKS
from crossdock.testing.world import RankContext, RankPool
from crossdock.types.dispatch import DispatchStep

FP8_WIRE_TOLERANCE = 0.08
"""float8_e4m3 keeps 3 bits: 2**-4 of a value, on values up to the largest, and bf16 rounding."""
LOW_LATENCY_ROWS = 128
NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, which two ranks can share")
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
    pytest.param("nvlink", {}, id="nvlink-native"),
    pytest.param("nvlink", {"wire": "fp8"}, id="nvlink-fp8"),
]


@pytest.fixture(scope="module")
def gpu_pool() -> Iterator[Callable[[int], RankPool]]:
    pools: dict[int, RankPool] = {}

    def pool_of(world_size: int) -> RankPool:
        return pools.setdefault(world_size, RankPool(world_size, device="cuda"))

    yield pool_of
    for pool in pools.values():
        pool.close()


def replayed(context: RankContext) -> float:
    """Largest difference between a captured low-latency round trip, replayed on other rows, and the same rows eager."""
    sizes = resolve_sizes(ranks=2, attn_dp_size=2)
    scenario = on_device(DispatchScenario(sizes=sizes, live_tokens=(LOW_LATENCY_ROWS,) * 2), "cuda")
    options = {"mode": "low_latency", "wire": "bf16", "low_latency_rows": LOW_LATENCY_ROWS}
    dispatcher = build_dispatcher(context, "deepep", options, scenario)
    layout, step = dispatcher.capabilities.input_rows, DispatchStep(bucket=LOW_LATENCY_ROWS)
    batches = [routed_rows(attrs.evolve(scenario, seed=seed)).held(layout, scenario, context.rank) for seed in (1, 2)]
    experts = toy_experts(scenario)
    static = [tensor.clone() for tensor in attrs.astuple(batches[0], recurse=False)]

    def round_trip() -> torch.Tensor:
        received = dispatcher.dispatch_end(dispatcher.dispatch_begin(static[0], static[1], static[2], step, 0))
        out = experts.run(received, sizes, context.place(sizes))
        return dispatcher.combine_end(dispatcher.combine_begin(out, received)).value

    round_trip()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = round_trip()
    worst = 0.0
    for batch in (*batches, *batches):
        for target, source in zip(static, attrs.astuple(batch, recurse=False), strict=True):
            target.copy_(source)
        graph.replay()
        captured = result.clone()
        worst = max(worst, float((captured - round_trip()).abs().max()))
    return worst


@pytest.mark.gpu
@NEEDS_GPU
@NEEDS_DEEP_EP
def test_a_captured_low_latency_round_trip_is_the_eager_one(gpu_pool: Callable[[int], RankPool]) -> None:
    assert max(gpu_pool(2).run(replayed)) == 0.0


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
