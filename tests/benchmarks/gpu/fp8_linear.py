"""Projections of a DeepSeek-V3 layer in fp8 on one GPU: ours, torch's block-scaled product, deep_gemm, and torch in bf16.

    python tests/benchmarks/gpu/fp8_linear.py --out FILE.json

Median microseconds of graph replays, the quantisation of the rows included everywhere; error relative to the float32 product (norm).
"""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Callable
from typing import Any

import torch
from crossdock.ops.fp8_block import dequantise_blocks, quantise_blocks
from crossdock.ops.fp8_linear import FEW_ROWS, LinearTiles, block_product, fp8_linear_fused, padded_scale
from crossdock.ops.quantise_rows import quantise_rows_by_column
from experts import median_us

SHAPES = {
    "q_a+kv_a": (2112, 7168),
    "q_b": (24576, 1536),
    "o": (7168, 16384),
    "shared gate_up": (4096, 7168),
    "shared down": (7168, 2048),
}
"""Rows and columns of the weight."""
LIBRARY_SHAPES = ("o", "q_a+kv_a")
"""The library compiles each size for seconds."""
ROWS = (1, 16, 64, 128, 512, 4096, 16384)
FEW = [LinearTiles(rows=r, columns=c, group=1, warps=w, stages=s) for r in (16, 32, 64) for c in (16, 32, 64) for w, s in ((4, 4), (4, 6))]  # fmt: skip
MANY = [LinearTiles(rows=r, columns=c, group=8, warps=w, stages=s) for r, c, w, s in ((64, 64, 4, 4), (64, 128, 4, 4), (128, 128, 8, 3), (128, 128, 8, 4), (128, 128, 4, 3))]  # fmt: skip


def library_product(weight: torch.Tensor, scale: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    import deep_gemm

    def call(rows: torch.Tensor) -> torch.Tensor:
        out = torch.empty(rows.shape[0], weight.shape[0], dtype=torch.bfloat16, device="cuda")
        deep_gemm.fp8_gemm_nt(quantise_rows_by_column(rows), (weight, scale), out)
        return out

    return call


def measure(name: str, num_rows: int) -> dict[str, Any]:
    out_features, in_features = SHAPES[name]
    plain = torch.randn(out_features, in_features, device="cuda") / in_features**0.5
    weight, scale = quantise_blocks(plain)
    meant = dequantise_blocks(weight, scale, torch.float32)
    rows = torch.randn(num_rows, in_features, device="cuda").to(torch.bfloat16)
    want = rows.float() @ meant.T
    half = meant.to(torch.bfloat16)
    calls = 10 if num_rows <= 512 else 2
    row: dict[str, Any] = {
        "bound_us": round(
            max(out_features * in_features / 4.3e6, 2 * num_rows * out_features * in_features / 1.2e9), 1
        ),
        "bf16_us": median_us(lambda: rows @ half.T, calls),
    }

    def add(key: str, call: Callable[[torch.Tensor], torch.Tensor]) -> None:
        try:
            error = float((call(rows).float() - want).norm() / want.norm())
            row[key] = (median_us(lambda: call(rows), calls), round(error, 4))
        except Exception as problem:
            row[key] = f"{type(problem).__name__}: {str(problem)[:160]}"

    stored = padded_scale(scale)
    add("torch_block", lambda x: block_product(x, weight, stored))
    if name in LIBRARY_SHAPES and num_rows >= 128:
        add("deep_gemm", library_product(weight, scale))
    found = []
    for quantised, candidates in ((False, FEW if num_rows <= 64 else []), (True, MANY if num_rows > 16 else [])):
        for tiles in candidates:
            if tiles.rows > 2 * num_rows and tiles.rows > 16:
                continue
            try:
                call = functools.partial(fp8_linear_fused, rows, weight, scale, quantised=quantised, tiles=tiles)
                time_us = median_us(call, calls)
                found.append((time_us, quantised, tiles.rows, tiles.columns, tiles.warps, tiles.stages))
            except Exception as problem:
                print("left out", tiles, type(problem).__name__, flush=True)
    add("ours", lambda x: fp8_linear_fused(x, weight, scale, quantised=num_rows > FEW_ROWS))
    row["best"] = sorted(found)[:3]
    return row


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES))
    arguments = parser.parse_args()
    results: dict[str, Any] = {"torch": torch.__version__, "device": torch.cuda.get_device_name()}
    for name in arguments.shapes:
        for num_rows in ROWS:
            results[f"{name} {num_rows}"] = measure(name, num_rows)
            print(name, num_rows, results[f"{name} {num_rows}"], flush=True)
            with open(arguments.out, "w", encoding="utf8") as file:
                json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
