"""Products with one row or a few on one GPU: ours beside torch's, at the projections of two models; microseconds.

    python tests/benchmarks/gpu/linear.py --out FILE.json

bf16; medians of graph replays over several copies of the matrix, so that none is found in L2. "bound" is the matrix at 4.3 TB/s.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from typing import Any

import torch
from crossdock.ops.few_rows_linear import LinearTile, few_rows_linear

SHAPES = {
    "qwen3 qkv": (5120, 2048),
    "qwen3 out": (2048, 4096),
    "qwen3 router": (128, 2048),
    "v2-lite down": (3648, 2048),
    "v2-lite out": (2048, 2048),
    "v2-lite shared up": (5632, 2048),
    "v2-lite shared down": (2048, 2816),
    "qwen3 head": (151936, 2048),
}
"""Columns and inner elements."""
TILES = ((8, 512, 4), (4, 512, 4), (16, 256, 4), (4, 1024, 4), (2, 1024, 2), (8, 256, 2), (8, 1024, 8), (4, 2048, 8))
ROWS = (1, 2, 4, 8, 16, 32)
FEW = 4
COPY_BYTES = 200_000_000
"""Bytes of all copies together: four times the L2."""


def median_us(call: Callable[[int], Any], copies: int) -> float:
    """Median time of one call; call i works on copy i."""
    for i in range(copies):
        call(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(copies):
            call(i)
    times = []
    for _ in range(15):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / copies)
    return round(statistics.median(times), 2)


def measure(out_features: int, in_features: int) -> dict[str, Any]:
    """All rows and tiles of one matrix."""
    size = out_features * in_features * 2
    copies = max(2, min(50, COPY_BYTES // size))
    weights = [torch.randn(out_features, in_features, device="cuda").to(torch.bfloat16) for _ in range(copies)]
    results: dict[str, Any] = {"bound_us": round(size / 4.3e6, 2)}
    for rows in ROWS:
        x = torch.randn(rows, in_features, device="cuda").to(torch.bfloat16)
        row: dict[str, Any] = {"torch": median_us(lambda i, x=x: torch.nn.functional.linear(x, weights[i]), copies)}
        want = torch.nn.functional.linear(x, weights[0]).float()
        for variant in TILES if rows <= FEW else ():
            tile = LinearTile(columns=variant[0], inner=variant[1], warps=variant[2])
            got = few_rows_linear(x, weights[0], None, torch.bfloat16, tile).float()
            error = float((got - want).norm() / want.norm())
            assert error < 0.01, (variant, error)
            row[str(variant)] = median_us(
                lambda i, x=x, t=tile: few_rows_linear(x, weights[i], None, torch.bfloat16, t), copies
            )
        results[str(rows)] = row
    return results


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    arguments = parser.parse_args()
    results: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    for name, shape in SHAPES.items():
        results[name] = measure(*shape)
        print(name, results[name], flush=True)
        with open(arguments.out, "w", encoding="utf8") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
