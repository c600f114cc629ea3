"""Experts that move between two GPUs while requests run: are logits those of one GPU, and what does a step pay.

    python tests/benchmarks/gpu/rebalance.py --out FILE.json [--layers 16] [--dispatcher nvlink] [--transport auto]

Starts one process a GPU. First a small fp32 model: logits of every prompt with a rebalance after each pass against those of one GPU without.
Then a bf16 model of 128 experts a layer: the same decode load without and with rebalances, in turns in the same processes.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import torch
from torch._C._distributed_c10d import FileStore

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench_rebalance import Measured, measured_job, parted, summary
from crossdock.comm import create_comms, join_process_group, local_comms, take_device
from crossdock.config import Config, EplbConfig, LaunchConfig, PluginChoice
from crossdock.groups import resolve_sizes
from crossdock.offline import logits_job, offline_job
from crossdock.offline_job import OfflineJob, run_job_on_rank
from crossdock.rank_plan import plan_rank
from crossdock.testing.balanced_ranks import balanced_job_on_rank
from crossdock.testing.random_models import random_model_config, write_random_model
from crossdock.testing.world import RankContext
from crossdock.types.request import SamplingParams

PROMPTS = [[(7 * place + 3 * index) % 96 for place in range(length)] for index, length in enumerate((24, 1, 31, 28, 9))]


EXACT = {"experts": PluginChoice(name="torch"), "attention": PluginChoice(name="torch")}
"""Back ends without tf32."""


def on_gpu(
    config: Config, eplb: EplbConfig, options: argparse.Namespace, picker: str = "dynamic", **backends: PluginChoice
) -> Config:
    return attrs.evolve(
        config,
        launch=LaunchConfig(device=options.device, ranks_per_gpu=_ranks_per_gpu(options)),
        eplb=attrs.evolve(eplb, transport=options.transport),
        **backends,
        eplb_algo=PluginChoice(name="global"),
        expert_location=PluginChoice(name=picker),
    )


def _ranks_per_gpu(options: argparse.Namespace) -> int:
    return 2 if options.shared_gpu else 1


def equality(context: RankContext, folder: Path, options: argparse.Namespace, dispatcher: str, picker: str) -> Any:
    """Largest difference of logits from one GPU without balancing, relative to the largest logit; and what moved."""
    model = write_random_model(folder / f"small-{context.rank}", hidden_size=128, moe_intermediate_size=128)
    single = on_gpu(random_model_config(model), EplbConfig(), options, **EXACT)
    job = logits_job(model, PROMPTS, single)
    expected = run_job_on_rank(job, plan_rank(job.config, 0), local_comms()).logits
    config = random_model_config(
        model, ranks=2, attn_dp=2, dispatcher=dispatcher, chunk_tokens=1, max_step_tokens=4, max_running_requests=2
    )
    eplb = EplbConfig(enabled=True, slots=12, interval=1, max_step_bytes=1_000_000, canary=True)
    found = balanced_job_on_rank(context, logits_job(model, PROMPTS, on_gpu(config, eplb, options, picker, **EXACT)))
    worst = [
        float(np.abs(array - expected[rid]).max() / np.abs(expected[rid]).max())
        for rid, array in found.result.logits.items()
    ]
    return {
        "dispatcher": dispatcher,
        "picker": picker,
        "largest_difference": max(worst),
        "outcomes": sorted({entry.outcome for entry in found.rebalances}),
        "rebalances": len(found.rebalances),
        "moved_slots": sum(entry.moved_slots for entry in found.rebalances),
    }


def speed_jobs(folder: Path, options: argparse.Namespace) -> tuple[OfflineJob, OfflineJob]:
    prompts = [[(5 * place + request) % 96 for place in range(8)] for request in range(2 * options.requests)]
    sampling = SamplingParams(max_new_tokens=options.tokens, temperature=0.0, ignore_eos=True)
    config = random_model_config(
        folder,
        ranks=2,
        attn_dp=2,
        dispatcher=options.dispatcher,
        max_running_requests=options.requests,
        kv_tokens=options.requests * 512,
        page_tokens=64,
        max_sequence_tokens=512,
    )
    jobs = [
        offline_job(
            folder,
            prompts,
            sampling,
            on_gpu(
                config,
                EplbConfig(enabled=True, slots=144, interval=interval, max_step_bytes=options.max_step_bytes),
                options,
                options.picker,
            ),
        )
        for interval in (10**9, options.interval)
    ]
    return jobs[0], jobs[1]


def run_rank(options: argparse.Namespace) -> None:
    """All parts on one rank; results to a file."""
    folder = Path(options.folder)
    sizes = resolve_sizes(ranks=2, attn_dp_size=2)
    take_device(options.device, options.rank, _ranks_per_gpu(options))
    store = FileStore(str(folder / "store"), 2)
    join_process_group(rank=options.rank, ranks=2, store=store, device_type=options.device, timeout_s=60.0)
    comms = create_comms(sizes, options.rank, options.device)
    context = RankContext(rank=options.rank, size=2, comms_of=lambda _: comms)
    found: dict[str, Any] = {"equal": []}
    pairs = (("alltoallv", "dynamic"), ("alltoallv", "lp"), ("allgatherv", "locality"))
    if options.pair:
        pairs = (tuple(options.pair.split(":")),)
    for dispatcher, picker in () if options.skip_equality else pairs:
        found["equal"].append(equality(context, folder, options, dispatcher, picker))
        print(options.rank, found["equal"][-1], flush=True)
    if options.rounds:
        model = write_random_model(
            folder / f"model-{options.rank}",
            dtype="bfloat16",
            hidden_size=options.hidden,
            num_hidden_layers=options.layers,
            num_attention_heads=32,
            num_key_value_heads=4,
            head_dim=128,
            num_experts=128,
            num_experts_per_tok=8,
            moe_intermediate_size=options.inner,
            vocab_size=4096,
            max_position_embeddings=4096,
        )
        options.ranks = 2
        runs: tuple[list[Measured], list[Measured]] = ([], [])
        if options.one_run:
            budgets = {int(step): int(num_bytes) for step, num_bytes in (each.split(":") for each in options.budgets)}
            run = measured_job(context, speed_jobs(model, options)[1], budgets)
            # Two layers were prepared before.
            quiet, *parts = parted(run, *(step + options.settling for step in budgets))
            for moving, num_bytes in zip(parts[1:], budgets.values(), strict=True):
                found[f"speed_{num_bytes}"] = summary([quiet], [moving], options)
            runs = ([quiet], parts[:1])
        for _ in range(0 if options.one_run else options.rounds):
            for job, measured in zip(speed_jobs(model, options), runs, strict=True):
                measured.append(measured_job(context, job))
                print(options.rank, "moved", measured[-1].moved_bytes, "in", measured[-1].applied, flush=True)
        found["speed"] = summary(*runs, options)
    (folder / f"result-{options.rank}.json").write_text(json.dumps(found), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="")
    parser.add_argument("--pair", default="", help="dispatcher:picker of the equality part; all when empty")
    parser.add_argument("--skip-equality", action="store_true")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--inner", type=int, default=768)
    parser.add_argument("--requests", type=int, default=64, help="running on each GPU")
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--interval", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument(
        "--one-run",
        action="store_true",
        help="quiet steps are those of the same run before the first decision, whose sequences are shorter: an upper bound",
    )
    parser.add_argument("--max-step-bytes", type=int, default=1 << 24)
    parser.add_argument(
        "--budgets", nargs="*", default=[], help="STEP:BYTES: from that step on another budget, with --one-run"
    )
    parser.add_argument("--settling", type=int, default=70, help="steps after it that are left to the part before")
    parser.add_argument("--dispatcher", default="nvlink")
    parser.add_argument("--picker", default="dynamic")
    parser.add_argument("--transport", default="auto")
    parser.add_argument("--device", default="cuda", help="cpu only to try the script")
    parser.add_argument(
        "--shared-gpu",
        action="store_true",
        help="both ranks on one GPU, under MPS: CPU time and logits count, durations are not those of two GPUs",
    )
    parser.add_argument("--rank", type=int, default=-1, help=argparse.SUPPRESS)
    parser.add_argument("--folder", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank >= 0:
        run_rank(options)
        return
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, __file__, *sys.argv[1:], "--folder", folder]
        ranks = [subprocess.Popen([*words, "--rank", str(rank)]) for rank in range(2)]
        codes = [rank.wait() for rank in ranks]
        if any(codes):
            raise SystemExit(f"ranks ended with {codes}")
        result = json.loads((Path(folder) / "result-0.json").read_text(encoding="utf-8"))
    result |= {"torch": torch.__version__, "transport": options.transport, "dispatcher": options.dispatcher}
    print(json.dumps(result, indent=1))
    if options.out:
        Path(options.out).write_text(json.dumps(result, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
