"""A DeepSeek-V3-shaped slice in fp8 on two GPUs, attention DP 2 and EP 2, beside the bound that the hardware sets.

    python -m torch.distributed.run --nproc-per-node 2 tests/benchmarks/gpu/v3_slice.py --out FILE.json

One dense layer and eight MoE layers of 256 experts, random weights. Prefill: 16 prompts of 4,096 tokens over both ranks. Decode: 128
sequences a rank from a context of 1,024. Everything of serving but HTTP. The bound of a step on a rank is
max((weight + KV bytes) / 4.3 TB/s, FLOP / 1.2 PFLOP/s) + wire bytes / 372 GB/s, with as many experts touched as evenly spread routing
touches. Routers of random models are not that even: ``--count-experts`` counts, and gives the bound of decode for what was counted (the
counting costs time, so its rates do not count). With ``--shared-gpu`` all ranks are on one GPU, under MPS: to see that it runs; its rates and
shares of a bound for a GPU a rank mean nothing.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import attrs
import torch
import torch.distributed as dist
from crossdock.comm import create_comms, local_comms, take_device
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
from crossdock.rank_plan import plan_rank
from engine import write_profile
from engine_link import BenchLink, TimedRunner, Workload, random_workload
from engine_routing import touched_experts
from shapes import SHAPES

BYTES_S, FLOP_S, WIRE_BYTES_S = 4.3e12, 1.2e15, 372e9
PROMPTS, PROMPT = 16, 4096
SEQUENCES, CONTEXT, NEW = 128, 1024, 40
TINY = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "n_routed_experts": 16,
    "q_lora_rank": 128,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
    "vocab_size": 512,
}
"""To try the script on a CPU."""


@attrs.frozen(kw_only=True)
class Step:
    """What a rank does in one step."""

    tokens: int
    context: float
    """Keys that a token looks at, on average."""
    absorbed: bool
    """Attention over the latent, as in decode."""
    logit_rows: int
    touched: float | None = None
    """Share of the experts whose weights are read; None for that of evenly spread routing."""


def bound_s(shape: dict[str, Any], ranks: int, step: Step) -> dict[str, float]:
    """Seconds of the bound and its parts."""
    hidden, layers = shape["hidden_size"], shape["num_hidden_layers"]
    moe_layers = layers - shape["first_k_dense_replace"]
    heads, kv, rope = shape["num_attention_heads"], shape["kv_lora_rank"], shape["qk_rope_head_dim"]
    nope, value, q_lora = shape["qk_nope_head_dim"], shape["v_head_dim"], shape["q_lora_rank"]
    head_matrix = hidden * shape["vocab_size"]
    projections = hidden * (q_lora + kv + rope) + q_lora * heads * (nope + rope) + heads * value * hidden
    latent_up = heads * kv * (nope + value)
    expert = 3 * hidden * shape["moe_intermediate_size"]
    dense = 3 * hidden * shape["intermediate_size"] * (layers - moe_layers)
    shared = expert * shape["n_shared_experts"]
    local = shape["n_routed_experts"] // ranks
    touched = step.touched
    if touched is None:
        touched = 1 - (1 - shape["num_experts_per_tok"] / shape["n_routed_experts"]) ** (step.tokens * ranks)
    weights = layers * (projections + 2 * latent_up) + dense + moe_layers * (shared + expert * local * touched)
    cache = layers * step.tokens * step.context * (kv + rope) * 2 if step.absorbed else 0.0
    moved_bytes = weights + 2 * head_matrix * min(1, step.logit_rows) + cache
    per_key = heads * 2 * (2 * kv + rope) if step.absorbed else heads * 2 * (nope + rope + value)
    per_token = 2 * (layers * (projections + latent_up) + dense)
    per_token += 2 * moe_layers * (shared + expert * shape["num_experts_per_tok"])
    flop = step.tokens * (per_token + layers * per_key * step.context) + 2 * head_matrix * step.logit_rows
    elsewhere = step.tokens * (1 - math.pow(1 / ranks, shape["num_experts_per_tok"])) if ranks > 1 else 0.0
    wire = moe_layers * elsewhere * hidden * 3
    memory_s, math_s, wire_s = moved_bytes / BYTES_S, flop / FLOP_S, wire / WIRE_BYTES_S
    return {"bound_s": max(memory_s, math_s) + wire_s, "memory_s": memory_s, "math_s": math_s, "wire_s": wire_s}


def workloads(arguments: argparse.Namespace, replica: int, ranks: int, vocab: int) -> list[Workload]:
    """One rank's share; a warm-up of each first."""
    count, length = PROMPTS // ranks, arguments.prompt
    made: list[Workload] = []
    for repeat in range(arguments.repeats + 1):
        name = "warm" if repeat == 0 else str(repeat)
        made.append(random_workload(f"{name} prefill", count, length, 1, vocab, replica))
        new = 4 if repeat == 0 else NEW
        made.append(random_workload(f"{name} decode", arguments.sequences, arguments.context, new, vocab, replica))
    return made


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", required=True)
    parser.add_argument("--dispatcher", default="nvlink")
    parser.add_argument("--wire", default="fp8")
    parser.add_argument("--experts", default="deep_gemm")
    parser.add_argument("--attention", default="auto")
    parser.add_argument("--count-experts", action="store_true")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--layers", type=int, default=0)
    parser.add_argument("--step-tokens", type=int, default=16384)
    parser.add_argument("--shared-gpu", action="store_true", help="all ranks on one GPU: that it runs, no figures")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu only to try the script")
    parser.add_argument("--profile", default="", help="folder for tables of kernels of the first repetition")
    arguments = parser.parse_args()
    on_gpu = arguments.device == "cuda"
    arguments.prompt, arguments.context = (PROMPT, CONTEXT) if on_gpu else (64, 32)
    arguments.sequences = SEQUENCES if on_gpu else 4
    return arguments


def config_of(arguments: argparse.Namespace, folder: str, ranks: int) -> Config:
    wire = {"wire": arguments.wire} if arguments.dispatcher in ("nvlink", "deepep") and ranks > 1 else {}
    return Config(
        checkpoint=CheckpointConfig(path=folder, load_format="random", dtype="bfloat16"),
        parallel=ParallelConfig(ranks=ranks, attn_dp_size=ranks),
        launch=LaunchConfig(
            device=arguments.device,
            launcher="torchrun" if ranks > 1 else "local",
            ranks_per_gpu=ranks if arguments.shared_gpu else 1,
        ),
        dispatcher=PluginChoice(name=arguments.dispatcher, options=wire),
        experts=PluginChoice(name=arguments.experts),
        attention=PluginChoice(name=arguments.attention),
        recorder=RecorderConfig(mode="stat" if arguments.count_experts else "off"),
        scheduler=SchedulerConfig(
            max_running_requests=arguments.sequences,
            max_step_tokens=arguments.step_tokens,
            chunk_tokens=arguments.step_tokens,
            page_tokens=64,
            kv_tokens=arguments.sequences * (arguments.context + 128),
            max_sequence_tokens=8192,
            prefix_cache=False,
        ),
    )


def measure(
    arguments: argparse.Namespace, shape: dict[str, Any], config: Config, rank: int, ranks: int
) -> dict[str, Any]:
    store = None
    if ranks > 1:
        backend = "gloo" if arguments.device == "cpu" else "cpu:gloo,cuda:nccl"
        store = c10d.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]) + 1, ranks, rank == 0)
        dist.init_process_group(backend, store=store, rank=rank, world_size=ranks)
    plan = plan_rank(config, rank)
    comms = create_comms(plan.sizes, rank, arguments.device) if ranks > 1 else local_comms()
    results: dict[str, dict[str, float]] = {}
    clocks: list[TimedRunner] = []
    profiles: list[torch.profiler.profile] = []

    def on_begin(name: str) -> None:
        clocks[0].take()
        if arguments.profile and rank == 0 and name.startswith("1 "):
            kind = torch.profiler.ProfilerActivity
            profiles.append(torch.profiler.profile(activities=[kind.CUDA if arguments.device == "cuda" else kind.CPU]))
            profiles[-1].start()

    def on_result(name: str, result: dict[str, float]) -> None:
        if profiles:
            write_profile(profiles.pop(), Path(arguments.profile) / f"{name.replace(' ', '_')}.txt")
        results[name] = {**result, **clocks[0].take()}
        if rank == 0:
            print(name, {key: round(value, 3) for key, value in results[name].items()}, flush=True)

    own = workloads(arguments, rank, ranks, plan.info.vocab_size)
    started_s = time.perf_counter()
    with build_engine(plan, comms, BenchLink(own, on_begin, on_result), store=store) as engine:
        engine.runner = TimedRunner(engine.runner)
        clocks.append(engine.runner)
        if rank == 0:
            print("\n".join(plan.selection.lines()), flush=True)
            print("built in", round(time.perf_counter() - started_s, 1), "s", flush=True)
        if arguments.count_experts:
            engine.runner.recorder.start()
        engine.run()
        touched = touched_experts(engine.runner, comms) if arguments.count_experts else {}
    return summary(arguments, shape, ranks, results, touched)


def summary(
    arguments: argparse.Namespace,
    shape: dict[str, Any],
    ranks: int,
    results: dict[str, Any],
    touched: dict[str, float],
) -> dict[str, Any]:
    """Medians over the repetitions, the bound, and the share of it that was reached; ``touched`` experts of a layer by choices of a step."""
    tokens = PROMPTS // ranks * arguments.prompt
    prefill = bound_s(
        shape, ranks, Step(tokens=tokens, context=arguments.prompt / 2, absorbed=False, logit_rows=PROMPTS // ranks)
    )
    context = arguments.context + NEW / 2
    decode = bound_s(
        shape, ranks, Step(tokens=arguments.sequences, context=context, absorbed=True, logit_rows=arguments.sequences)
    )
    taken = {
        "prefill": [
            result["total_s"] for name, result in results.items() if name[0].isdigit() and name.endswith("prefill")
        ],
        "decode": [
            arguments.sequences / result["decode_tok_s"]
            for name, result in results.items()
            if name[0].isdigit() and name.endswith("decode")
        ],
    }
    found: dict[str, Any] = {"layers": shape["num_hidden_layers"], "ranks": ranks, "arguments": vars(arguments)}
    for name, bound in (("prefill", prefill), ("decode", decode)):
        median_s = statistics.median(taken[name])
        found[name] = {
            "ms": [round(value * 1e3, 2) for value in taken[name]],
            "bound_ms": {key.removesuffix("_s"): round(value * 1e3, 2) for key, value in bound.items()},
            "share_of_bound": round(bound["bound_s"] / median_s, 3),
        }
    # Named by the power of two above the choices of a step.
    choices = arguments.sequences * ranks * shape["num_experts_per_tok"]
    counted = touched.get(f"{1 << choices.bit_length()} choices")
    if counted is not None:
        share = counted / shape["n_routed_experts"]
        step = Step(
            tokens=arguments.sequences, context=context, absorbed=True, logit_rows=arguments.sequences, touched=share
        )
        bound = bound_s(shape, ranks, step)
        found["counted"] = {"touched_experts": touched, "decode_bound_ms": round(bound["bound_s"] * 1e3, 2)}
    found["prefill"]["tok_s"] = round(tokens * ranks / statistics.median(taken["prefill"]))
    found["decode"]["tok_s"] = round(arguments.sequences * ranks / statistics.median(taken["decode"]))
    return found


def main() -> None:
    arguments = parse()
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    shape = {**SHAPES["dsv3_slice"], **(TINY if arguments.device == "cpu" else {})}
    if arguments.layers:
        shape["num_hidden_layers"] = arguments.layers
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps({**shape, "dtype": "bfloat16"}), encoding="utf8")
        config = config_of(arguments, folder, ranks)
        take_device(arguments.device, rank, config.launch.ranks_per_gpu)
        found = measure(arguments, shape, config, rank, ranks)
    if rank == 0:
        Path(arguments.out).write_text(json.dumps(found, indent=1), encoding="utf8")
        print(json.dumps(found), flush=True)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
