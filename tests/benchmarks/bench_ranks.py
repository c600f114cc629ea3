"""Decode and prefill of a model split over CPU ranks against one rank: CPU clock of every rank, one thread each.

Run: ``python tests/benchmarks/bench_ranks.py [FOLDER] [--family qwen3_moe] [--ranks 2]``. FOLDER keeps the checkpoint for the next run. A
machine gives ranks that share its cores no more compute than one process has, so what is told is what splitting costs: tokens for each
second of CPU of all ranks together, as a share of those of one rank. Logits of the split runs are compared with those of one rank.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import attrs
import torch
from crossdock.groups import resolve_sizes
from crossdock.host_memory import bound_kernel_caches, keep_freed_memory
from crossdock.testing.model_driver import ModelDriver
from crossdock.testing.model_parts import DriverChoice
from crossdock.testing.world import RankContext, RankPool

BATCH, PROMPT, STEPS, PAGE_TOKENS, VOCAB = 32, 128, 16, 16, 8192
TOLERANCE = 1e-5
"""Of logits, relative to the largest one, in fp32."""


@attrs.frozen
class Layout:
    name: str
    dispatcher: str
    attn_dp: int
    attn_tp: int

    @property
    def ranks(self) -> int:
        return self.attn_dp * self.attn_tp


ONE = Layout("one rank", "allgatherv", 1, 1)


def layouts(ranks: int) -> tuple[Layout, ...]:
    return (
        Layout(f"attention DP {ranks}, EP {ranks}, alltoallv", "alltoallv", ranks, 1),
        Layout(f"attention DP {ranks}, EP {ranks}, allgatherv", "allgatherv", ranks, 1),
        Layout(f"attention TP {ranks}, EP {ranks}, allgatherv", "allgatherv", 1, ranks),
    )


@attrs.frozen
class Found:
    """What one rank measured."""

    prefill_s: float
    step_s: float
    logits: dict[int, torch.Tensor]
    """Of the last token of this rank's prompts."""


Measured = tuple[float, float, dict[int, torch.Tensor]]
"""Plain values: ranks load this file under another name, so its classes do not travel."""


def measure(context: RankContext, folder: str, dispatcher: str, attn_dp: int, attn_tp: int) -> Measured:
    """Seconds of CPU of this rank for the prefill of all prompts and for one decode step, and logits of its prompts."""
    layout = Layout("", dispatcher, attn_dp, attn_tp)
    torch.set_num_threads(1)
    keep_freed_memory()
    bound_kernel_caches()
    sizes = resolve_sizes(
        ranks=layout.ranks, attn_dp_size=layout.attn_dp, attn_tp_size=layout.attn_tp, moe_ep_size=layout.ranks
    )
    pages = BATCH * (-(-(PROMPT + STEPS) // PAGE_TOKENS) + 1) + 1
    choice = DriverChoice(
        folder=folder,
        dispatcher=layout.dispatcher,
        page_tokens=PAGE_TOKENS,
        num_pages=pages,
        poison_new_pages=False,
        max_rows=BATCH * PROMPT,
    )
    driver = ModelDriver(choice, sizes, context.place(sizes), context.comms_of(sizes))
    prompts = torch.randint(1, VOCAB, (BATCH, PROMPT), generator=torch.Generator().manual_seed(0)).tolist()
    share = BATCH // layout.attn_dp
    work = [
        {number: prompts[number] for number in range(replica * share, (replica + 1) * share)}
        for replica in range(layout.attn_dp)
    ]
    start = time.process_time()
    logits = driver.step(work, last_only=True)
    prefilled = time.process_time()
    decode = [{number: [1 + number] for number in replica} for replica in work]
    driver.step(decode, last_only=True)
    begin = time.process_time()
    for _ in range(STEPS - 1):
        driver.step(decode, last_only=True)
    step_s = (time.process_time() - begin) / (STEPS - 1)
    return prefilled - start, step_s, logits


def run(pool: RankPool, folder: str, layout: Layout) -> list[Found]:
    results: list[Measured] = pool.run(
        measure, folder, layout.dispatcher, layout.attn_dp, layout.attn_tp, timeout_s=600.0
    )
    return [Found(*result) for result in results]


def show(layout: Layout, found: list[Found], one: Found) -> None:
    prefill_s, step_s = (sum(getattr(rank, name) for rank in found) for name in ("prefill_s", "step_s"))
    largest = max(float(row.abs().max()) for row in one.logits.values())
    error = max(float((row - one.logits[number]).abs().max()) for rank in found for number, row in rank.logits.items())
    assert error <= TOLERANCE * largest, f"{layout.name}: logits differ by {error / largest:.1e} of the largest"
    print(
        f"{layout.name:36} decode {BATCH / step_s:7.1f} tok/s = {one.step_s / step_s:.2f} of one rank, "
        f"prefill {BATCH * PROMPT / prefill_s:7.1f} tok/s = {one.prefill_s / prefill_s:.2f}; "
        f"slowest rank {max(rank.step_s for rank in found) * 1e3:.1f} ms a step; logits within {error / largest:.1e}",
        flush=True,
    )


def main() -> None:
    # Ranks import this file by its path and would not find its neighbour.
    from bench_model import build

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--family", default="qwen3_moe")
    parser.add_argument("--ranks", type=int, default=2)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="crossdock-bench-") as temporary:
        folder = str(build(arguments.folder or Path(temporary), arguments.family))
        with RankPool(1) as pool:
            (one,) = run(pool, folder, ONE)
        print(
            f"{arguments.family} fp32, batch {BATCH}, prompt {PROMPT}; tokens for a second of CPU of all ranks together"
        )
        show(ONE, [one], one)
        with RankPool(arguments.ranks) as pool:
            for layout in layouts(arguments.ranks):
                show(layout, run(pool, folder, layout), one)


if __name__ == "__main__":
    main()
