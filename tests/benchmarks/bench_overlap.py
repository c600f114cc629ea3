"""Two micro-batches against one over a slow link: every row takes a given time, in which a rank may compute.

The ranks share this machine's cores, so both strategies run in turn in the same processes and the ratio counts, not the times.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

import attrs
import torch
from crossdock.groups import resolve_sizes
from crossdock.observe.span_shares import SpanShares, span_shares
from crossdock.observe.timeline import HostClock, PassMarks
from crossdock.testing.model_driver import ModelDriver, Work
from crossdock.testing.model_parts import DriverChoice
from crossdock.testing.random_checkpoint import write_random_checkpoint
from crossdock.testing.tiny_models import FAMILY_FIELDS, FRAME
from crossdock.testing.world import RankContext, RankPool
from crossdock.types.parallel import ParallelSizes

FIELDS = {"num_hidden_layers": 4, "hidden_size": 512, "head_dim": 64, "moe_intermediate_size": 256, "num_experts": 16}
ROUNDS = 7
LENGTHS = (64, 64, 64, 64)
ROW_US = 30.0
"""A row's time between ranks; with it communication and computation of a layer are about equal on a Zen 4 core."""


@attrs.frozen(kw_only=True)
class Measured:
    """One strategy on one rank."""

    step_s: tuple[float, ...]
    cpu_s: float
    """Processor time of a step."""
    shares: SpanShares


def measure(
    context: RankContext, choices: tuple[DriverChoice, ...], sizes: ParallelSizes, work: list[Work]
) -> list[Measured]:
    """Prefill steps under each choice, in turn."""
    torch.set_num_threads(1)
    drivers = [ModelDriver(each, sizes, context.place(sizes), context.comms_of(sizes)) for each in choices]
    times: list[list[float]] = [[] for _ in drivers]
    cpu_times: list[list[float]] = [[] for _ in drivers]
    shares: list[SpanShares] = []
    for turn in range(ROUNDS + 1):
        fresh = [{100 * turn + number: ids for number, ids in rows.items()} for rows in work]
        for driver, seconds, used in zip(drivers, times, cpu_times, strict=True):
            driver.marks = PassMarks(turn, HostClock())
            begun_s, begun_cpu_s = time.perf_counter(), time.process_time()
            driver.step(fresh)
            if turn:
                seconds.append(time.perf_counter() - begun_s)
                used.append(time.process_time() - begun_cpu_s)
            if turn == ROUNDS:
                shares.append(span_shares(driver.marks.spans()))
    return [
        Measured(step_s=tuple(seconds), cpu_s=statistics.median(used), shares=each)
        for seconds, used, each in zip(times, cpu_times, shares, strict=True)
    ]


def main() -> None:
    """Prints the ratio with its spread, and what the spans say."""
    config = {"model_type": "qwen3_moe", "dtype": "float32", **FRAME, **FAMILY_FIELDS["qwen3_moe"], **FIELDS}
    sizes = resolve_sizes(ranks=2, attn_dp_size=2)
    work: list[Work] = [
        {number: [(7 * place + number) % 96 for place in range(rows)] for number, rows in enumerate(LENGTHS)}
        for _ in range(2)
    ]
    with tempfile.TemporaryDirectory() as folder, RankPool(2) as pool:
        write_random_checkpoint(Path(folder), config)
        plain = DriverChoice(
            folder=folder,
            dispatcher="alltoallv",
            link_row_us=ROW_US,
            num_pages=1 + (ROUNDS + 1) * sum(LENGTHS) // 4,
            poison_new_pages=False,
        )
        overlapped = attrs.evolve(plain, strategy="two_batch", always_overlaps=True)
        (sequential, two_batch), _ = pool.run(measure, (plain, overlapped), sizes, work, timeout_s=300)
    print(f"2 ranks on this machine, {sum(LENGTHS)} prompt tokens a rank, {FIELDS}")
    print(f"a row takes {ROW_US:g} us each way, {FIELDS['num_hidden_layers']} layers")
    for name, found in (("sequential", sequential), ("two_batch", two_batch)):
        print(
            f"{name:>10}: median {1e3 * statistics.median(found.step_s):7.1f} ms, {1e3 * found.cpu_s:.1f} ms of them computing, exposed "
            f"{found.shares.exposed_us / 1e3:6.1f} ms  overlap ratio {found.shares.overlap_ratio:.2f}  bubble {found.shares.bubble:.2f}"
        )
        print(
            "            "
            + ", ".join(f"{name} {us / 1e3:.1f}" for name, us in sorted(found.shares.category_us.items()))
        )
    ratios = sorted(a / b for a, b in zip(sequential.step_s, two_batch.step_s, strict=True))
    print(f"sequential / two_batch: {statistics.median(ratios):.2f} (from {ratios[0]:.2f} to {ratios[-1]:.2f})")


if __name__ == "__main__":
    main()
