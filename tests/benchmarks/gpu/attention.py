"""Attention kernels on one GPU: prefill and paged decode with every tile worth trying, beside torch's own; microseconds and TFLOP/s.

    python tests/benchmarks/gpu/attention.py --out FILE.json

Prefill: 4 sequences of 4096 without a prefix, causal, bf16. Decode: one row a sequence over pages of 64. Medians of graph replays.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from crossdock_attention.attention.triton.kernels.paged_decode import (
    DecodeHeads,
    DecodeTile,
    NewRows,
    choose_splits,
    paged_decode,
)
from crossdock_attention.attention.triton.kernels.paged_decode_torch import paged_decode_torch
from crossdock_attention.attention.triton.kernels.prefill import (
    GQA_PREFILL,
    MLA_PREFILL,
    PrefillTile,
    prefill,
    query_blocks,
)
from crossdock_attention.attention.triton.kernels.prefill_torch import prefill_torch
from torch.nn.attention import SDPBackend, sdpa_kernel

PREFILL_SHAPES = {"gqa 32/4 x 128": (32, 4, 128, 128), "mla 16 x 192/128": (16, 16, 192, 128)}
PREFILL_TILES = (
    (128, 128, 8, 3),
    (128, 128, 8, 2),
    (128, 64, 8, 3),
    (64, 64, 4, 2),
    (64, 64, 4, 3),
    (64, 64, 4, 4),
    (64, 32, 4, 4),
)
"""Query rows, context tokens, warps, stages."""
SEQUENCES, LENGTH, PAGE = 4, 4096, 64
DECODE_CASES = ((1, 256), (1, 4096), (32, 256), (32, 4096), (256, 256))
"""Rows, context."""
REPEATS = 15


def median_us(call: Callable[[], Any], inner: int) -> float:
    """Median time of a call over replays of a graph of ``inner`` calls."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(inner):
            call()
    return eager_us(graph.replay, inner)


def eager_us(call: Callable[[], Any], inner: int = 1) -> float:
    """Median time of a call that holds ``inner`` of what is measured."""
    call()
    times = []
    for _ in range(REPEATS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / inner)
    return round(statistics.median(times), 1)


def attempt(call: Callable[[], Any]) -> Any:
    """The result, or what went wrong, so that one bad tile does not end the run."""
    try:
        return call()
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:120]}"


def prefill_case(heads: int, key_heads: int, key_dim: int, value_dim: int) -> dict[str, Any]:
    """Every tile of the two kernels, and torch's flash and cuDNN attention one sequence after the other."""
    device = torch.device("cuda")
    rows = SEQUENCES * LENGTH
    q = torch.randn(rows, heads, key_dim, device=device).to(torch.bfloat16)
    k = torch.randn(rows, key_heads, key_dim, device=device).to(torch.bfloat16)
    v = torch.randn(rows, key_heads, value_dim, device=device).to(torch.bfloat16)
    spans = [(i, i * LENGTH, LENGTH, 0) for i in range(SEQUENCES)]
    starts = torch.tensor([i * LENGTH for i in range(SEQUENCES)], dtype=torch.int32, device=device)
    table = torch.arange(rows // PAGE, dtype=torch.int32, device=device).view(SEQUENCES, -1)
    out = torch.empty(rows, heads, value_dim, device=device, dtype=torch.bfloat16)
    scale = key_dim**-0.5
    flops = SEQUENCES * heads * (key_dim + value_dim) * LENGTH * (LENGTH + 1)

    def torch_call(backend: SDPBackend) -> torch.Tensor:
        parts = []
        for i in range(SEQUENCES):
            part = slice(i * LENGTH, (i + 1) * LENGTH)
            with sdpa_kernel(backend):
                parts.append(
                    torch.nn.functional.scaled_dot_product_attention(
                        *(x[part].transpose(0, 1).unsqueeze(0) for x in (q, k, v)),
                        is_causal=True,
                        scale=scale,
                        enable_gqa=heads != key_heads,
                    )
                )
        return parts[0]

    group = heads // key_heads
    want = torch.empty(LENGTH, group, value_dim, device=device)
    prefill_torch(q[:LENGTH, :group], [(k[:LENGTH, :1], v[:LENGTH, :1])], [(0, LENGTH)], want, scale)

    def measured(call: Callable[[], Any]) -> Any:
        def run() -> Any:
            out.zero_()
            call()
            torch.cuda.synchronize()
            error = float((out[:LENGTH, :group].float() - want).abs().max())
            us = median_us(call, 1)
            return {"us": us, "tflops": round(flops / us / 1e6), "error": round(error, 4)}

        return attempt(run)

    results: dict[str, Any] = {}

    def note(name: str, value: Any) -> None:
        results[name] = value
        print(name, value, flush=True)

    others = [PrefillTile(rows=r, tokens=t, warps=w, stages=n) for r, t, w, n in PREFILL_TILES]
    for tile in dict.fromkeys((GQA_PREFILL, MLA_PREFILL, *others)):
        blocks = torch.tensor(query_blocks(spans, tile.rows), dtype=torch.int32, device=device)

        def packed(t: PrefillTile = tile, b: torch.Tensor = blocks) -> None:
            prefill(q, k, v, out, b, scale, kv_starts=starts, tile=t)

        def paged(t: PrefillTile = tile, b: torch.Tensor = blocks) -> None:
            prefill(q, k, v, out, b, scale, page_table=table, page_tokens=PAGE, tile=t)

        name = f"{tile.rows} x {tile.tokens} w{tile.warps} s{tile.stages}" + (
            f" r{tile.registers}" if tile.registers else ""
        )
        note(f"packed {name}", measured(packed))
        if tile in (GQA_PREFILL, MLA_PREFILL):
            note(f"paged {name}", measured(paged))
    for name, backend in (("flash", SDPBackend.FLASH_ATTENTION), ("cudnn", SDPBackend.CUDNN_ATTENTION)):
        started_s = time.perf_counter()
        attempt(lambda b=backend: torch_call(b))
        torch.cuda.synchronize()
        first_ms = round((time.perf_counter() - started_s) * 1e3)

        def timed(b: SDPBackend = backend, first_ms: int = first_ms) -> Any:
            us = median_us(lambda: torch_call(b), 1)
            return {"us": us, "tflops": round(flops / us / 1e6), "first_ms": first_ms}

        note(f"torch {name}", attempt(timed))
    return results


def decode_case(kind: str, rows: int, context: int) -> dict[str, Any]:
    """Every tile of the decode kernel; the bound is the cached bytes at 4.3 TB/s."""
    device = torch.device("cuda")
    pages_each = -(-context // PAGE)
    table = torch.randperm(rows * pages_each, device=device).to(torch.int32).view(rows, pages_each)
    lengths = torch.full((rows,), context, dtype=torch.int32, device=device)
    slots = table[:, (context - 1) // PAGE].long() * PAGE + (context - 1) % PAGE
    heads = {"gqa": 32, "mla": 16, "mla128": 128}[kind]
    key_heads, dims = (4, (128, 128)) if kind == "gqa" else (1, (576,))
    pools = [torch.randn(rows * pages_each, PAGE, key_heads, dim, device=device).to(torch.bfloat16) for dim in dims]
    q = torch.randn(rows, heads, dims[0], device=device).to(torch.bfloat16)
    new = NewRows(
        k=pools[0].flatten(0, 1)[slots], v=pools[1].flatten(0, 1)[slots] if kind == "gqa" else None, slots=slots
    )
    tiles = [(64, 4, 2), (32, 4, 3), (64, 4, 3), (128, 4, 2)]
    if kind != "gqa":
        tiles = [(32, 8, 2), (32, 4, 2), (64, 8, 2), (16, 4, 3)]
    parts = (
        {"q": q, "rest": None, "values": pools[-1]}
        if kind == "gqa"
        else {"q": q[..., :512], "rest": q[..., 512:], "values": None}
    )
    want = paged_decode_torch(
        q, pools[0], pools[1] if kind == "gqa" else pools[0][..., :512], table, lengths, 0.1
    ).float()
    cached_bytes = rows * context * key_heads * sum(dims) * 2
    results: dict[str, Any] = {"bound_us": round(cached_bytes / 4.3e6, 1)}
    shape = DecodeHeads(num_heads=heads, key_heads=key_heads, is_latent=kind != "gqa", element_bytes=2)
    tried = [DecodeTile(tokens=tokens, warps=warps, stages=stages) for tokens, warps, stages in tiles]
    for tile in (shape.tile(rows), *tried):
        for factor in (1, 2):
            groups = shape.groups(tile)
            splits = max(1, choose_splits(rows, groups, context, tile) // factor)
            arrivals = torch.zeros(rows * groups, dtype=torch.int32, device=device)

            def call(t: DecodeTile = tile, s: int = splits, a: torch.Tensor = arrivals) -> torch.Tensor:
                return paged_decode(
                    parts["q"],
                    pools[0],
                    parts["values"],
                    table,
                    lengths,
                    0.1,
                    s,
                    q_rest=parts["rest"],
                    new=new,
                    arrivals=a,
                    tile=t,
                )

            def run(c: Callable[[], torch.Tensor] = call) -> Any:
                error = float((c().float() - want).abs().max() / want.abs().max())
                return {"us": median_us(c, 10), "error": round(error, 4)}

            name = f"{tile.tokens} w{tile.warps} s{tile.stages} heads {heads // groups} splits {splits}"
            results[name] = attempt(run)
    print(kind, rows, context, results, flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--only", choices=("prefill", "decode"), default=None)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    results: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}

    def keep(name: str, value: Any) -> None:
        results[name] = value
        with open(arguments.out, "w", encoding="utf8") as file:
            json.dump(results, file, indent=1)

    if arguments.only != "decode":
        for name, shape in PREFILL_SHAPES.items():
            print(name, flush=True)
            keep(f"prefill {name}", prefill_case(*shape))
    if arguments.only != "prefill":
        for kind in ("gqa", "mla", "mla128"):
            for rows, context in DECODE_CASES:
                keep(f"decode {kind} {rows} x {context}", decode_case(kind, rows, context))


if __name__ == "__main__":
    main()
