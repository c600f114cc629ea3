"""The ``deep_gemm`` experts on one GPU: the whole path, its parts, and the library's two products alone; microseconds a layer.

    python tests/benchmarks/gpu/deep_gemm_experts.py --out FILE.json

The rank's share of a DeepSeek-V3 layer at EP 2 (128 experts, hidden 7168, inner 2048), rows by token as both ranks' rows arrive, half of
the choices here; decode 256 rows, prefill 8,192 and 32,768. Median of graph replays, so the number of places is given, as DeepEP gives it;
``asking_us`` is the eager path that asks the device for it. Beside it the ``triton`` experts on the same rows.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import attrs
import torch
from crossdock.ops.fp8_block import quantise_blocks
from crossdock.ops.quantise_rows import quantise_rows
from crossdock.types.dispatch import Received, ReceiveLayout, ScaleForm
from crossdock.types.experts import ExpertsSpec, ExpertTensors
from crossdock_models.experts.deep_gemm.experts import DeepGemmExperts
from crossdock_models.experts.deep_gemm.kernels.activate import swiglu_places
from crossdock_models.experts.deep_gemm.kernels.move_rows import move_rows
from crossdock_models.experts.deep_gemm.kernels.places import fixed_places, segment_places
from crossdock_models.experts.deep_gemm.kernels.sum_choices import sum_choices
from crossdock_models.experts.deep_gemm.library import load_products
from crossdock_models.experts.deep_gemm.options import DeepGemmOptions
from crossdock_models.experts.triton.experts import TritonExperts
from experts import eager_us, median_us

EXPERTS, HIDDEN, INNER, TOP_K = 128, 7168, 2048, 8
ROWS = (256, 1024, 8192, 32768)


def make_tensors(fp8: bool) -> ExpertTensors:
    """Random weights; fp8 ones are blocks of one random matrix with their own scales."""
    shapes = {"gate_up": (EXPERTS, 2 * INNER, HIDDEN), "down": (EXPERTS, HIDDEN, INNER)}
    tensors: dict[str, torch.Tensor] = {}
    for name, (experts, rows, columns) in shapes.items():
        one = torch.randn(rows, columns, device="cuda") / columns**0.5
        if not fp8:
            tensors[name] = one.to(torch.bfloat16).expand(experts, -1, -1).contiguous()
            continue
        weight, scale = quantise_blocks(one)
        tensors[name] = weight.view(torch.uint8).expand(experts, -1, -1).contiguous().view(torch.float8_e4m3fn)
        tensors[f"{name}_scale"] = scale.expand(experts, -1, -1).contiguous()
    return ExpertTensors(layer=0, tensors=tensors)


def make_received(num_rows: int, fp8_rows: bool) -> Received:
    """Rows of two ranks with 256 experts to choose from; those of the other rank are -1 here."""
    ids = torch.rand(num_rows, 2 * EXPERTS, device="cuda").topk(TOP_K, dim=1).indices
    rows = torch.randn(num_rows, HIDDEN, device="cuda").to(torch.bfloat16)
    payload, scales = quantise_rows(rows) if fp8_rows else (rows, None)
    counts = torch.bincount(ids[ids < EXPERTS], minlength=EXPERTS)
    return Received(
        layout=ReceiveLayout.TOKEN_ROWS,
        rows=payload,
        scales=scales,
        scale_form=ScaleForm.FP32_ROW if fp8_rows else None,
        local_topk_ids=torch.where(ids < EXPERTS, ids, -1),
        row_weights=torch.rand(num_rows, TOP_K, device="cuda"),
        aligned_rows=int(((counts + 127) // 128).sum()) * 128,
    )


def parts_us(experts: DeepGemmExperts, received: Received, num_rows: int, fp8: bool, calls: int) -> dict[str, float]:
    """Each step alone."""
    ids, products = received.local_topk_ids, load_products()
    dtype = torch.float8_e4m3fn if fp8 else torch.bfloat16

    def make_places() -> Any:
        if num_rows <= 256:
            return fixed_places(ids, EXPERTS, 256)
        return segment_places(ids, EXPERTS, received.aligned_rows)

    places = make_places()
    moved = move_rows(received.rows, received.scales, ids, places, dtype)
    gate_up, down = experts._layers[0]
    both = experts._product(moved.rows, moved.scales, gate_up, places, 8)
    activated, scales = swiglu_places(both, places, dtype)
    out = experts._product(activated, scales, down, places, 8)
    steps: dict[str, Callable[[], Any]] = {
        "places": make_places,
        "move": lambda: move_rows(received.rows, received.scales, ids, places, dtype),
        "gate_up": lambda: experts._product(moved.rows, moved.scales, gate_up, places, 8),
        "swiglu": lambda: swiglu_places(both, places, dtype),
        "down": lambda: experts._product(activated, scales, down, places, 8),
        "sum": lambda: sum_choices(out, moved.positions, received.row_weights),
    }
    assert products is not None
    return {name: median_us(step, calls) for name, step in steps.items()}


def measure(fp8: bool) -> dict[str, Any]:
    tensors = make_tensors(fp8)
    spec = ExpertsSpec(
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_local_experts=EXPERTS,
        top_k=TOP_K,
        activation="silu",
        dtype=torch.bfloat16,
        device=torch.device("cuda"),
        weight_dtype="fp8_block" if fp8 else "native",
    )
    experts = DeepGemmExperts(DeepGemmOptions(), spec, load_products())
    experts.attach(tensors)
    ours = TritonExperts(spec)
    ours.attach(tensors)
    results: dict[str, Any] = {}
    for num_rows in ROWS:
        calls = 5 if num_rows <= 1024 else 1
        received = make_received(num_rows, fp8)
        begun_s = time.perf_counter()
        got = experts.run(0, received)
        torch.cuda.synchronize()
        row: dict[str, Any] = {"first_call_s": round(time.perf_counter() - begun_s, 2)}
        row["run_us"] = median_us(lambda received=received: experts.run(0, received), calls)
        unknown = attrs.evolve(received, aligned_rows=None)
        row["asking_us"] = eager_us(lambda unknown=unknown: experts.run(0, unknown))
        row["parts_us"] = parts_us(experts, received, num_rows, fp8, calls)
        pairs = int((received.local_topk_ids >= 0).sum())
        rate = 1.2e9 if fp8 else 0.79e9
        weight_bytes = EXPERTS * 3 * HIDDEN * INNER * (1 if fp8 else 2)
        row["bound_us"] = round(max(weight_bytes / 4.3e6, pairs * 6 * HIDDEN * INNER / rate), 1)
        plain = received if not fp8 else attrs.evolve(received, rows=torch.randn(num_rows, HIDDEN, device="cuda").to(torch.bfloat16), scales=None, scale_form=None)  # fmt: skip
        row["run_bf16_rows_us"] = median_us(lambda plain=plain: experts.run(0, plain), calls)
        got, want = experts.run(0, plain).float(), ours.run(0, plain).float()
        row["difference_to_triton"] = round(float((got - want).norm() / want.norm()), 4)
        row["triton_us"] = median_us(lambda plain=plain: ours.run(0, plain), calls)
        results[str(num_rows)] = row
        print("fp8" if fp8 else "bf16", num_rows, row, flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    arguments = parser.parse_args()
    results: dict[str, Any] = {"torch": torch.__version__, "device": torch.cuda.get_device_name()}
    for fp8 in (True, False):
        results["fp8" if fp8 else "bf16"] = measure(fp8)
        torch.cuda.empty_cache()
        with open(arguments.out, "w", encoding="utf8") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
