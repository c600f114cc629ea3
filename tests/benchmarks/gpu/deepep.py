"""The ``deepep`` dispatcher against the bare calls of its library, on the GPUs of one host.

    python -m torch.distributed.run --nproc-per-node 2 tests/benchmarks/gpu/deepep.py --out FILE.json

Hidden 7168, 256 experts, top-8, random routing. The guarded dispatcher and the library take turns in one run, on the same buffer; the
slowest rank counts. Normal: 4,096 rows a rank, layout and counts included, three calls back to back between two events. Low latency: a
graph of 20 pairs of dispatch and combine with 128 rows a rank. Ranks share GPUs where there are fewer (under MPS): then ratios hold, and times are
those of one GPU's memory and half its multiprocessors.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from crossdock.comm import create_comms, take_device
from crossdock.dispatch import make_dispatcher
from crossdock.groups import rank_place, resolve_sizes
from crossdock.testing.rank_worker import ranks_per_gpu
from crossdock.types.dispatch import DispatcherSpec, DispatchStep
from crossdock.types.step import DispatchMode
from crossdock_dispatchers.deepep.dispatcher import DeepEpDispatcher

HIDDEN, EXPERTS, TOP_K = 7168, 256, 8
NORMAL_ROWS, LOW_LATENCY_ROWS = 4096, 128
ROUNDS, BACK_TO_BACK, PAIRS = 30, 3, 20


class Bench:
    """One rank's half."""

    def __init__(self, wire: str, mode: str) -> None:
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.device = torch.device("cuda", torch.cuda.current_device())
        sizes = resolve_sizes(ranks=self.world, attn_dp_size=self.world)
        spec = DispatcherSpec(
            sizes=sizes,
            place=rank_place(sizes, self.rank),
            comms=create_comms(sizes, self.rank, "cuda"),
            hidden_size=HIDDEN,
            top_k=TOP_K,
            num_physical_experts=EXPERTS,
            dtype=torch.bfloat16,
            device=self.device,
            max_rows_per_rank=NORMAL_ROWS,
            max_decode_rows_per_rank=LOW_LATENCY_ROWS,
            expert_alignment=128,
        )
        self.fp8 = wire == "fp8"
        self.dispatcher = make_dispatcher("deepep", {"mode": mode, "wire": wire}, spec)
        inner: Any = self.dispatcher._inner
        assert isinstance(inner, DeepEpDispatcher)
        self.buffer: Any = inner._buffer

    def inputs(self, rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        generator = torch.Generator(self.device).manual_seed(3 + self.rank)
        hidden = torch.randn(rows, HIDDEN, generator=generator, device=self.device).to(torch.bfloat16)
        weights, ids = torch.rand(rows, EXPERTS, generator=generator, device=self.device).topk(TOP_K, dim=1)
        return hidden, ids, weights / weights.sum(dim=1, keepdim=True)

    def medians(self, calls: dict[str, Callable[[], Any]], per_call: int, back_to_back: int = 1) -> dict[str, float]:
        """Microseconds of each call on the slowest rank; the calls take turns in every round."""
        times: dict[str, list[float]] = {name: [] for name in calls}
        for call in calls.values():
            for _ in range(3):
                call()
        for round_ in range(ROUNDS):
            names = list(calls) if round_ % 2 else list(reversed(calls))
            for name in names:
                start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                torch.cuda.synchronize()
                dist.barrier()
                start.record()
                for _ in range(back_to_back):
                    calls[name]()
                end.record()
                torch.cuda.synchronize()
                times[name].append(start.elapsed_time(end) * 1e3 / per_call / back_to_back)
        found = torch.tensor([statistics.median(times[name]) for name in calls], device=self.device)
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return {name: round(float(value), 2) for name, value in zip(calls, found, strict=True)}

    def normal(self) -> dict[str, float]:
        from crossdock.ops.quantise_rows import quantise_rows

        hidden, ids, weights = self.inputs(NORMAL_ROWS)
        step = DispatchStep(mode=DispatchMode.NORMAL)

        def ours_dispatch() -> Any:
            received = self.dispatcher.dispatch_end(self.dispatcher.dispatch_begin(hidden, ids, weights, step, 0))
            self.dispatcher.reset()
            return received

        def library_dispatch() -> Any:
            payload = quantise_rows(hidden) if self.fp8 else hidden
            per_rank, _, per_expert, in_rank, _ = self.buffer.get_dispatch_layout(ids, EXPERTS)
            return self.buffer.dispatch(
                payload,
                num_tokens_per_rank=per_rank,
                is_token_in_rank=in_rank,
                num_tokens_per_expert=per_expert,
                topk_idx=ids,
                topk_weights=weights,
                expert_alignment=128,
            )

        received = ours_dispatch()
        out = torch.randn(received.rows.shape, device=self.device).to(torch.bfloat16)
        handle = received.way_back.handle

        def ours_both() -> None:
            received = self.dispatcher.dispatch_end(self.dispatcher.dispatch_begin(hidden, ids, weights, step, 0))
            self.dispatcher.combine_end(self.dispatcher.combine_begin(out, received))

        def library_both() -> None:
            _, _, _, _, handle, _ = library_dispatch()
            self.buffer.combine(out, handle)

        dispatch = self.medians({"ours": ours_dispatch, "library": library_dispatch}, 1, BACK_TO_BACK)
        both = self.medians({"ours": ours_both, "library": library_both}, 1, BACK_TO_BACK)
        combine = self.medians({"library": lambda: self.buffer.combine(out, handle)}, 1, BACK_TO_BACK)
        return {
            "dispatch_us": dispatch["ours"],
            "library_dispatch_us": dispatch["library"],
            "library_combine_us": combine["library"],
            "pair_us": both["ours"],
            "library_pair_us": both["library"],
            "ratio": round(both["ours"] / both["library"], 4),
        }

    def low_latency(self) -> dict[str, float]:
        hidden, ids, weights = self.inputs(LOW_LATENCY_ROWS)
        step = DispatchStep(mode=DispatchMode.LOW_LATENCY, bucket=LOW_LATENCY_ROWS)
        received = self.dispatcher.dispatch_end(self.dispatcher.dispatch_begin(hidden, ids, weights, step, 0))
        out = torch.zeros(received.rows.shape, dtype=torch.bfloat16, device=self.device)
        self.dispatcher.combine_end(self.dispatcher.combine_begin(out, received))

        def ours() -> None:
            received = self.dispatcher.dispatch_end(self.dispatcher.dispatch_begin(hidden, ids, weights, step, 0))
            self.dispatcher.combine_end(self.dispatcher.combine_begin(out, received))

        def library() -> None:
            _, _, handle, _, _ = self.buffer.low_latency_dispatch(
                hidden, ids, LOW_LATENCY_ROWS, EXPERTS, use_fp8=self.fp8
            )
            self.buffer.low_latency_combine(out, ids, weights, handle)

        graphs: dict[str, Callable[[], Any]] = {}
        for name, call in (("ours", ours), ("library", library)):
            call()
            torch.cuda.synchronize()
            dist.barrier()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for _ in range(PAIRS):
                    call()
            graphs[name] = graph.replay
        pair = self.medians(graphs, PAIRS)
        return {
            "pair_us": pair["ours"],
            "library_pair_us": pair["library"],
            "ratio": round(pair["ours"] / pair["library"], 4),
        }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--wires", nargs="+", default=["bf16", "fp8"])
    parser.add_argument("--modes", nargs="+", default=["normal", "low_latency"], choices=["normal", "low_latency"])
    arguments = parser.parse_args()
    sharing = ranks_per_gpu(int(os.environ["WORLD_SIZE"]), torch.cuda.device_count())
    take_device("cuda", int(os.environ["LOCAL_RANK"]), sharing)
    dist.init_process_group("cpu:gloo,cuda:nccl")
    results: dict[str, Any] = {
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(),
        "ranks_per_gpu": sharing,
    }
    for wire in arguments.wires:
        bench = Bench(wire, arguments.modes[0] if len(arguments.modes) == 1 else "auto")
        calls: dict[str, Callable[[], Any]] = {"normal": bench.normal, "low_latency": bench.low_latency}
        for name in arguments.modes:
            try:
                results[f"{name} {wire}"] = calls[name]()
            except Exception as error:
                results[f"{name} {wire}"] = f"{type(error).__name__}: {error}"
            if bench.rank == 0:
                print(name, wire, results[f"{name} {wire}"], flush=True)
                with open(arguments.out, "w", encoding="utf8") as file:
                    json.dump(results, file, indent=1)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
