"""The engine end to end: decode and prefill tokens per second of a random model made in GPU memory.

    python tests/benchmarks/gpu/engine.py --shape qwen3_30b --out FILE.json
    python -m torch.distributed.run --nproc-per-node 2 tests/benchmarks/gpu/engine.py --shape qwen3_30b --dispatcher nvlink --out FILE.json

Greedy, prompts of 128 random tokens, 128 new tokens each; prefill: 16 prompts of 4096 tokens. Batches and rates are those of all ranks
together. Decode counts whole-batch tokens from the moment every sequence has its first one. Everything of serving but HTTP: scheduler,
paged cache, step plan, sampling. ``--weights narrow`` draws every parameter from -0.001 to 0.001, as vLLM's dummy weights. Router
scores are then so alike that bfloat16 cannot tell them apart; float32, which we route in, can. ``tied`` makes them equal, so that every
token takes the same experts. ``--count-experts`` tells how many a layer touches (and costs time, so its rates do not count).

Weight bytes are most of a decode step, so rates depend on how many experts the rows of a step touch. DeepSeek-V2-Lite on one GPU is
therefore told with both routings: spread, as the random model's routers choose, and tied; a few layers count what either touches first.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
import zlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from crossdock import checkpoint
from crossdock.comm import RankComms, create_comms, local_comms, take_device
from crossdock.comm_gloo import c10d
from crossdock.config import (
    CheckpointConfig,
    Config,
    LaunchConfig,
    ParallelConfig,
    PluginChoice,
    RecorderConfig,
    SchedulerConfig,
)
from crossdock.engine_build import build_engine
from crossdock.host_memory import set_aside_built_objects
from crossdock.rank_plan import RankPlan, plan_rank
from engine_link import BenchLink, TimedRunner, Workload, random_workload
from engine_routing import COUNTED_LAYERS, TIED, TOLD_SHAPES, tie_routers, touched_experts
from shapes import SHAPES

PROMPT, NEW, WARM_NEW, LONG_PROMPTS, LONG_PROMPT = 128, 128, 8, 16, 4096
NARROW = 1e-3


def tied_read(self: checkpoint.RandomCheckpoint, name: str, index: tuple[slice, ...] = ()) -> torch.Tensor:
    """As ``narrow_read``, with routers that score every expert the same."""
    values = narrow_read(self, name, index)
    return values.zero_() if ".mlp.gate." in name else values


def narrow_read(self: checkpoint.RandomCheckpoint, name: str, index: tuple[slice, ...] = ()) -> torch.Tensor:
    """Instead of ``RandomCheckpoint.read``: every parameter uniform in (-0.001, 0.001)."""
    shape, device = self.shape(name), torch.device("cuda" if torch.cuda.is_available() else "cpu")
    self._unread.pop(name, None)
    generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
    values = torch.empty(shape, device=device, dtype=torch.bfloat16)
    return values.uniform_(-NARROW, NARROW, generator=generator)[index]


READS = {"narrow": narrow_read, "tied": tied_read}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=sorted(SHAPES), required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument(
        "--batches", default="", help="of all ranks together; 1,32,256 on one GPU, 32,256,512 on several"
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--attn-tp", type=int, default=1)
    parser.add_argument("--dispatcher", default="allgatherv")
    parser.add_argument("--experts", default="auto")
    parser.add_argument("--strategy", default="sequential")
    parser.add_argument("--weights", choices=("unit", *READS), default="unit")
    parser.add_argument("--count-experts", action="store_true")
    parser.add_argument("--graphs", choices=("auto", "off"), default="auto")
    parser.add_argument("--depth", choices=("auto", "0", "1"), default="auto")
    parser.add_argument("--layers", type=int, default=0)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu only to try the script")
    parser.add_argument(
        "--profile", default="", help="folder for a table of kernels a workload; rates do not count then"
    )
    return parser.parse_args()


def config_of(arguments: argparse.Namespace, folder: str, ranks: int, most: int) -> Config:
    return Config(
        checkpoint=CheckpointConfig(path=folder, load_format="random", dtype="bfloat16"),
        parallel=ParallelConfig(ranks=ranks, attn_dp_size=ranks // arguments.attn_tp, attn_tp_size=arguments.attn_tp),
        launch=LaunchConfig(device=arguments.device, launcher="torchrun" if ranks > 1 else "local"),
        recorder=RecorderConfig(mode="stat" if arguments.count_experts else "off"),
        dispatcher=PluginChoice(name=arguments.dispatcher),
        experts=PluginChoice(name=arguments.experts),
        strategy=PluginChoice(name=arguments.strategy),
        scheduler=SchedulerConfig(
            max_running_requests=most,
            max_step_tokens=16384,
            chunk_tokens=8192,
            page_tokens=64,
            kv_tokens=131072,
            max_sequence_tokens=8192,
            prefix_cache=False,
            graphs=arguments.graphs,
            depth=arguments.depth,
        ),
    )


def workloads(
    batches: list[int], replicas: int, replica: int, vocab: int, repeats: int, *, both_routings: bool = False
) -> list[Workload]:
    """One replica's share of each, warm-ups first; last decode with tied routers, where ``both_routings`` are wanted."""
    made: list[Workload] = []
    for repeat in range(repeats + 1):
        name, new = ("warm", WARM_NEW) if repeat == 0 else (f"{repeat}", NEW)
        made += [
            random_workload(f"{name} decode {batch}", batch // replicas, PROMPT, new, vocab, replica)
            for batch in batches
        ]
        made.append(random_workload(f"{name} prefill", LONG_PROMPTS // replicas, LONG_PROMPT, 1, vocab, replica))
    tied = range(1, repeats + 1) if both_routings else ()
    for repeat in tied:
        made += [
            random_workload(f"{TIED} {repeat} decode {batch}", batch // replicas, PROMPT, NEW, vocab, replica)
            for batch in batches
        ]
    return made


def summary(results: dict[str, dict[str, float]], batches: list[int], replicas: int) -> dict[str, Any]:
    """Medians and extremes over the repetitions; rates of all ranks together."""
    timed = {name: result for name, result in results.items() if name[0].isdigit()}
    found: dict[str, Any] = _decode_summary(timed, batches, replicas)
    tokens = LONG_PROMPTS * LONG_PROMPT
    found["prefill"] = _spread([tokens / run["total_s"] for name, run in timed.items() if name.endswith("prefill")])
    tied = {name: result for name, result in results.items() if name.startswith(TIED)}
    return {**found, TIED: _decode_summary(tied, batches, replicas)} if tied else found


def _decode_summary(results: dict[str, dict[str, float]], batches: list[int], replicas: int) -> dict[str, Any]:
    """Also of the whole run, prompts included, and of the first token of all."""
    found: dict[str, Any] = {}
    for batch in batches:
        runs = [result for name, result in results.items() if name.endswith(f"decode {batch}")]
        rates = [run["decode_tok_s"] * replicas for run in runs]
        whole = [batch * NEW / run["total_s"] for run in runs]
        steps = {key: value for key, value in runs[-1].items() if key.endswith("_ms")}
        found[f"decode {batch}"] = {**_spread(rates), "whole_run_tok_s": _spread(whole)["tok_s"], "step": steps}
    return found


def _spread(rates: list[float]) -> dict[str, float]:
    return {
        "tok_s": round(statistics.median(rates), 1),
        "min": round(min(rates), 1),
        "max": round(max(rates), 1),
    }


def write_profile(profile: torch.profiler.profile, file: Path) -> None:
    """Time of each kernel over the workload that has just ended."""
    profile.stop()
    file.parent.mkdir(parents=True, exist_ok=True)
    table = profile.key_averages().table(sort_by="cuda_time_total", row_limit=50, max_name_column_width=80)
    file.write_text(table, encoding="utf8")


def measure(arguments: argparse.Namespace, plan: RankPlan, comms: RankComms, store: Any) -> dict[str, Any] | None:
    replicas, ranks = plan.sizes.attn_dp_size, plan.sizes.ranks
    batches = [int(batch) for batch in (arguments.batches or ("32,256,512" if ranks > 1 else "1,32,256")).split(",")]
    results: dict[str, dict[str, float]] = {}
    touched: dict[str, dict[str, float]] = {}
    clocks: list[TimedRunner] = []
    profiles: list[torch.profiler.profile] = []

    def on_begin(name: str) -> None:
        clocks[0].take()
        if name.startswith(f"{TIED} 1 ") and name.endswith(f" {batches[0]}"):
            if arguments.count_experts:
                touched["spread"] = touched_experts(clocks[0], comms)
                clocks[0].recorder.start()
            tie_routers(clocks[0])
        if arguments.profile and plan.place.rank == 0 and name.startswith("1 "):
            kind = torch.profiler.ProfilerActivity
            profiles.append(torch.profiler.profile(activities=[kind.CUDA if arguments.device == "cuda" else kind.CPU]))
            profiles[-1].start()

    def on_result(name: str, result: dict[str, float]) -> None:
        if profiles:
            write_profile(profiles.pop(), Path(arguments.profile) / f"{name.replace(' ', '_')}.txt")
        results[name] = {**result, **clocks[0].take()}
        if plan.place.rank == 0:
            print(name, {key: round(value, 3) for key, value in results[name].items()}, flush=True)

    is_leader = plan.place.attn_tp_rank == 0
    vocab = plan.info.vocab_size
    own: list[Workload] = []
    if is_leader:
        is_told = tells_both_routings(arguments, ranks)
        own = workloads(batches, replicas, plan.place.attn_dp_rank, vocab, arguments.repeats, both_routings=is_told)
    started_s = time.perf_counter()
    with build_engine(plan, comms, BenchLink(own, on_begin, on_result), store=store) as engine:
        set_aside_built_objects()
        engine.runner = TimedRunner(engine.runner)
        clocks.append(engine.runner)
        if plan.place.rank == 0:
            print("\n".join(plan.selection.lines()), flush=True)
            print("built in", round(time.perf_counter() - started_s, 1), "s", flush=True)
        if arguments.count_experts:
            engine.runner.recorder.start()
        engine.run()
        if arguments.count_experts:
            touched["spread" if not touched else TIED] = touched_experts(engine.runner, comms)
    if plan.place.rank:
        return None
    return {
        "shape": arguments.shape,
        "layers": plan.info.num_layers,
        "ranks": ranks,
        "attn_tp": arguments.attn_tp,
        "dispatcher": arguments.dispatcher,
        "weights": arguments.weights,
        "strategy": arguments.strategy,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if arguments.device == "cuda" else "cpu",
        **({"touched_experts": touched} if touched else {}),
        **summary(results, batches, replicas),
    }


def tells_both_routings(arguments: argparse.Namespace, ranks: int) -> bool:
    return (
        arguments.shape in TOLD_SHAPES
        and arguments.weights == "unit"
        and arguments.device == "cuda"
        and ranks == 1
        and not arguments.profile
    )


def measured(arguments: argparse.Namespace, rank: int, ranks: int, store: Any) -> dict[str, Any] | None:
    """Builds the model of a shape and measures; None on other ranks than the first."""
    shape = dict(SHAPES[arguments.shape])
    if arguments.layers:
        shape["num_hidden_layers"] = arguments.layers
    most = max(int(batch) for batch in (arguments.batches or ("512" if ranks > 1 else "256")).split(","))
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps({**shape, "dtype": "bfloat16"}), encoding="utf8")
        config = config_of(arguments, folder, ranks, most * arguments.attn_tp // ranks)
        plan = plan_rank(config, rank)
        comms = create_comms(plan.sizes, rank, arguments.device) if ranks > 1 else local_comms()
        return measure(arguments, plan, comms, store)


def main() -> None:
    arguments = parse()
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if arguments.weights in READS:
        checkpoint.RandomCheckpoint.read = READS[arguments.weights]  # type: ignore[method-assign]
    take_device(arguments.device, rank)
    store = None
    if ranks > 1:
        backend = "gloo" if arguments.device == "cpu" else "cpu:gloo,cuda:nccl"
        store = c10d.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]) + 1, ranks, rank == 0)
        dist.init_process_group(backend, store=store, rank=rank, world_size=ranks)
    touched: dict[str, Any] = {}
    if tells_both_routings(arguments, ranks) and not arguments.count_experts and not arguments.layers:
        few = {"count_experts": True, "layers": COUNTED_LAYERS, "repeats": 1}
        counted = measured(argparse.Namespace(**{**vars(arguments), **few}), rank, ranks, store)
        touched = {"touched_experts": (counted or {})["touched_experts"]}
    found = measured(arguments, rank, ranks, store)
    if found is not None:
        found |= touched
        Path(arguments.out).write_text(json.dumps(found, indent=1), encoding="utf8")
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
