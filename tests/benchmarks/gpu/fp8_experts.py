"""The ``triton`` experts with float8 weights on one GPU, way by way and tile by tile, taking turns; microseconds a layer.

    python tests/benchmarks/gpu/fp8_experts.py --out FILE.json [--shapes NAME ...] [--rows N ...]

Random routing; rows come quantised, as from the wire, but for the whole call. ``turns`` says how times are taken.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

import attrs
import torch
from crossdock.ops.fp8_block import quantise_blocks
from crossdock.ops.quantise_rows import quantise_rows
from crossdock_models.experts.triton.kernels.block_order import BlockOrder, block_order
from crossdock_models.experts.triton.kernels.fp8_products import (
    FEW_FP8,
    LARGE_FP8,
    MANY_FP8,
    Fp8Tiles,
    fp8_down,
    fp8_gate_up,
)
from crossdock_models.experts.triton.kernels.grouped_swiglu import grouped_swiglu
from crossdock_models.experts.triton.kernels.grouped_weights import GroupedWeights
from crossdock_models.experts.triton.kernels.hopper_products import (
    BLOCK_ROWS,
    Factor,
    hopper_down,
    hopper_gate_up,
    is_hopper,
)
from crossdock_models.experts.triton.kernels.sum_choices import sum_choices
from crossdock_models.experts.triton.kernels.tiles import choose_tiles
from turns import turns_us

SHAPES = {
    "dsv3_ep2": (128, 7168, 2048, 4),
    "dsv3_8": (8, 7168, 2048, 1),
    "dsv3_32": (32, 7168, 2048, 1),
}
"""experts on the rank, hidden, inner, choices that land on the rank."""
ROWS = {"dsv3_ep2": (256, 1024, 2048, 8192), "dsv3_8": (4096,), "dsv3_32": (4096,)}
VARIANTS = {
    "16": FEW_FP8,
    "32": attrs.evolve(FEW_FP8, rows=32),
    "64": MANY_FP8,
    "128": LARGE_FP8,
}


def make_weights(num_experts: int, hidden: int, inner: int) -> GroupedWeights:
    """Every expert a copy of one random matrix."""
    made: list[tuple[torch.Tensor, torch.Tensor]] = []
    for rows, columns in ((2 * inner, hidden), (hidden, inner)):
        weight, scale = quantise_blocks(torch.randn(rows, columns, device="cuda") / columns**0.5)
        copies = weight.view(torch.uint8).expand(num_experts, -1, -1).contiguous().view(torch.float8_e4m3fn)
        made.append((copies, scale.expand(num_experts, -1, -1).contiguous()))
    (gate_up, gate_up_scale), (down, down_scale) = made
    return GroupedWeights(gate_up=gate_up, down=down, gate_up_scale=gate_up_scale, down_scale=down_scale)


def measure_rows(rows: int, top_k: int, experts: GroupedWeights) -> dict[str, Any]:
    """Every variant's products, the whole call of the way without quantised rows, and the differences between them."""
    num_experts, hidden, inner = experts.down.shape
    weights, ids = torch.rand(rows, num_experts, device="cuda").topk(top_k, dim=1)
    x = torch.randn(rows, hidden, device="cuda").to(torch.bfloat16)
    payload, scales = quantise_rows(x)
    per_expert = rows * top_k / num_experts
    result: dict[str, Any] = {}
    calls: dict[str, Callable[[], Any]] = {}
    kept: dict[str, torch.Tensor] = {}

    def first(order: BlockOrder, tiles: Fp8Tiles) -> tuple[torch.Tensor, torch.Tensor]:
        return fp8_gate_up(payload, scales, top_k, order, experts.gate_up, experts.gate_up_scale, tiles, None)

    def second(activated: tuple[torch.Tensor, torch.Tensor], order: BlockOrder, tiles: Fp8Tiles) -> torch.Tensor:
        return fp8_down(*activated, order, experts.down, experts.down_scale, tiles, torch.bfloat16, None)

    for name, tiles in VARIANTS.items():
        if not per_expert / 4 <= tiles.rows <= max(16.0, per_expert * 2):
            continue
        try:
            order = block_order(ids, num_experts, tiles.rows, tiles.halves)
            activated = first(order, tiles)
            parts = second(activated, order, tiles)
            kept[name] = sum_choices(parts, order, weights).float()
        except Exception as error:
            print("left out", name, type(error).__name__, str(error)[:200], flush=True)
            continue
        calls[f"{name}: gate_up"] = lambda order=order, tiles=tiles: first(order, tiles)
        calls[f"{name}: down"] = lambda activated=activated, order=order, tiles=tiles: second(activated, order, tiles)
        calls[f"{name}: order"] = lambda tiles=tiles: block_order(ids, num_experts, tiles.rows, tiles.halves)
        calls[f"{name}: sum"] = lambda parts=parts, order=order: sum_choices(parts, order, weights)
    if is_hopper(0):
        order, left = block_order(ids, num_experts, BLOCK_ROWS, halves=True), Factor(values=payload, scales=scales)
        gate_up, down = experts.factors
        placed = hopper_gate_up(left, top_k, order, gate_up, None)
        kept["hopper"] = sum_choices(hopper_down(placed, order, down, torch.bfloat16, None), order, weights).float()
        calls["hopper: gate_up"] = lambda: hopper_gate_up(left, top_k, order, gate_up, None)
        calls["hopper: down"] = lambda: hopper_down(placed, order, down, torch.bfloat16, None)
    calls["quantise"] = lambda: quantise_rows(x)
    unquantised = choose_tiles(per_expert, 1)
    calls["rows in bf16"] = lambda: grouped_swiglu(x, ids, weights, experts, unquantised)
    calls["whole call"] = lambda: grouped_swiglu(x, ids, weights, experts)
    want = grouped_swiglu(x, ids, weights, experts, unquantised).float()
    result["differences"] = {name: round(float((got - want).norm() / want.norm()), 4) for name, got in kept.items()}
    result["us"] = turns_us(calls)
    weight_bytes = ids.unique().numel() * 3 * hidden * inner
    result["bound_us"] = round(max(weight_bytes / 4.3e6, rows * top_k * 6 * hidden * inner / 1200e6), 1)
    return result


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--rows", nargs="+", type=int)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES))
    arguments = parser.parse_args()
    results: dict[str, Any] = {"torch": torch.__version__, "device": torch.cuda.get_device_name()}
    for name in arguments.shapes:
        num_experts, hidden, inner, top_k = SHAPES[name]
        experts = make_weights(num_experts, hidden, inner)
        results[name] = {}
        for rows in arguments.rows or ROWS[name]:
            results[name][str(rows)] = measure_rows(rows, top_k, experts)
            print(name, rows, json.dumps(results[name][str(rows)]), flush=True)
            with open(arguments.out, "w", encoding="utf8") as file:
                json.dump(results, file, indent=1)
        del experts
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
