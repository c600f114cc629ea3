"""The NVLink dispatcher on the GPUs of one host: right first, then microseconds, beside deep_ep where it is installed.

    python -m torch.distributed.run --nproc-per-node 2 tests/benchmarks/gpu/nvlink.py --out FILE.json

Medians of CUDA events over eager calls (normal sizes) or of graph replays (decode sizes); the slowest rank counts.
Shapes: hidden 7168, 256 experts, top-8, random routing, bf16.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from crossdock.comm import create_comms
from crossdock.groups import rank_place, resolve_sizes
from crossdock.types.dispatch import DispatcherSpec, DispatchStep, Received
from crossdock_dispatchers.nvlink.dispatcher import NvlinkDispatcher
from crossdock_dispatchers.nvlink.options import NvlinkOptions
from crossdock_dispatchers.nvlink.symmetric import world_allocator

HIDDEN, EXPERTS, TOP_K = 7168, 256, 8
BF16_TOLERANCE = 2.0**-7
"""One bf16 rounding of the sum and one of each partial sum, relative to the largest value."""
FP8_TOLERANCE = 0.07
"""float8_e4m3 keeps 3 bits: 2**-4 of a value, on values up to the largest."""


def batch(rows: int, seed: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random rows, distinct random experts, normalised weights."""
    generator = torch.Generator(device=device).manual_seed(seed)
    hidden = torch.randn(rows, HIDDEN, generator=generator, device=device).to(torch.bfloat16)
    scores = torch.rand(rows, EXPERTS, generator=generator, device=device)
    weights, ids = scores.topk(TOP_K, dim=1) if rows else (scores[:, :TOP_K], scores[:, :TOP_K].long())
    return hidden, ids.to(torch.int64), (weights / weights.sum(dim=1, keepdim=True)).float()


def factor_experts(received: Received, first_expert: int) -> torch.Tensor:
    """Experts that multiply by (1 + id / 64): cheap, and a wrong id, weight or row shows."""
    assert received.local_topk_ids is not None
    assert received.row_weights is not None
    ids, weights = received.local_topk_ids, received.row_weights
    factor = torch.where(ids >= 0, weights * (1 + (ids + first_expert) / 64), torch.zeros_like(weights)).sum(dim=1)
    rows = received.rows.float()
    if received.scales is not None:
        rows = rows * received.scales.repeat_interleave(128, dim=1)
    valid = (ids >= 0).any(dim=1, keepdim=True)
    return torch.where(valid, rows * factor.unsqueeze(1), torch.zeros_like(rows)).to(torch.bfloat16)


BACK_TO_BACK = 5
"""Eager calls between two events: the device is busy while the host prepares the next, as in a model."""


def median_us(call: Callable[[], Any], repeats: int, device: torch.device, per_call: int = 1, calls: int = 1) -> float:
    """Median time of a call on the slowest rank, ``calls`` of them between two events after a barrier."""
    for _ in range(5):
        call()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize(device)
        dist.barrier()
        start.record()
        for _ in range(calls):
            call()
        end.record()
        torch.cuda.synchronize(device)
        times.append(start.elapsed_time(end) * 1e3 / per_call / calls)
    slowest = torch.tensor([statistics.median(times)], device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return round(float(slowest), 2)


class Bench:
    """One rank's half of every measurement."""

    def __init__(self) -> None:
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.sizes = resolve_sizes(ranks=self.world, attn_dp_size=self.world)
        self.comms = create_comms(self.sizes, self.rank, "cuda")

    def dispatcher(self, capacity: int, in_flight: int = 1, **options: Any) -> NvlinkDispatcher:
        spec = DispatcherSpec(
            sizes=self.sizes,
            place=rank_place(self.sizes, self.rank),
            comms=self.comms,
            hidden_size=HIDDEN,
            top_k=TOP_K,
            num_physical_experts=EXPERTS,
            dtype=torch.bfloat16,
            device=self.device,
            max_rows_per_rank=capacity,
            max_in_flight=in_flight,
        )
        return NvlinkDispatcher(spec, NvlinkOptions(**options), world_allocator(self.device))

    def round_trip(
        self, dispatcher: NvlinkDispatcher, inputs: tuple[torch.Tensor, ...], step: DispatchStep
    ) -> torch.Tensor:
        received = dispatcher.dispatch_end(dispatcher.dispatch_begin(*inputs, step, 0))
        out = factor_experts(received, self.rank * EXPERTS // self.world)
        return dispatcher.combine_end(dispatcher.combine_begin(out, received)).value

    def check(
        self, dispatcher: NvlinkDispatcher, counts: list[int], route: str, tolerance: float, micro_batches: int
    ) -> float:
        """Largest error relative to the largest value, against the dense sum in float32."""
        hidden, ids, weights = batch(counts[self.rank], 17 + self.rank, self.device)
        if route == "one_expert":
            ids = torch.full_like(ids, -1)
            ids[:, 0] = EXPERTS - 1
        elif route == "holes":
            ids = torch.where(torch.rand(ids.shape, device=self.device) < 0.3, -1, ids)
        elif route == "nowhere":
            ids = torch.full_like(ids, -1)
        step = DispatchStep(source_counts=tuple(counts), micro_batches=micro_batches)
        got = self.round_trip(dispatcher, (hidden, ids, weights), step)
        factor = torch.where(ids >= 0, weights * (1 + ids / 64), torch.zeros_like(weights)).sum(dim=1, keepdim=True)
        want = hidden.float() * factor
        error = float((got.float() - want).abs().max() / want.abs().max().clamp_min(1e-6)) if counts[self.rank] else 0.0
        assert got.shape == want.shape
        assert error <= tolerance, f"rank {self.rank} counts {counts} route {route}: error {error} > {tolerance}"
        return error

    def correctness(self) -> dict[str, float]:
        errors: dict[str, float] = {}
        cases = [
            [0] * self.world,
            [1] + [0] * (self.world - 1),
            [1] * self.world,
            [7] + [513] * (self.world - 1),
            [512] * self.world,
        ]
        for options, tolerance in (
            ({}, BF16_TOLERANCE),
            ({"wire": "fp8"}, FP8_TOLERANCE),
            ({"programs": 3, "chunks": 1}, BF16_TOLERANCE),
        ):
            for in_flight in (1, 2):
                dispatcher = self.dispatcher(520, in_flight, **options)
                for counts in cases:
                    for route in ("random", "one_expert", "holes", "nowhere"):
                        key = f"{options} in_flight {in_flight}"
                        error = self.check(dispatcher, counts, route, tolerance, in_flight)
                        errors[key] = max(errors.get(key, 0.0), error)
        return errors

    def normal(self, rows: int, in_flight: int, **options: Any) -> dict[str, float]:
        dispatcher = self.dispatcher(rows, in_flight, **options)
        inputs = batch(rows, 3 + self.rank, self.device)
        step = DispatchStep(source_counts=(rows,) * self.world, micro_batches=in_flight)
        received = dispatcher.dispatch_end(dispatcher.dispatch_begin(*inputs, step, 0))
        out = factor_experts(received, self.rank * EXPERTS // self.world)
        dispatcher.combine_end(dispatcher.combine_begin(out, received))
        return {
            "dispatch_us": median_us(
                lambda: dispatcher.dispatch_end(dispatcher.dispatch_begin(*inputs, step, 0)),
                30,
                self.device,
                calls=BACK_TO_BACK,
            ),
            "combine_us": median_us(
                lambda: dispatcher.combine_end(dispatcher.combine_begin(out, received)),
                30,
                self.device,
                calls=BACK_TO_BACK,
            ),
        }

    def graph(self, rows: int, **options: Any) -> float:
        """Dispatch and combine of a decode step, replayed 20 times in one graph; microseconds a pair."""
        dispatcher = self.dispatcher(rows, 1, **options)
        inputs = batch(rows, 5 + self.rank, self.device)
        step = DispatchStep(bucket=rows)
        out = torch.zeros(self.world * rows, HIDDEN, dtype=torch.bfloat16, device=self.device)

        def pair() -> None:
            received = dispatcher.dispatch_end(dispatcher.dispatch_begin(*inputs, step, 0))
            dispatcher.combine_end(dispatcher.combine_begin(out, received))

        pair()
        torch.cuda.synchronize(self.device)
        dist.barrier()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(20):
                pair()
        return median_us(graph.replay, 20, self.device, per_call=20)

    def deep_ep(self, rows: int) -> dict[str, float]:
        """The library's own calls at the same size, cached layout."""
        import deep_ep

        hidden, ids, weights = batch(rows, 3 + self.rank, self.device)
        buffer = deep_ep.Buffer(dist.group.WORLD, int(1e9), 0)
        per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(ids, EXPERTS)
        received, _, _, _, handle, _ = buffer.dispatch(
            hidden,
            num_tokens_per_rank=per_rank,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
            topk_idx=ids,
            topk_weights=weights,
        )
        return {
            "dispatch_us": median_us(
                lambda: buffer.dispatch(hidden, handle=handle), 30, self.device, calls=BACK_TO_BACK
            ),
            "combine_us": median_us(lambda: buffer.combine(received, handle), 30, self.device, calls=BACK_TO_BACK),
        }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    arguments = parser.parse_args()
    dist.init_process_group("cpu:gloo,cuda:nccl")
    torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    bench = Bench()
    results: dict[str, Any] = {"world": bench.world, "torch": torch.__version__, "device": torch.cuda.get_device_name()}

    def run(name: str, call: Callable[[], Any]) -> None:
        try:
            results[name] = call()
        except Exception as error:
            results[name] = f"{type(error).__name__}: {error}"
        if bench.rank == 0:
            print(name, results[name], flush=True)
            with open(arguments.out, "w", encoding="utf8") as file:
                json.dump(results, file, indent=1)

    run("errors", bench.correctness)
    for chunks in (1, 2, 4):
        run(f"normal 4096, all SMs, chunks {chunks}", lambda c=chunks: bench.normal(4096, 1, chunks=c))
    for programs in (16, 24, 32, 64):
        run(f"normal 4096, {programs} programs", lambda p=programs: bench.normal(4096, 1, programs=p))
    for programs in (264,):
        run(f"normal 4096, {programs} programs", lambda p=programs: bench.normal(4096, 1, programs=p))
    for programs in (8, 24):
        run(f"normal 4096, split, {programs} programs", lambda p=programs: bench.normal(4096, 2, overlap_programs=p))
    run("normal 4096, fp8, all SMs", lambda: bench.normal(4096, 1, wire="fp8"))
    run("normal 4096, fp8, 24 programs", lambda: bench.normal(4096, 1, wire="fp8", programs=24))
    for rows in (1, 32, 128, 256):
        for chunks in (1, 2):
            run(f"graph pair, {rows} rows, chunks {chunks}", lambda r=rows, c=chunks: bench.graph(r, chunks=c))
    run("graph pair, 128 rows, fp8", lambda: bench.graph(128, wire="fp8", chunks=1))
    run("deep_ep normal 4096", lambda: bench.deep_ep(4096))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
