"""Two micro-batches against one on the GPUs of one host: a slice of DeepSeek-V3's layers, experts over all ranks, one replica a rank.

    python -m torch.distributed.run --nproc-per-node 2 tests/benchmarks/gpu/overlap.py --out FILE.json

Prefill: a forward pass of 4,096 and of 16,384 tokens a rank, sequential, with shared experts in a stream of their own (``single_batch``), and in two
micro-batches, over the link as it is and over one that holds transfers to 50 GB/s. The ceiling is made of the same run's stage times: both halves
without their transfers ("hidden": what arrived in another pass is there at once, so their products have their size and the device does not rest),
plus the multiprocessors that transfers take, or the transfers where they are longer. Decode: 128 tokens a rank at context 1,024, both ways captured.

Passes are timed by events from their first operation to their last; the slowest rank counts. Ways take turns of a few passes each, of which the
first does not count: the clock of a device follows what it has just done.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
import torch.distributed as dist
from crossdock import graph_sizes, runner_build
from crossdock.comm import create_comms
from crossdock.config import CheckpointConfig, Config, LaunchConfig, ParallelConfig, PluginChoice, SchedulerConfig
from crossdock.engine_seams import AgreedStep
from crossdock.executor import Executor
from crossdock.observe.rank_waits import rank_waits
from crossdock.observe.span_shares import SpanShares, span_shares
from crossdock.observe.timeline import Timeline, clock_of
from crossdock.observe.trace_files import write_trace
from crossdock.overlap_decision import OverlapRules, decide_overlap
from crossdock.overlap_gate import OverlapGate
from crossdock.rank_plan import plan_rank
from crossdock.step_work import StepWork
from crossdock.strategy import make_strategy
from crossdock.types.observer import Span
from crossdock.types.step import DispatchMode, PaddingMode, StepPlan, StepRecord
from crossdock.types.strategy import OverlapLimits, Strategy
from held_link import HeldDispatcher, Link
from overlap_arguments import arguments_of_call
from overlap_shape import SHAPE, TINY
from overlap_stages import Halves, communication_ms, waits_by_operation
from overlap_work import PAGE, decode_work, prefill_work
from recorded_transfers import RecordedDispatcher, Recording


class Bench:
    """One rank's half of every measurement."""

    def __init__(self, arguments: argparse.Namespace, folder: str) -> None:
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.is_cuda = arguments.device == "cuda"
        self.device = torch.device("cuda", torch.cuda.current_device()) if self.is_cuda else torch.device("cpu")
        self.rows = [int(rows) for rows in arguments.rows.split(",") if rows]
        self.decode_rows, self.context = arguments.decode_rows, arguments.context
        self.repeats, self.in_a_row = arguments.repeats, arguments.in_a_row
        self.ways = {"sequential": False, "single_batch": False, "two_batch": True, "halves": True, "hidden": True}
        """Whether a step of each way is cut; "halves" one after the other, "hidden" without their transfers."""
        if arguments.short:
            del self.ways["single_batch"]
        self.traces = Path(arguments.traces) if arguments.traces else None
        most = max(*self.rows, self.decode_rows, 1)
        config = Config(
            checkpoint=CheckpointConfig(
                path=folder, load_format="random", dtype="bfloat16" if self.is_cuda else "float32"
            ),
            launch=LaunchConfig(device=arguments.device),
            parallel=ParallelConfig(ranks=self.world, attn_dp_size=self.world),
            scheduler=SchedulerConfig(
                max_running_requests=max(self.decode_rows, 16),
                max_step_tokens=most,
                chunk_tokens=most,
                page_tokens=PAGE,
                kv_tokens=max(most + PAGE, self.decode_rows * self.context),
                max_sequence_tokens=max(4096, self.context),
                prefix_cache=False,
                graphs="auto" if self.is_cuda and arguments.decode_rows else "off",
            ),
            dispatcher=PluginChoice(name=arguments.dispatcher, options=json.loads(arguments.options)),
            experts=PluginChoice(name=arguments.experts),
            strategy=PluginChoice(name="two_batch", options={"min_decode_rows": 2}),
        )
        plan = plan_rank(config, self.rank)
        self.comms = create_comms(plan.sizes, self.rank, arguments.device)
        self.link, self.recording = Link(self.device), Recording()
        self.most_sms = self.communication_sms = 0
        if self.is_cuda:
            self.most_sms = torch.cuda.get_device_properties(self.device).multi_processor_count
        self._wraps_dispatchers(SHAPE["hidden_size"] * 2)
        # One size is enough here.
        graph_sizes.bucket_sizes = lambda most, multiple: (most,)
        built = runner_build.build_runner(plan, self.comms, self.device)
        self.runner = built.runner
        self.communication_sms = self.runner.communication_sms
        self.timeline = self.runner.timeline = Timeline(rank=self.rank, clock=clock_of(self.device), times_passes=True)
        strategies: dict[str, Strategy] = {name: make_strategy(name, {}) for name in ("sequential", "single_batch")}
        strategies["two_batch"] = make_strategy("two_batch", {"lends_sms": not arguments.keep_sms})
        strategies["halves"] = strategies["hidden"] = Halves(not arguments.keep_sms)
        self.executors = {name: Executor(built.model, one) for name, one in strategies.items()}
        self.takes_budget = arguments.experts in ("deep_gemm", "triton") and not arguments.keep_sms
        self.step = 0
        self.logits = torch.empty(0)
        """Of the last pass."""

    def _wraps_dispatchers(self, row_bytes: int) -> None:
        make = runner_build.make_moe_parts

        def wrapped(*arguments: Any, **named: Any) -> Any:
            parts = make(*arguments, **named)
            held = (
                HeldDispatcher(parts.dispatcher, self.link, self.world, row_bytes) if self.is_cuda else parts.dispatcher
            )
            return attrs.evolve(parts, dispatcher=RecordedDispatcher(held, self.recording))

        runner_build.make_moe_parts = wrapped

    def slowest(self, value: float) -> float:
        """Of all ranks."""
        return float(self.comms.host.world.all_gather(torch.tensor([value], dtype=torch.float64)).max())

    def plan(self, work: StepWork, *, overlap: bool, bucket: int | None = None) -> StepPlan:
        self.step += 1
        live = (work.num_tokens,) * self.world
        return StepPlan(
            step=16 * self.step + 1,
            eplb_pass=self.step,
            live_tokens=live,
            padded_tokens=live,
            padding_mode=PaddingMode.MAX_LEN,
            forward_mode=work.forward_mode,
            dispatch_mode=DispatchMode.NORMAL,
            overlap=overlap,
            overlap_reason="",
            bucket=bucket,
            overlap_rows=tuple(rows // 2 for rows in live) if overlap else (),
        )

    def run(self, name: str, work: StepWork, *, overlap: bool, bucket: int | None = None) -> float:
        """Seconds of one pass on this rank."""
        self.runner.executor = self.executors[name]
        self.recording.begin("replay" if name == "hidden" else "pass on")
        plan = self.plan(work, overlap=overlap, bucket=bucket)
        batch = self.runner.build(work, plan)
        if self.is_cuda:
            torch.cuda.synchronize()
        dist.barrier()
        in_flight = self.runner.launch(plan, batch, None, is_counted=False)
        self.runner.collect(in_flight)
        self.logits = in_flight.logits
        assert self.timeline.last_pass is not None
        return self.timeline.last_pass.seconds()

    def compared(self, ways: dict[str, bool], work: StepWork, bucket: int | None = None) -> dict[str, dict[str, float]]:
        """Milliseconds of each way, in turns of a few passes; ``ways``: executor -> whether the step overlaps."""
        times: dict[str, list[float]] = {name: [] for name in ways}
        for turn, (name, overlap) in itertools.product(range(self.repeats + 1), ways.items()):
            for place in range(self.in_a_row):
                executor = name if bucket is None else "two_batch"
                took_s = self.slowest(self.run(executor, work, overlap=overlap, bucket=bucket))
                if turn and place:
                    times[name].append(1e3 * took_s)
        return {
            name: {"ms": round(statistics.median(found), 3), "min": round(min(found), 3), "max": round(max(found), 3)}
            for name, found in times.items()
        }

    def record(self, work: StepWork) -> None:
        """What arrives in halves, for passes whose transfers are hidden."""
        self.recording.begin("record")
        self.runner.executor = self.executors["halves"]
        plan = self.plan(work, overlap=True)
        in_flight = self.runner.launch(plan, self.runner.build(work, plan), None, is_counted=False)
        self.runner.collect(in_flight)

    def difference(self, work: StepWork, bucket: int | None = None) -> float:
        """Largest difference of logits of both ways, relative to the largest logit."""
        self.run("two_batch" if bucket else "sequential", work, overlap=False, bucket=bucket)
        want = self.logits.clone()
        self.run("two_batch", work, overlap=True, bucket=bucket)
        assert want.isfinite().all(), "random weights gave logits that are not finite"
        return self.slowest(float((self.logits - want).abs().max() / want.abs().max()))

    def spans(self, name: str, work: StepWork, *, overlap: bool) -> tuple[Span, ...]:
        """Operations of a pass, the fastest of three: the same one on all ranks."""
        found: list[tuple[float, tuple[Span, ...]]] = []
        for _ in range(3):
            self.timeline.times_next = True
            took_s = self.slowest(self.run(name, work, overlap=overlap))
            found.append((took_s, self.timeline.last_spans))
        return min(found, key=lambda one: one[0])[1]

    def paused(self, work: StepWork, pause_ms: float, passes: int = 12) -> dict[str, Any]:
        """Stage times of sequential passes that leave the device idle between them: what its clock makes of them. Of the later half."""
        found: list[SpanShares] = []
        for _ in range(passes):
            self.timeline.times_next = True
            self.run("sequential", work, overlap=False)
            found.append(span_shares(self.timeline.last_spans))
            time.sleep(pause_ms / 1e3)
        categories = sorted(found[0].category_us)
        later = found[passes // 2 :]
        stages = {name: statistics.median(one.category_us[name] for one in later) / 1e3 for name in categories}
        return {
            "ms": round(statistics.median(one.wall_us for one in later) / 1e3, 2),
            "stage_ms": {name: round(ms, 2) for name, ms in stages.items()},
        }

    def everyone(self, value: float) -> list[float]:
        """Of each rank, in its order."""
        values = self.comms.host.world.all_gather(torch.tensor([value], dtype=torch.float64))
        return [round(float(found), 3) for found in values]

    def rank_waits(self, spans: Sequence[Span]) -> list[float] | None:
        """Milliseconds by rank that were waits for a slower one."""
        every: list[Any] = [None] * self.world
        dist.all_gather_object(every, (self.rank, [attrs.evolve(span, step=0) for span in spans]))
        found = rank_waits(dict(every))
        return None if found is None else [round(us / 1e3, 2) for _, us in sorted(found.items())]

    def prefill_results(self, rows: int) -> dict[str, Any]:
        """Everything about one size over the link as it is now."""
        work = prefill_work(rows, self.rank)
        self.record(work)
        timed = {name: overlap for name, overlap in self.ways.items() if name != "halves"}
        results: dict[str, Any] = dict(self.compared(timed, work))
        spans = {name: self.spans(name, work, overlap=overlap) for name, overlap in self.ways.items()}
        self._write_traces(f"{rows}_{self.link.bytes_per_us:.0f}", spans)
        stages = {name: span_shares(found) for name, found in spans.items()}
        exposed = {name: communication_ms(one) for name, one in stages.items()}
        waits = {name: self.rank_waits(found) for name, found in spans.items() if name != "hidden"}
        transfer_ms = exposed["halves"] - self._own(waits["halves"])
        # Transfers take multiprocessors while they run, not while a link holds them. With a budget the experts' own times show what is lent to
        # the half of them that runs beside experts; the other half runs beside attention.
        lent = self.communication_sms / self.most_sms * (0.5 if self.takes_budget else 1.0) if self.is_cuda else 0.0
        lent_ms = lent * (self.free_transfer_ms(work) if self.link.bytes_per_us else transfer_ms)
        ceiling_ms = max(results["hidden"]["ms"] + self.slowest(lent_ms), self.slowest(transfer_ms))
        sequential_ms, two_batch_ms = results["sequential"]["ms"], results["two_batch"]["ms"]
        gain_ms = sequential_ms - ceiling_ms
        return results | {
            "difference": self.difference(work),
            "ceiling_ms": round(ceiling_ms, 3),
            "ratio": round(sequential_ms / two_batch_ms, 4),
            "ceiling_ratio": round(sequential_ms / ceiling_ms, 4),
            "gain_share": round((sequential_ms - two_batch_ms) / gain_ms, 3) if gain_ms > 0 else None,
            "lent_ms of each rank": self.everyone(lent_ms),
            "transfers, ms of each rank": self.everyone(transfer_ms),
            "exposed_ms of each rank": {name: self.everyone(one) for name, one in exposed.items()},
            "waits for the slower rank, ms of each rank": waits,
            "compute_ms of each rank": {
                name: self.everyone(one.wall_us / 1e3 - exposed[name]) for name, one in stages.items()
            },
            "wait_ms": {name: waits_by_operation(found) for name, found in spans.items()},
            "stage_ms": {
                name: {category: round(us / 1e3, 2) for category, us in sorted(one.category_us.items())}
                for name, one in stages.items()
            },
        }

    def free_transfer_ms(self, work: StepWork) -> float:
        """Of a pass in halves, over the link as it is."""
        held, self.link.bytes_per_us = self.link.bytes_per_us, 0.0
        spans = self.spans("halves", work, overlap=True)
        self.link.bytes_per_us = held
        return communication_ms(span_shares(spans)) - self._own(self.rank_waits(spans))

    def _own(self, of_each_rank: list[float] | None) -> float:
        return of_each_rank[self.rank] if of_each_rank is not None else 0.0

    def _write_traces(self, name: str, spans: dict[str, tuple[Span, ...]]) -> None:
        for way, found in spans.items() if self.traces is not None else ():
            write_trace(self.traces / f"{name}_{way}_rank{self.rank}.json", self.rank, found)

    def kernels(self, rows: int) -> None:
        """What the device ran in an overlapped pass, stream by stream, as a trace of torch's profiler."""
        work = prefill_work(rows, self.rank)
        self.run("two_batch", work, overlap=True)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            self.run("two_batch", work, overlap=True)
        assert self.traces is not None
        profiler.export_chrome_trace(str(self.traces / f"{rows}_kernels_rank{self.rank}.json.gz"))

    def gated(self, work: StepWork, bucket: int | None = None, steps: int = 14) -> dict[str, Any]:
        """What the gate makes of such steps: reasons, and the time of the last ones beside sequential."""
        gate = OverlapGate(limits=OverlapLimits(min_decode_rows=2), timeline=self.timeline, gauges={})
        rules = OverlapRules(limits=gate.limits, captured_rows=(self.decode_rows,))
        lengths = [len(rows.tokens) for rows in work.sequences]
        reasons: list[str] = []
        times: list[float] = []
        beside: list[float] = []
        for step in range(steps):
            record = StepRecord(num_tokens=work.num_tokens, local_forward_mode=int(work.forward_mode), step=step)
            voted = gate.vote(record, lengths)
            answers = self.comms.host.world.all_gather(torch.tensor([[voted.overlap_gain_us, voted.overlap_trial]]))
            records = tuple(
                attrs.evolve(voted, overlap_gain_us=gain, overlap_trial=way) for gain, way in answers.tolist()
            )
            overlap, reason = decide_overlap(records, DispatchMode.NORMAL, rules, bucket)
            took_s = self.run("two_batch" if overlap else "sequential", work, overlap=overlap, bucket=bucket)
            done = self.timeline.last_pass
            assert done is not None
            plan = attrs.evolve(self.plan(work, overlap=overlap, bucket=bucket), step=done.step, overlap_reason=reason)
            gate.after_step(AgreedStep(plan=plan, records=records))
            reasons.append(reason or "on")
            times.append(1e3 * self.slowest(took_s))
            # In turn, because a device that never rests runs at a lower clock.
            gate.timeline.times_next = gate.timeline.times_next_pass = False
            beside.append(1e3 * self.slowest(self.run("sequential", work, overlap=False, bucket=bucket)))
        return {
            "reasons": reasons,
            "ms": round(statistics.median(times[-6:]), 3),
            "sequential_ms": round(statistics.median(beside[-6:]), 3),
            "times_ms": [round(time, 2) for time in times],
            "gain_us": int(voted.overlap_gain_us),
        }


def main() -> None:
    arguments = arguments_of_call()
    is_cuda = arguments.device == "cuda"
    on_device = "gloo" if arguments.shared_gpu else "nccl"
    dist.init_process_group(f"cpu:gloo,cuda:{on_device}" if is_cuda else "gloo")
    if is_cuda:
        torch.cuda.set_device(0 if arguments.shared_gpu else int(os.environ["LOCAL_RANK"]))
    shape = {**(SHAPE if is_cuda else TINY), "num_hidden_layers": arguments.layers}
    if arguments.heads:
        shape |= {"num_attention_heads": arguments.heads, "num_key_value_heads": arguments.heads}
    if arguments.fp8:
        shape["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    results: dict[str, Any] = {"arguments": vars(arguments), "torch": torch.__version__, "shape": shape}
    started_s = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps({**shape, "dtype": "bfloat16"}), encoding="utf8")
        bench = Bench(arguments, folder)

    def run(name: str, call: Callable[[], Any]) -> None:
        begun_s = time.perf_counter()
        results[name] = call()
        if bench.rank == 0:
            print(f"{time.perf_counter() - begun_s:6.1f} s", name, json.dumps(results[name]), flush=True)
            Path(arguments.out).write_text(json.dumps(results, indent=1), encoding="utf8")

    if bench.rank == 0:
        print("built in", round(time.perf_counter() - started_s, 1), "s", flush=True)
    pauses = [float(pause) for pause in arguments.pauses_ms.split(",") if pause]
    for pause_ms, rows in itertools.product(pauses, bench.rows):
        run(
            f"prefill {rows}, {pause_ms} ms apart",
            lambda rows=rows, ms=pause_ms: bench.paused(prefill_work(rows, bench.rank), ms),
        )
    for rows in () if pauses or arguments.held_only else bench.rows:
        run(f"prefill {rows}", lambda rows=rows: bench.prefill_results(rows))
        run(f"prefill {rows}, gate", lambda rows=rows: bench.gated(prefill_work(rows, bench.rank)))
    if arguments.decode_rows and is_cuda and not pauses:
        work, bucket = decode_work(bench.decode_rows, bench.context), arguments.decode_rows
        ways = {"sequential": False, "two_batch": True}
        run("decode difference", lambda: bench.difference(work, bucket))
        run("decode", lambda: bench.compared(ways, work, bucket))
        run("decode, gate", lambda: bench.gated(work, bucket))
    for rows in bench.rows if arguments.kernels else ():
        run(f"kernels {rows}", lambda rows=rows: bench.kernels(rows))
    if is_cuda and not pauses and arguments.held_gbps:
        held = f"at {arguments.held_gbps:g} GB/s"
        bench.link.open(1e3 * arguments.held_gbps)
        size = round(2e6 * arguments.held_gbps)
        run("ms of a transfer held to 2", lambda: [round(1e3 * took_s, 3) for took_s in bench.link.seconds(size)])
        for rows in bench.rows:
            run(f"prefill {rows} {held}", lambda rows=rows: bench.prefill_results(rows))
            run(f"prefill {rows} {held}, gate", lambda rows=rows: bench.gated(prefill_work(rows, bench.rank)))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
