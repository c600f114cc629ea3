"""``bench dispatch``: a round trip of random rows through the configured dispatcher, experts left out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from crossdock.bench.clock import DeviceClock, repeated, spread_us
from crossdock.bench.jobs import BenchJob
from crossdock.comm import RankComms
from crossdock.config_rules import parallel_sizes
from crossdock.dispatch import make_dispatcher
from crossdock.groups import drop_unit_axes, rank_place
from crossdock.types.dispatch import DispatcherSpec, DispatchStep, Received, ReceiveLayout
from crossdock.types.layout import TokenAxis
from crossdock.types.parallel import ParallelSizes
from crossdock.types.step import DispatchMode

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def bench_dispatch_on_rank(job: BenchJob, rank: int, comms: RankComms, device: torch.device) -> dict[str, Any]:
    """One row a number of tokens and protocol; times of this rank. Collective.

    A gather before and a sum after the dispatcher, which the boundary makes for those that take full rows, belong to the round trip.
    """
    sizes, choice = parallel_sizes(job.config.parallel), job.config.dispatcher
    dtype = DTYPES.get(job.config.checkpoint.dtype, torch.float32)
    most = max(job.num_tokens)
    spec = DispatcherSpec(
        sizes=sizes,
        place=rank_place(sizes, rank),
        comms=comms,
        hidden_size=job.shape.hidden_size,
        top_k=job.shape.top_k,
        num_physical_experts=job.shape.num_experts,
        dtype=dtype,
        device=device,
        max_rows_per_rank=most * sizes.ranks,
        max_decode_rows_per_rank=most,
        accepted_layouts=tuple(ReceiveLayout),
    )
    dispatcher = make_dispatcher(choice.name, choice.options, spec)
    gathers = TokenAxis.ATTN_DP not in drop_unit_axes(dispatcher.capabilities.input_rows, sizes) and sizes.ranks > 1
    clock = DeviceClock(device)
    rows: list[dict[str, Any]] = []
    for num_tokens in job.num_tokens:
        inputs = random_rows(job, num_tokens, dtype, device, job.seed + rank)
        for mode in sorted(dispatcher.capabilities.modes, key=lambda mode: mode.value):
            step = dispatch_step(sizes, num_tokens, mode, gathers=gathers)

            def round_trip(inputs: Any = inputs, step: DispatchStep = step) -> Sequence[float]:
                comms.world.all_reduce(torch.zeros(1, device=device))
                started = clock.mark()
                hidden, ids, weights = (comms.world.all_gather(part) if gathers else part for part in inputs)
                received = dispatcher.dispatch_end(dispatcher.dispatch_begin(hidden, ids, weights, step, 0))
                arrived = clock.mark()
                out = stand_in_output(received)
                computed = clock.mark()
                combined = dispatcher.combine_end(dispatcher.combine_begin(out, received))
                if gathers:
                    comms.world.reduce_scatter(combined.partial)
                return clock.seconds(started, arrived), clock.seconds(computed, clock.mark())

            times = repeated(round_trip, job.num_iters, job.num_iters_warmup)
            rows.append(
                {
                    "num_tokens": num_tokens,
                    "mode": mode.value,
                    "dispatch_s": [dispatched for dispatched, _ in times],
                    "combine_s": [combined for _, combined in times],
                }
            )
    return {"rows": rows}


def random_rows(
    job: BenchJob, num_tokens: int, dtype: torch.dtype, device: torch.device, seed: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Seeded rows, distinct random experts for each, and weights that sum to one."""
    generator = torch.Generator(device).manual_seed(seed)
    hidden = torch.randn(num_tokens, job.shape.hidden_size, generator=generator, device=device).to(dtype)
    scores = torch.rand(num_tokens, job.shape.num_experts, generator=generator, device=device)
    weights, ids = scores.topk(job.shape.top_k, dim=1)
    return hidden, ids, weights / weights.sum(dim=1, keepdim=True)


def dispatch_step(sizes: ParallelSizes, num_tokens: int, mode: DispatchMode, *, gathers: bool) -> DispatchStep:
    """A step in which every rank brings ``num_tokens`` rows."""
    count = num_tokens * sizes.ranks if gathers else num_tokens
    return DispatchStep(mode=mode, source_counts=(count,) * sizes.ranks)


def stand_in_output(received: Received) -> torch.Tensor:
    """What experts would return in shape and dtype; values do not matter."""
    rows = received.rows
    return torch.zeros_like(rows, dtype=torch.bfloat16) if rows.itemsize == 1 else rows


def dispatch_report(job: BenchJob, found: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One object a number of tokens and protocol, times of the slowest rank in each repetition."""
    report: list[dict[str, Any]] = []
    for number, first in enumerate(found[0]["rows"]):
        every = [one["rows"][number] for one in found]
        slowest = {
            name: [max(times) for times in zip(*(row[f"{name}_s"] for row in every), strict=True)]
            for name in ("dispatch", "combine")
        }
        report.append(
            {
                "dispatcher": job.config.dispatcher.name,
                "ranks": len(found),
                "mode": first["mode"],
                "num_tokens": first["num_tokens"],
                "hidden_size": job.shape.hidden_size,
                "num_experts": job.shape.num_experts,
                "top_k": job.shape.top_k,
                "num_iters": job.num_iters,
                **spread_us("dispatch", slowest["dispatch"]),
                **spread_us("combine", slowest["combine"]),
            }
        )
    return report
