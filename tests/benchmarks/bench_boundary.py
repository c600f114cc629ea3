"""Cost of entering the blocks of one layer: attention and experts, with full rows or slices. CPU and wall of a rank, per layer.

Run: ``python tests/benchmarks/bench_boundary.py``. "one all-reduce" sends buffers of ``sum_len`` as one sum instead of scatter and gather.
"""

from __future__ import annotations

import statistics
import time
from types import SimpleNamespace
from typing import Any

import torch
from crossdock.boundary import Boundary, Stream
from crossdock.boundary_moves import SmallSums
from crossdock.boundary_plan import BlockSpec, attention_block, embedding_block, head_block, plan_boundaries
from crossdock.groups import resolve_sizes
from crossdock.rows import Rows
from crossdock.testing.world import RankContext, RankPool
from crossdock.types.layout import FULL_ROWS, LOCAL_ROWS, SumAxis
from crossdock.types.parallel import ParallelSizes
from crossdock.types.step import DispatchMode, ForwardMode, PaddingMode, StepPlan

HIDDEN = 512
LAYERS = 40
ROUNDS = 3
BLOCKS = {
    "full rows": BlockSpec(
        name="experts", input=FULL_ROWS, output=FULL_ROWS, owed=frozenset({SumAxis.MOE_EP, SumAxis.MOE_TP})
    ),
    "slices": BlockSpec(name="experts", input=LOCAL_ROWS, output=LOCAL_ROWS),
}


def layers(
    context: RankContext, sizes: ParallelSizes, transport: str, kind: str, rows: int, max_bytes: int
) -> tuple[float, float]:
    """CPU us and median wall us of a layer on this rank."""
    comms, place = context.comms_of(sizes), context.place(sizes)
    if transport == "gloo":
        comms = comms.host
    specs = [embedding_block(), *[attention_block("attention"), BLOCKS[kind]] * LAYERS, head_block()]
    plans = plan_boundaries(specs, sizes)
    step = StepPlan(
        step=0,
        eplb_pass=0,
        live_tokens=(rows,) * sizes.attn_dp_size,
        padded_tokens=(rows,) * sizes.attn_dp_size,
        padding_mode=PaddingMode.SUM_LEN,
        forward_mode=ForwardMode.DECODE,
        dispatch_mode=DispatchMode.NORMAL,
        overlap=False,
        overlap_reason="off",
    )
    batch: Any = SimpleNamespace(step=step, attn_dp_rank=place.attn_dp_rank)
    embedded = torch.randn(rows, HIDDEN)
    walls, cpu_s = [], time.process_time()
    for _ in range(ROUNDS):
        started_s = time.perf_counter()
        stream = Stream().followed_by(Rows(embedded, specs[0].output or frozenset(), specs[0].owed, comms))
        for plan, spec in zip(plans, specs[1:], strict=True):
            entered, stream = Boundary(plan, comms, SmallSums(sum_len_bytes=max_bytes, attn_tp_bytes=max_bytes)).enter(
                stream, None, torch.Tensor.clone, batch
            )
            if spec.output is not None:
                stream = stream.followed_by(Rows(entered.value * 0.1, spec.output, spec.owed, comms))
        walls.append((time.perf_counter() - started_s) / LAYERS * 1e6)
    return (time.process_time() - cpu_s) / ROUNDS / LAYERS * 1e6, statistics.median(walls)


def main() -> None:
    print(f"{'us a layer, hidden 512, fp32':<58}{'CPU':>10}{'wall':>10}")
    for ranks, attn_dp in ((2, 2), (2, 1), (4, 4), (4, 2)):
        sizes = resolve_sizes(ranks=ranks, attn_dp_size=attn_dp)
        with RankPool(ranks) as pool:
            for rows in (8, 64, 512):
                for kind, max_bytes in (("full rows", 0), ("full rows", 1 << 30), ("slices", 0)):
                    for transport in ("shm", "gloo"):
                        results = pool.run(layers, sizes, transport, kind, rows, max_bytes, timeout_s=300.0)
                        form = ", one all-reduce" if max_bytes else ""
                        name = f"{attn_dp} x {ranks // attn_dp} ranks, {rows} rows, {kind}{form}, {transport}"
                        cpu_us, wall_us = max(r[0] for r in results), max(r[1] for r in results)
                        print(f"{name:<58}{cpu_us:>10.0f}{wall_us:>10.0f}", flush=True)


if __name__ == "__main__":
    main()
