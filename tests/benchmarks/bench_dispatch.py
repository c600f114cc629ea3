"""One dispatch and combine over gloo, CPU of a rank and wall time: the two forms of alltoallv, and allgatherv with its gather and sum.

Run: ``OMP_NUM_THREADS=1 python tests/benchmarks/bench_dispatch.py``. Experts are left out. Wall time means something on a quiet machine only.
"""

from __future__ import annotations

import statistics
import time

import torch
from crossdock.dispatch import make_dispatcher
from crossdock.groups import resolve_sizes
from crossdock.testing.world import RankContext, RankPool
from crossdock.types.dispatch import DispatcherSpec, DispatchStep, ReceiveLayout
from crossdock.types.layout import FULL_ROWS

HIDDEN, TOP_K, EXPERTS = 512, 4, 32
ROWS = (0, 1, 8, 32, 128, 512)
FORMS = {
    "alltoallv, one round": ("alltoallv", {"one_round_bytes": 1 << 30}),
    "alltoallv, two rounds": ("alltoallv", {"one_round_bytes": 0}),
    "allgatherv": ("allgatherv", {}),
}


def measure(context: RankContext, name: str, options: dict[str, object], rows: int) -> tuple[float, float]:
    """Median milliseconds of CPU (all threads of this rank) and of wall time."""
    sizes = resolve_sizes(ranks=context.size, attn_dp_size=context.size)
    comms = context.comms_of(sizes)
    spec = DispatcherSpec(
        sizes=sizes,
        place=context.place(sizes),
        comms=comms,
        hidden_size=HIDDEN,
        top_k=TOP_K,
        num_physical_experts=EXPERTS,
        dtype=torch.float32,
        device=torch.device("cpu"),
        max_rows_per_rank=rows * context.size,
        accepted_layouts=tuple(ReceiveLayout),
    )
    dispatcher = make_dispatcher(name, options, spec)
    generator = torch.Generator().manual_seed(context.rank)
    hidden = torch.randn(rows, HIDDEN, generator=generator)
    ids = torch.rand(rows, EXPERTS, generator=generator).argsort(dim=1)[:, :TOP_K].contiguous()
    weights = torch.rand(rows, TOP_K, generator=generator)
    gathers = dispatcher.capabilities.input_rows == FULL_ROWS
    counts = (rows * context.size if gathers else rows,) * context.size
    cpu: list[float] = []
    wall: list[float] = []
    for _ in range(40 if rows <= 32 else 12):
        comms.world.all_reduce(torch.zeros(1))
        cpu_start, wall_start = time.process_time(), time.perf_counter()
        sent = (hidden, ids, weights)
        if gathers:
            sent = tuple(comms.world.all_gather(part) for part in sent)
        received = dispatcher.dispatch_end(dispatcher.dispatch_begin(*sent, DispatchStep(source_counts=counts), 0))
        out = received.rows.to(torch.float32)
        combined = dispatcher.combine_end(dispatcher.combine_begin(out, received))
        if gathers:
            comms.world.reduce_scatter(combined.partial)
        cpu.append((time.process_time() - cpu_start) * 1e3)
        wall.append((time.perf_counter() - wall_start) * 1e3)
    return statistics.median(cpu), statistics.median(wall)


def main() -> None:
    print(f"hidden {HIDDEN} fp32, top-{TOP_K} of {EXPERTS}; median ms a rank: CPU / wall")
    for size in (2, 4):
        with RankPool(size) as pool:
            for rows in ROWS:
                parts = []
                for label, (name, options) in FORMS.items():
                    found = pool.run(measure, name, options, rows)
                    cpu, wall = (statistics.mean(column) for column in zip(*found, strict=True))
                    parts.append(f"{label} {cpu:.2f} / {wall:.2f}")
                print(f"{size} ranks, {rows:4} rows each: {'; '.join(parts)}")


if __name__ == "__main__":
    main()
