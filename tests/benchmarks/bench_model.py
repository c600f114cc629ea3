"""Decode and prefill of the models on a CPU against transformers' ``generate``: 1 thread, CPU clock, the two taken in turn.

Run: ``python tests/benchmarks/bench_model.py [FOLDER] [--rounds 3] [--only qwen3_moe]``. FOLDER keeps the checkpoints (about 1.3 GB) for the
next run. Each side runs in a process of its own, so that neither has the other's memory settings; ratios compare medians of the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs

NEW_TOKENS = 24
VOCAB = 8192
FRAME: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "max_position_embeddings": 8192,
}
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {
        "num_key_value_heads": 2,
        "head_dim": 64,
        "intermediate_size": 1024,
        "moe_intermediate_size": 256,
        "num_experts": 32,
        "num_experts_per_tok": 4,
    },
    "deepseek_v3": {
        "num_key_value_heads": 8,
        "intermediate_size": 1024,
        "moe_intermediate_size": 256,
        "n_routed_experts": 32,
        "num_experts_per_tok": 4,
        "q_lora_rank": 128,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32,
        "v_head_dim": 64,
    },
    "mixtral": {
        "num_key_value_heads": 2,
        "head_dim": 64,
        "intermediate_size": 1024,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
}
"""About 105 to 115 million parameters each: out of the last-level cache in fp32."""


@attrs.frozen
class Case:
    family: str
    dtype: str
    batch: int
    prompt: int
    decode_goal: float | None = None
    """Least ratio to transformers that must hold; None: only reported."""
    prefill_goal: float | None = None


CASES = (
    Case("qwen3_moe", "float32", 1, 128, 1.5),
    Case("qwen3_moe", "float32", 8, 128),
    Case("qwen3_moe", "float32", 32, 128, 1.8, 1.4),
    Case("qwen3_moe", "float32", 8, 512, None, 1.4),
    Case("qwen3_moe", "bfloat16", 1, 128, 1.5),
    Case("qwen3_moe", "bfloat16", 32, 128, 1.8),
    Case("deepseek_v3", "float32", 32, 128, 4.0),
    Case("deepseek_v3", "float32", 8, 512, 5.0),
    Case("mixtral", "float32", 1, 128),
    Case("mixtral", "float32", 32, 128),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=sorted(SHAPES))
    parser.add_argument("--side", choices=("ours", "transformers"), help="for the child processes")
    parser.add_argument("--case", type=int)
    arguments = parser.parse_args()
    if arguments.side:
        print(json.dumps(run_side(arguments.side, arguments.folder, CASES[arguments.case])))
        return
    with tempfile.TemporaryDirectory(prefix="crossdock-bench-") as temporary:
        compare(arguments.folder or Path(temporary), arguments.rounds, arguments.only)


def compare(folder: Path, rounds: int, only: str | None) -> None:
    """Prints a line a case: tokens a second of both sides, their ratios, and whether the goals hold."""
    for number, case in enumerate(CASES):
        if only not in (None, case.family):
            continue
        build(folder, case.family)
        found: dict[str, list[dict[str, float]]] = {"transformers": [], "ours": []}
        for _ in range(rounds):
            for side, results in found.items():
                results.append(child(side, folder, number))
        median = {
            (side, key): statistics.median(result[key] for result in results)
            for side, results in found.items()
            for key in ("prefill_s", "step_s")
        }
        prefill = median["transformers", "prefill_s"] / median["ours", "prefill_s"]
        decode = median["transformers", "step_s"] / median["ours", "step_s"]
        rates = (
            case.batch / median["ours", "step_s"],
            case.batch / median["transformers", "step_s"],
            case.batch * case.prompt / median["ours", "prefill_s"],
            case.batch * case.prompt / median["transformers", "prefill_s"],
        )
        print(
            f"{case.family:12} {case.dtype:9} batch {case.batch:3} prompt {case.prompt:4}: "
            f"decode {rates[0]:7.1f} / {rates[1]:6.1f} tok/s = {decode:.2f}x{verdict(decode, case.decode_goal)}, "
            f"prefill {rates[2]:7.1f} / {rates[3]:7.1f} tok/s = {prefill:.2f}x{verdict(prefill, case.prefill_goal)}",
            flush=True,
        )


def verdict(ratio: float, goal: float | None) -> str:
    if goal is None:
        return ""
    return f" (goal {goal}: {'holds' if ratio >= 0.9 * goal else 'MISSED'})"


def child(side: str, folder: Path, case: int) -> dict[str, float]:
    command = [sys.executable, __file__, str(folder), "--side", side, "--case", str(case)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    output = subprocess.run(
        command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment
    ).stdout
    result: dict[str, float] = json.loads(output.splitlines()[-1])
    return result


def build(folder: Path, family: str) -> Path:
    """The checkpoint of a family, made at the first call."""
    from crossdock.testing.tiny_models import save_tiny_model

    if not (folder / family / "config.json").exists():
        save_tiny_model(folder / family, family, **FRAME, **SHAPES[family])
    return folder / family


def run_side(side: str, folder: Path, case: Case) -> dict[str, float]:
    """Seconds of CPU of the whole prefill and of one decode step."""
    import torch

    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(case.batch * 7919 + case.prompt)
    ids = torch.randint(1, VOCAB, (case.batch, case.prompt), generator=generator)
    run = (ours if side == "ours" else theirs)(folder / case.family, case, ids)
    run(2)
    first = timed(run, 1)
    return {"prefill_s": first, "step_s": (timed(run, NEW_TOKENS) - first) / (NEW_TOKENS - 1)}


def timed(run: Callable[[int], None], new_tokens: int) -> float:
    start = time.process_time()
    run(new_tokens)
    return time.process_time() - start


def theirs(folder: Path, case: Case, ids: Any) -> Callable[[int], None]:
    import torch
    from transformers import AutoModelForCausalLM

    dtype = getattr(torch, case.dtype)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa").eval()

    def run(new_tokens: int) -> None:
        lengths = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens}
        with torch.inference_mode():
            model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, pad_token_id=0, **lengths)

    return run


def ours(folder: Path, case: Case, ids: Any) -> Callable[[int], None]:
    from crossdock.comm import local_comms
    from crossdock.groups import rank_place, resolve_sizes
    from crossdock.host_memory import keep_freed_memory
    from crossdock.testing.model_driver import ModelDriver
    from crossdock.testing.model_parts import DriverChoice

    keep_freed_memory()
    sizes = resolve_sizes(ranks=1)
    page_tokens = 16
    pages = case.batch * (-(-(case.prompt + NEW_TOKENS) // page_tokens) + 1)
    choice = DriverChoice(
        folder=str(folder),
        page_tokens=page_tokens,
        num_pages=4 * pages,
        dtype=case.dtype,
        poison_new_pages=False,
        max_rows=case.batch * case.prompt,
    )
    driver = ModelDriver(choice, sizes, rank_place(sizes, 0), local_comms())
    prompts = ids.tolist()
    runs = iter(range(1000))

    def run(new_tokens: int) -> None:
        first = next(runs) * case.batch
        work = {first + i: prompt for i, prompt in enumerate(prompts)}
        for _ in range(new_tokens):
            logits = driver.step([work], last_only=True)
            work = {sequence: [int(row.argmax())] for sequence, row in logits.items()}

    return run


if __name__ == "__main__":
    main()
