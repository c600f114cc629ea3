"""Decode and prefill of the models on a CPU against transformers' ``generate``: 1 thread, CPU clock, the two taken in turn.

Run: ``python tests/benchmarks/bench_model.py [FOLDER] [--rounds 3] [--only qwen3_moe]``. FOLDER keeps the checkpoints (about 1.3 GB) for the
next run. Each side runs in a process of its own, so that neither has the other's memory settings; ratios compare medians of the rounds,
each with a median of three prefills.
A prefill's share of the matmul rate compares with torch's product of two 1024 x 1024 matrices, timed in the same process. Memory is what the
process held at most, libraries included. Exits with 1 when a goal is missed.
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
Side = tuple[Callable[[int], list[float]], dict[str, float]]
"""Makes so many new tokens from every prompt, and tells the CPU clock after each of them; sizes in MiB."""
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
class Goal:
    """Least value that must hold, and the one that is hoped for."""

    must: float
    hoped: float | None = None

    def verdict(self, value: float) -> str:
        held = f"goal {self.must}: {'holds' if self.holds(value) else 'MISSED'}"
        return held if self.hoped is None else f"{held}, hoped {self.hoped}: {'holds' if value >= self.hoped else 'no'}"

    def holds(self, value: float) -> bool:
        return value >= TOLERATED * self.must


@attrs.frozen
class Case:
    family: str
    dtype: str
    batch: int
    prompt: int
    decode: Goal | None = None
    """Ratio to transformers; None: only reported."""
    prefill: Goal | None = None
    share: Goal | None = None
    """Of the matmul rate, in a prefill."""


TOLERATED = 0.9
"""Other work on the machine moves a ratio by so much."""
FP32_PREFILL, FP32_SHARE, BF16_SHARE = Goal(1.4), Goal(0.7, 0.8), Goal(0.45, 0.55)
CASES = (
    Case("qwen3_moe", "float32", 1, 128, Goal(1.5, 3.5)),
    Case("qwen3_moe", "float32", 8, 128, None, FP32_PREFILL, FP32_SHARE),
    Case("qwen3_moe", "float32", 32, 128, Goal(1.8, 3.0), FP32_PREFILL, FP32_SHARE),
    Case("qwen3_moe", "float32", 8, 512, None, FP32_PREFILL, FP32_SHARE),
    Case("qwen3_moe", "bfloat16", 1, 128, Goal(1.5, 3.0), None, BF16_SHARE),
    Case("qwen3_moe", "bfloat16", 32, 128, Goal(1.8, 3.7), None, BF16_SHARE),
    Case("deepseek_v3", "float32", 32, 128, Goal(4.0, 6.0)),
    Case("deepseek_v3", "float32", 8, 512, Goal(5.0, 8.0)),
    Case("mixtral", "float32", 1, 128),
    Case("mixtral", "float32", 32, 128),
)
PEERS = {"llama.cpp": Goal(1.77, 2.12), "vLLM CPU, eager": Goal(1.52, 1.90)}
"""Decode of qwen3_moe in fp32 at batch 32 as ratios to transformers, measured by others on one machine with one thread (tok/s: llama.cpp 466,
vLLM CPU 0.32.0 502, transformers 264 in the middle of 245 to 283). Goals: 1.0 and 1.2 times llama.cpp, 0.8 and 1.0 times vLLM."""
MEMORY_MUST_MIB, MEMORY_HOPED_MIB = 500, 350
"""Beside 1.15 times the weights and the KV pool, at most."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=sorted(SHAPES))
    parser.add_argument("--side", choices=("ours", "transformers"), help="for the child processes")
    parser.add_argument("--case", type=int)
    arguments = parser.parse_args()
    if arguments.side:
        print(json.dumps(run_side(arguments.side, arguments.folder, CASES[arguments.case])))
        return 0
    with tempfile.TemporaryDirectory(prefix="crossdock-bench-") as temporary:
        holds = compare(arguments.folder or Path(temporary), arguments.rounds, arguments.only)
    return 0 if holds else 1


def compare(folder: Path, rounds: int, only: str | None) -> bool:
    """Prints a case at a time: tokens a second of both sides, their ratios, and whether the goals hold. True when all do."""
    holds = True
    for number, case in enumerate(CASES):
        if only not in (None, case.family):
            continue
        build(folder, case.family)
        found: dict[str, list[dict[str, float]]] = {"transformers": [], "ours": []}
        for _ in range(rounds):
            for side, results in found.items():
                results.append(child(side, folder, number))
        theirs, ours = (
            {key: statistics.median(one[key] for one in results) for key in results[0]} for results in found.values()
        )
        holds &= show(case, theirs, ours)
    return holds


def show(case: Case, theirs: dict[str, float], ours: dict[str, float]) -> bool:
    """The lines of a case; True when its goals hold."""
    decode, prefill = theirs["step_s"] / ours["step_s"], theirs["prefill_s"] / ours["prefill_s"]
    share = prefill_flops(case) / ours["prefill_s"] / ours["matmul_flops"]
    tokens = case.batch * case.prompt
    results = [(case.decode, decode), (case.prefill, prefill), (case.share, share)]
    notes = [f" ({goal.verdict(value)})" if goal else "" for goal, value in results]
    print(
        f"{case.family:12} {case.dtype:9} batch {case.batch:3} prompt {case.prompt:4}: "
        f"decode {case.batch / ours['step_s']:7.1f} / {case.batch / theirs['step_s']:6.1f} tok/s = {decode:.2f}x{notes[0]}, "
        f"prefill {tokens / ours['prefill_s']:7.1f} / {tokens / theirs['prefill_s']:7.1f} tok/s = {prefill:.2f}x{notes[1]}, "
        f"{share:.2f} of the matmul rate{notes[2]}",
        flush=True,
    )
    if case == CASES[2]:
        for name, goal in PEERS.items():
            print(f"  against {name}: {decode:.2f}x transformers ({goal.verdict(decode)})")
            results.append((goal, decode))
    spare = ours["peak_mib"] - 1.15 * ours["weights_mib"] - ours["kv_mib"]
    fits = spare <= MEMORY_MUST_MIB / TOLERATED
    print(
        f"  memory: {ours['peak_mib']:.0f} MiB (transformers {theirs['peak_mib']:.0f}), {ours['weights_mib']:.0f} of weights, "
        f"{ours['kv_mib']:.0f} of KV; {spare:.0f} beside 1.15 times the weights and KV (goal {MEMORY_MUST_MIB}: "
        f"{'holds' if fits else 'MISSED'}, hoped {MEMORY_HOPED_MIB}: {'holds' if spare <= MEMORY_HOPED_MIB else 'no'})",
        flush=True,
    )
    return fits and all(goal is None or goal.holds(value) for goal, value in results)


def prefill_flops(case: Case) -> float:
    """Of all rows of the prompts in the matrices of the layers, the causal half of attention, and one row a prompt in the head."""
    fields = {**FRAME, **SHAPES[case.family]}
    hidden, heads = fields["hidden_size"], fields["num_attention_heads"]
    expert = 3 * hidden * fields.get("moe_intermediate_size", fields["intermediate_size"])
    routed = fields["num_experts_per_tok"] * expert
    dense_layers = 0
    if case.family == "deepseek_v3":
        nope, rope, value = fields["qk_nope_head_dim"], fields["qk_rope_head_dim"], fields["v_head_dim"]
        query, latent = fields["q_lora_rank"], fields["kv_lora_rank"]
        attention = hidden * (query + latent + rope) + query * heads * (nope + rope)
        attention += latent * heads * (nope + value) + heads * value * hidden
        head_dims, routed, dense_layers = nope + rope + value, routed + expert, 1
    else:
        dim = fields["head_dim"]
        attention, head_dims = 2 * hidden * dim * (heads + fields["num_key_value_heads"]), 2 * dim
    layers = fields["num_hidden_layers"]
    row = layers * (attention + heads * head_dims * case.prompt / 2) + (layers - dense_layers) * routed
    row += dense_layers * 3 * hidden * fields["intermediate_size"]
    return float(2 * case.batch * (case.prompt * row + hidden * VOCAB))


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
    """Seconds of CPU of the whole prefill and of one decode step, the matmul rate, and memory."""
    import torch

    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(case.batch * 7919 + case.prompt)
    ids = torch.randint(1, VOCAB, (case.batch, case.prompt), generator=generator)
    run, sizes = (ours if side == "ours" else theirs)(folder / case.family, case, ids)
    run(2)
    prefills = [prefill_s(run, 1)[0] for _ in range(2)]
    last_prefill, (first, *_, last) = prefill_s(run, NEW_TOKENS)
    peak = peak_mib()
    return {
        "prefill_s": statistics.median([*prefills, last_prefill]),
        "step_s": (last - first) / (NEW_TOKENS - 1),
        "peak_mib": peak,
        "matmul_flops": matmul_flops(case.dtype),
        **sizes,
    }


def prefill_s(run: Callable[[int], list[float]], new_tokens: int) -> tuple[float, list[float]]:
    """Seconds until the first tokens, and the clock after each."""
    start = time.process_time()
    clocks = run(new_tokens)
    return clocks[0] - start, clocks


def peak_mib() -> float:
    """Largest resident size of this process. ``getrusage`` would count the parent that it was started from."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:")) / 1024


def matmul_flops(dtype: str) -> float:
    """Of torch's product of two 1024 x 1024 matrices, the best of a few."""
    import torch

    side = torch.ones(1024, 1024, dtype=getattr(torch, dtype))
    times: list[float] = []
    for _ in range(5):
        start = time.process_time()
        torch.mm(side, side)
        times.append(time.process_time() - start)
    return 2 * 1024**3 / min(times)


def theirs(folder: Path, case: Case, ids: Any) -> Side:
    import torch
    from transformers import AutoModelForCausalLM, StoppingCriteriaList

    dtype = getattr(torch, case.dtype)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa").eval()

    def run(new_tokens: int) -> list[float]:
        clocks: list[float] = []

        def after_token(tokens: Any, scores: Any) -> Any:
            """Asked by ``generate`` whether rows are at their end: none is."""
            clocks.append(time.process_time())
            return torch.zeros(tokens.shape[0], dtype=torch.bool)

        settings = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens, "do_sample": False, "pad_token_id": 0}
        with torch.inference_mode():
            mask = torch.ones_like(ids)
            model.generate(ids, attention_mask=mask, stopping_criteria=StoppingCriteriaList([after_token]), **settings)
        return clocks

    return run, {}


def ours(folder: Path, case: Case, ids: Any) -> Side:
    from crossdock.comm import local_comms
    from crossdock.groups import rank_place, resolve_sizes
    from crossdock.host_memory import bound_kernel_caches, keep_freed_memory
    from crossdock.testing.model_driver import ModelDriver
    from crossdock.testing.model_parts import DriverChoice

    keep_freed_memory()
    bound_kernel_caches()
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

    def run(new_tokens: int) -> list[float]:
        clocks: list[float] = []
        first = next(runs) * case.batch
        work = {first + i: prompt for i, prompt in enumerate(prompts)}
        for _ in range(new_tokens):
            logits = driver.step([work], last_only=True)
            work = {sequence: [int(row.argmax())] for sequence, row in logits.items()}
            clocks.append(time.process_time())
        return clocks

    weights = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    if case.dtype == "bfloat16":
        weights //= 2
    pools = sum(pool.nbytes for caches in driver.caches for pool in caches)
    return run, {"weights_mib": weights / 2**20, "kv_mib": pools / 2**20}


if __name__ == "__main__":
    sys.exit(main())
