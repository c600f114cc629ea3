"""Grouped expert products on one GPU: ours and torch's ``_grouped_mm``, taking turns; microseconds a layer.

    python tests/benchmarks/gpu/experts.py --out FILE.json [--shapes NAME ...] [--rows N ...] [--seconds S] [--tune]

Random routing, bf16. "ours" is everything between dispatch and combine: order, both products with SwiGLU, the weighted sum. "grouped_mm" is the
library's two products alone, on rows that are sorted already, so it flatters them; "around grouped_mm" is everything as torch's users write
it. They take turns at the power limit (``turns``), and so do the parts of the way for many rows; other parts are medians of graph replays.
``--tune`` walks the tile space at each size and prints the best.
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
PRODUCTS = ("grouped_mm gate_up", "grouped_mm down")


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


def hopper_parts(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, experts: GroupedWeights
) -> dict[str, Callable[[], Any]]:
    """Each launch of the way for many rows on Hopper."""
    gate_up, down = experts.factors
    order = block_order(ids, experts.num_experts, BLOCK_ROWS, halves=True)
    activated = hopper_gate_up(Factor(values=x), ids.shape[1], order, gate_up, None)
    parts = hopper_down(activated, order, down, x.dtype, None)
    return {
        "gate_up": lambda: hopper_gate_up(Factor(values=x), ids.shape[1], order, gate_up, None),
        "down": lambda: hopper_down(activated, order, down, x.dtype, None),
        "order": lambda: block_order(ids, experts.num_experts, BLOCK_ROWS, halves=True),
        "sum": lambda: sum_choices(parts, order, weights),
    }


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


def library_calls(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, experts: GroupedWeights
) -> dict[str, Callable[[], Any]]:
    """torch._grouped_mm: each product and both on rows sorted beforehand, and everything around them as torch's users write it."""
    num_experts, top_k = experts.num_experts, ids.shape[1]
    gate_up, down = experts.gate_up.transpose(1, 2), experts.down.transpose(1, 2)
    offsets = torch.bincount(ids.flatten(), minlength=num_experts).cumsum(0).to(torch.int32)
    sorted_rows = torch.randn(ids.numel(), experts.hidden_size, device="cuda").to(torch.bfloat16)
    activated = torch.randn(ids.numel(), experts.inner_size, device="cuda").to(torch.bfloat16)

    def first() -> torch.Tensor:
        return torch._grouped_mm(sorted_rows, gate_up, offs=offsets)

    def second() -> torch.Tensor:
        return torch._grouped_mm(activated, down, offs=offsets)

    def whole() -> torch.Tensor:
        sorted_ids, order = ids.flatten().sort()
        ends = torch.histc(sorted_ids.float(), bins=num_experts, min=0, max=num_experts - 1).cumsum(0).to(torch.int32)
        row = order // top_k
        gate, up = torch._grouped_mm(x.index_select(0, row), gate_up, offs=ends).chunk(2, dim=1)
        parts = torch._grouped_mm(torch.nn.functional.silu(gate) * up, down, offs=ends)
        parts = parts * weights.flatten().index_select(0, order)[:, None].to(parts.dtype)
        return torch.zeros_like(x).index_add_(0, row, parts)

    return {
        "grouped_mm gate_up": first,
        "grouped_mm down": second,
        "grouped_mm": lambda: (first(), second()),
        "around grouped_mm": whole,
    }


def tile_parts(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, experts: GroupedWeights, tune: bool
) -> dict[str, Any]:
    """Parts, or the unsorted path, with the table's tiles and with ``tune`` others, where the way for many rows on Hopper is not taken."""
    rows, per_expert = x.shape[0], ids.numel() / experts.num_experts
    if experts.takes_large(per_expert):
        large = choose_large_tiles(per_expert)
        changes = LARGE_VARIANTS if tune else ({},)
        variants = {str(change): attrs.evolve(large, **change) for change in changes}
        return {"parts": {name: part_us(x, ids, weights, experts, tiles) for name, tiles in variants.items()}}
    if rows <= 4:
        return {"few": few_us(x, ids, weights, experts)}

    def ours_us(tiles: Tiles) -> float:
        return median_us(lambda: grouped_swiglu(x, ids, weights, experts, tiles), 5)

    row: dict[str, Any] = {"parts": part_us(x, ids, weights, experts, choose_tiles(per_expert, 2))}
    if tune:
        found: list[tuple[float, str]] = []
        for tiles in candidates(per_expert):
            try:
                found.append((ours_us(tiles), repr(tiles)))
            except Exception as error:
                print("left out", tiles, type(error).__name__, flush=True)
        row["best"] = sorted(found)[:4]
    return row


def measure_rows(rows: int, top_k: int, experts: GroupedWeights, tune: bool, seconds: float) -> dict[str, Any]:
    """One size: ours with the table's tiles and the library taking turns, the bound, and with ``tune`` the best tiles found."""
    num_experts, hidden, inner = experts.down.shape
    weights, ids = torch.rand(rows, num_experts, device="cuda").topk(top_k, dim=1)
    x = torch.randn(rows, hidden, device="cuda").to(torch.bfloat16)
    calls: dict[str, Callable[[], Any]] = {"ours": lambda: grouped_swiglu(x, ids, weights, experts)}
    calls |= library_calls(x, ids, weights, experts)
    row: dict[str, Any] = {"us": turns_us({name: calls[name] for name in ("ours", "grouped_mm")}, seconds)}
    row["users_us"] = turns_us({name: calls[name] for name in ("ours", "around grouped_mm")}, seconds)
    takes_hopper = experts.takes_hopper and rows * top_k / num_experts > MOST_MIDDLING_ROWS
    if takes_hopper:
        parts = hopper_parts(x, ids, weights, experts)
        row["rest_us"] = turns_us({name: parts.pop(name) for name in ("order", "sum")}, seconds)
        row["products_us"] = turns_us(parts | {name: calls[name] for name in PRODUCTS}, seconds)
    weight_bytes = ids.unique().numel() * 3 * hidden * inner * 2
    row["bound_us"] = round(max(weight_bytes / 4.3e6, rows * top_k * 6 * hidden * inner / 790e6), 1)
    got, other = calls["ours"]().float(), calls["around grouped_mm"]().float()
    row["difference"] = round(float((got - other).norm() / other.norm()), 5)
    if rows <= 4096:
        want = grouped_swiglu_torch(x, ids, weights, experts.gate_up, experts.down)
        row["error"] = round(float((got - want).norm() / want.norm()), 5)
    return row if takes_hopper else row | tile_parts(x, ids, weights, experts, tune)


def measure(name: str, sizes: list[int], tune: bool, seconds: float) -> dict[str, Any]:
    """Some sizes of one shape."""
    num_experts, hidden, inner, top_k = SHAPES[name]
    experts = GroupedWeights(
        gate_up=torch.randn(num_experts, 2 * inner, hidden, device="cuda", dtype=torch.bfloat16) / hidden**0.5,
        down=torch.randn(num_experts, hidden, inner, device="cuda", dtype=torch.bfloat16) / inner**0.5,
    )
    results: dict[str, Any] = {}
    for rows in sizes:
        results[str(rows)] = measure_rows(rows, top_k, experts, tune and rows in TUNED_ROWS, seconds)
        print(name, rows, results[str(rows)], flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--rows", nargs="+", type=int, default=list(ROWS))
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES))
    parser.add_argument("--seconds", type=float, default=0.3, help="of each turn")
    arguments = parser.parse_args()
    results: dict[str, Any] = {"torch": torch.__version__, "device": torch.cuda.get_device_name()}
    for name in arguments.shapes:
        results[name] = measure(name, arguments.rows, arguments.tune, arguments.seconds)
        torch.cuda.empty_cache()
        with open(arguments.out, "w", encoding="utf8") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
