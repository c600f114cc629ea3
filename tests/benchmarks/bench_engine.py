"""Continuous batching of the engine against transformers' own: 1 thread, CPU clock, each side in a process of its own.

Run: ``python tests/benchmarks/bench_engine.py [FOLDER] [--requests 256] [--rounds 1] [--family qwen3_moe]``. FOLDER keeps the checkpoint for the
next run. Exits with 1 when a goal is missed. Requests have 12 to 128 prompt and new tokens (100 to 1024, scaled by 1/8), all there from the start, at most 32 at once.
``steady`` is the engine with 32 equal requests of the mean lengths: the distance to it is what arrivals, tails and scheduling cost.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench_model import VOCAB, build

SHORTEST, LONGEST = 12, 128
BATCH = 32
GOAL_TRANSFORMERS = 3.0
GOAL_STEADY = 0.9
TOLERATED = 0.9
"""Other work on the machine moves a ratio by so much."""
SIDES = ("ours", "steady", "transformers")


def requests(count: int) -> list[tuple[list[int], int]]:
    """(prompt, new tokens) of each request; the same for both sides."""
    draw = random.Random(5)
    return [
        (
            [draw.randrange(1, VOCAB) for _ in range(draw.randint(SHORTEST, LONGEST))],
            draw.randint(SHORTEST, LONGEST),
        )
        for _ in range(count)
    ]


def steady_requests() -> list[tuple[list[int], int]]:
    """As many equal requests as run at once."""
    mean = (SHORTEST + LONGEST) // 2
    draw = random.Random(6)
    return [([draw.randrange(1, VOCAB) for _ in range(mean)], mean) for _ in range(BATCH)]


def ours(folder: Path, work: list[tuple[list[int], int]]) -> float:
    """New tokens a second of CPU."""
    from crossdock.comm import local_comms
    from crossdock.config import CheckpointConfig, Config, SchedulerConfig
    from crossdock.engine_build import build_engine
    from crossdock.host_memory import bound_kernel_caches, keep_freed_memory
    from crossdock.offline_link import OfflineLink
    from crossdock.rank_plan import plan_rank
    from crossdock.types.request import EngineRequest, SamplingParams

    keep_freed_memory()
    bound_kernel_caches()
    config = Config(
        checkpoint=CheckpointConfig(path=str(folder)),
        scheduler=SchedulerConfig(max_running_requests=BATCH, max_step_tokens=512, chunk_tokens=256, kv_tokens=16384),
    )
    asked = [
        EngineRequest(
            rid=str(index),
            prompt_ids=tuple(prompt),
            sampling=SamplingParams(max_new_tokens=new, temperature=0.0, ignore_eos=True),
        )
        for index, (prompt, new) in enumerate(work)
    ]
    with build_engine(plan_rank(config, 0), local_comms(), OfflineLink(asked)) as engine:
        start = time.process_time()
        engine.run()
        spent = time.process_time() - start
    return sum(new for _, new in work) / spent


def theirs(folder: Path, work: list[tuple[list[int], int]]) -> float:
    """New tokens a second of CPU."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig
    from transformers.generation import ContinuousBatchingConfig

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()
    generation = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=LONGEST)
    page = 32
    batching = ContinuousBatchingConfig(
        page_size=page,
        num_blocks=(BATCH + 2) * (2 * LONGEST // page + 2),
        max_batch_tokens=2048,
        use_cuda_graph=False,
        use_async_batching=False,
        allow_block_sharing=False,
    )

    def run(part: list[tuple[list[int], int]]) -> float:
        manager = model.init_continuous_batching(generation_config=generation, continuous_batching_config=batching)
        for index, (prompt, new) in enumerate(part):
            manager.add_request(prompt, request_id=str(index), max_new_tokens=new)
        start = time.process_time()
        manager.start()
        finished: set[str] = set()
        made = 0
        while len(finished) < len(part):
            result = manager.get_result(timeout=5)
            if result is not None and result.is_finished() and result.request_id not in finished:
                finished.add(result.request_id)
                made += len(result.generated_tokens)
        spent = time.process_time() - start
        manager.stop(block=True)
        assert made == sum(new for _, new in part), f"made {made} tokens"
        return made / spent

    run(work[:2])
    return run(work)


def run_side(side: str, folder: Path, count: int) -> float:
    import torch

    torch.set_num_threads(1)
    if side == "transformers":
        return theirs(folder, requests(count))
    work = requests(count) if side == "ours" else steady_requests()
    ours(folder, work[:2])
    return ours(folder, work)


def child(side: str, folder: Path, arguments: argparse.Namespace) -> float:
    command = [sys.executable, __file__, str(folder), "--side", side, "--requests", str(arguments.requests)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, env=environment).stdout
    return float(json.loads(output.splitlines()[-1]))


def compare(folder: Path, arguments: argparse.Namespace) -> bool:
    """Prints rates and ratios; True when the goals hold."""
    path = build(folder, arguments.family)
    found: dict[str, list[float]] = {side: [] for side in SIDES}
    for _ in range(arguments.rounds):
        for side in SIDES:
            found[side].append(child(side, path, arguments))
    rate = {side: statistics.median(values) for side, values in found.items()}
    to_theirs, to_steady = rate["ours"] / rate["transformers"], rate["ours"] / rate["steady"]
    print(
        f"{arguments.family} fp32, {arguments.requests} requests of {SHORTEST} to {LONGEST} tokens in and out, at most {BATCH} at once; "
        f"new tokens a second of CPU: engine {rate['ours']:.1f}, transformers {rate['transformers']:.1f}, "
        f"engine with {BATCH} equal requests {rate['steady']:.1f}"
    )
    for name, ratio, goal in (
        ("to transformers' continuous batching", to_theirs, GOAL_TRANSFORMERS),
        ("to the engine's steady rate", to_steady, GOAL_STEADY),
    ):
        print(f"  {name}: {ratio:.2f}x (goal {goal}: {'holds' if ratio >= TOLERATED * goal else 'MISSED'})")
    return to_theirs >= TOLERATED * GOAL_TRANSFORMERS and to_steady >= TOLERATED * GOAL_STEADY


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--family", default="qwen3_moe")
    parser.add_argument("--side", choices=SIDES, help="for the child processes")
    arguments = parser.parse_args()
    if arguments.side:
        print(json.dumps(run_side(arguments.side, arguments.folder, arguments.requests)))
        return 0
    with tempfile.TemporaryDirectory(prefix="crossdock-bench-") as temporary:
        holds = compare(arguments.folder or Path(temporary), arguments)
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
