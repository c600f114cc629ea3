"""Grouped expert products on one GPU: ours, torch's ``_grouped_mm`` and, where installed, deep_gemm; microseconds a layer.

    python tests/benchmarks/gpu/experts.py --out FILE.json [--tune]

Random routing, bf16, both products with SwiGLU and the weighted sum for ours; the two products alone (rows already sorted, no
activation, no sum) for the libraries, so their figures flatter them. Both take turns at the power limit (``turns``); parts are medians of
graph replays, weights far larger than L2. ``--tune`` walks the tile space at each size and prints the best.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import torch
from crossdock_models.experts.triton.kernels.block_order import BlockOrder, block_order
from crossdock_models.experts.triton.kernels.few_rows import FewTile, few_rows_swiglu
from crossdock_models.experts.triton.kernels.grouped_large import (
    LargeTiles,
    choose_large_tiles,
    large_down,
    large_gate_up,
)
from crossdock_models.experts.triton.kernels.grouped_swiglu import down_rows, gate_up_rows, grouped_swiglu
from crossdock_models.experts.triton.kernels.grouped_swiglu_torch import grouped_swiglu_torch
from crossdock_models.experts.triton.kernels.grouped_weights import GroupedWeights
from crossdock_models.experts.triton.kernels.hopper_products import BLOCK_ROWS, Factor, hopper_down, hopper_gate_up
from crossdock_models.experts.triton.kernels.sum_choices import sum_choices
from crossdock_models.experts.triton.kernels.tiles import MOST_MIDDLING_ROWS, Tiles, choose_tiles
from turns import turns_us

SHAPES = {
    "qwen3_30b": (128, 2048, 768, 8),
    "dsv2_lite": (64, 2048, 1408, 6),
    "dsv3_ep2": (128, 7168, 2048, 4),
    "dsv3_8": (8, 7168, 2048, 1),
    "dsv3_32": (32, 7168, 2048, 1),
}
"""experts on the rank, hidden, inner, choices that land on the rank."""
TUNED_ROWS = (32, 256, 4096, 16384)
FEW_FIELDS = ("gate_columns", "gate_inner", "gate_warps", "down_columns", "down_inner", "down_warps")
ROWS = (1, 2, 4, 8, 32, 128, 256, 512, 4096, 16384)
REPEATS = 20


def median_us(call: Callable[[], Any], inner: int) -> float:
    """Median time of one call over graph replays of ``inner`` calls."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(inner):
            call()
    return eager_us(graph.replay, inner)


def eager_us(call: Callable[[], Any], inner: int = 1) -> float:
    for _ in range(3):
        call()
    times: list[float] = []
    for _ in range(REPEATS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / inner)
    return round(statistics.median(times), 1)


FEW_ROWS = (
    (32, 64, 128, 4),
    (64, 64, 128, 4),
    (64, 128, 128, 4),
    (64, 64, 64, 4),
    (64, 128, 64, 5),
    (128, 128, 64, 4),
    (32, 64, 256, 3),
)
MANY_ROWS = (
    (64, 128, 64, 4),
    (128, 128, 64, 3),
    (128, 128, 64, 4),
    (128, 256, 64, 3),
    (64, 256, 64, 3),
    (64, 128, 128, 3),
)
"""Gate columns, down columns, inner step, stages."""


def candidates(rows_per_expert: float) -> Iterator[Tiles]:
    """Tiles worth trying at a number of rows an expert."""
    heights = (16,) if rows_per_expert <= 8 else (16, 32) if rows_per_expert <= 24 else (64, 128)
    for height in heights:
        for gate, down, inner, stages in FEW_ROWS if height <= 32 else MANY_ROWS:
            for warps in (4,) if height <= 32 else (4, 8):
                yield Tiles(
                    rows=height,
                    gate_columns=gate,
                    down_columns=down,
                    inner=inner,
                    group=1 if height == 16 else 8,
                    gate_warps=warps,
                    gate_stages=stages,
                    down_warps=warps,
                    down_stages=stages,
                )


LARGE_VARIANTS: tuple[dict[str, int], ...] = (
    {},
    {"gate_stages": 3},
    {"down_stages": 2},
    {"group": 2},
    {"group": 8},
    {"group": 16},
)
"""Changes to the tiles of prefill."""
FEW_VARIANTS = (
    (8, 512, 4, 8, 1024, 4),
    (4, 512, 4, 8, 1024, 8),
    (4, 1024, 4, 8, 512, 4),
    (8, 256, 4, 8, 256, 4),
    (16, 256, 8, 16, 256, 8),
    (4, 256, 2, 4, 1024, 4),
)
"""Gate columns, inner elements and warps, and those of the second product, for a handful of rows."""


def part_us(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    experts: GroupedWeights,
    tiles: Tiles | LargeTiles,
    sm_budget: int | None = None,
) -> dict[str, float]:
    """Microseconds of each launch of the way that sorts rows."""
    top_k = ids.shape[1]

    def gate_up(order: BlockOrder) -> torch.Tensor:
        if isinstance(tiles, LargeTiles):
            return large_gate_up(x, top_k, order, experts.gate_up, tiles, sm_budget)
        return gate_up_rows(x, top_k, order, experts, tiles)

    def down(order: BlockOrder, activated: torch.Tensor) -> torch.Tensor:
        if isinstance(tiles, LargeTiles):
            return large_down(activated, order, experts.down, tiles, sm_budget)
        return down_rows(activated, order, experts, tiles)

    halves = isinstance(tiles, LargeTiles) and tiles.halves
    order = block_order(ids, experts.num_experts, tiles.rows, halves)
    activated = gate_up(order)
    parts = down(order, activated)
    calls: dict[str, Callable[[], Any]] = {
        "order": lambda: block_order(ids, experts.num_experts, tiles.rows, halves),
        "gate_up": lambda: gate_up(order),
        "down": lambda: down(order, activated),
        "sum": lambda: sum_choices(parts, order, weights),
    }
    inner = 1 if x.shape[0] >= 4096 else 5
    return {name: median_us(call, inner) for name, call in calls.items()}


def hopper_part_us(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, experts: GroupedWeights
) -> dict[str, float]:
    """Microseconds of each launch of the way for many rows on Hopper, taking turns."""
    gate_up, down = experts.factors
    order = block_order(ids, experts.num_experts, BLOCK_ROWS, halves=True)
    activated = hopper_gate_up(Factor(values=x), ids.shape[1], order, gate_up, None)
    parts = hopper_down(activated, order, down, x.dtype, None)
    calls: dict[str, Callable[[], Any]] = {
        "order": lambda: block_order(ids, experts.num_experts, BLOCK_ROWS, halves=True),
        "gate_up": lambda: hopper_gate_up(Factor(values=x), ids.shape[1], order, gate_up, None),
        "down": lambda: hopper_down(activated, order, down, x.dtype, None),
        "sum": lambda: sum_choices(parts, order, weights),
    }
    return turns_us(calls)


def few_us(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, experts: GroupedWeights) -> dict[str, Any]:
    """The unsorted path with every tile, and its error."""
    want = grouped_swiglu_torch(x, ids, weights, experts.gate_up, experts.down)
    found: dict[str, Any] = {}
    for variant in FEW_VARIANTS:
        tile = FewTile(**dict(zip(FEW_FIELDS, variant, strict=True)))

        def call(t: FewTile = tile) -> torch.Tensor:
            return few_rows_swiglu(x, ids, weights, experts.gate_up, experts.down, t)

        error = float((call().float() - want).norm() / want.norm())
        found[str(variant)] = (median_us(call, 5), round(error, 5))
    return found


def library_call(ids: torch.Tensor, experts: GroupedWeights) -> Callable[[], None]:
    """torch._grouped_mm for both products, rows sorted beforehand."""
    counts = torch.bincount(ids.flatten(), minlength=experts.gate_up.shape[0])
    offsets = counts.cumsum(0).to(torch.int32)
    x = torch.randn(ids.numel(), experts.gate_up.shape[2], device="cuda").to(torch.bfloat16)
    h = torch.randn(ids.numel(), experts.down.shape[2], device="cuda").to(torch.bfloat16)

    def call() -> None:
        torch._grouped_mm(x, experts.gate_up.transpose(1, 2), offs=offsets)
        torch._grouped_mm(h, experts.down.transpose(1, 2), offs=offsets)

    return call


def measure_rows(rows: int, top_k: int, experts: GroupedWeights, tune: bool) -> dict[str, Any]:
    """One size: ours with the table's tiles, the library, the bound, and with ``tune`` the best tiles found."""
    num_experts, hidden, inner = experts.down.shape
    weights, ids = torch.rand(rows, num_experts, device="cuda").topk(top_k, dim=1)
    x = torch.randn(rows, hidden, device="cuda").to(torch.bfloat16)
    calls = 5 if rows < 4096 else 1

    def ours(tiles: Tiles | None) -> float:
        return median_us(lambda: grouped_swiglu(x, ids, weights, experts, tiles), calls)

    weight_bytes = ids.unique().numel() * 3 * hidden * inner * 2
    both = {"ours_us": lambda: grouped_swiglu(x, ids, weights, experts), "grouped_mm_us": library_call(ids, experts)}
    row: dict[str, Any] = turns_us(both)
    row["bound_us"] = round(max(weight_bytes / 4.3e6, rows * top_k * 6 * hidden * inner / 790e6), 1)
    if rows <= 4096:
        want = grouped_swiglu_torch(x, ids, weights, experts.gate_up, experts.down)
        got = grouped_swiglu(x, ids, weights, experts).float()
        row["error"] = round(float((got - want).norm() / want.norm()), 5)
    if experts.takes_hopper and rows * top_k / num_experts > MOST_MIDDLING_ROWS:
        row["parts"] = hopper_part_us(x, ids, weights, experts)
    elif experts.takes_large(rows * top_k / num_experts):
        variants = LARGE_VARIANTS if tune else ({},)
        large = choose_large_tiles(rows * top_k / num_experts)
        row["parts"] = {
            str(change): part_us(x, ids, weights, experts, attrs.evolve(large, **change)) for change in variants
        }
    elif rows <= 4:
        row["few"] = few_us(x, ids, weights, experts)
    else:
        row["parts"] = part_us(x, ids, weights, experts, choose_tiles(rows * top_k / num_experts, 2))
    if tune and rows < 4096:
        found: list[tuple[float, str]] = []
        for candidate in candidates(rows * top_k / num_experts):
            try:
                found.append((ours(candidate), repr(candidate)))
            except Exception as error:
                print("left out", candidate, type(error).__name__, flush=True)
        row["best"] = sorted(found)[:4]
    return row


def measure(name: str, sizes: list[int], tune: bool) -> dict[str, Any]:
    """Some sizes of one shape."""
    num_experts, hidden, inner, top_k = SHAPES[name]
    experts = GroupedWeights(
        gate_up=torch.randn(num_experts, 2 * inner, hidden, device="cuda", dtype=torch.bfloat16) / hidden**0.5,
        down=torch.randn(num_experts, hidden, inner, device="cuda", dtype=torch.bfloat16) / inner**0.5,
    )
    results: dict[str, Any] = {}
    for rows in sizes:
        results[str(rows)] = measure_rows(rows, top_k, experts, tune and rows in TUNED_ROWS)
        print(name, rows, results[str(rows)], flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--rows", nargs="+", type=int, default=list(ROWS))
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES))
    arguments = parser.parse_args()
    results: dict[str, Any] = {"torch": torch.__version__, "device": torch.cuda.get_device_name()}
    for name in arguments.shapes:
        results[name] = measure(name, arguments.rows, arguments.tune)
        torch.cuda.empty_cache()
        with open(arguments.out, "w", encoding="utf8") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
