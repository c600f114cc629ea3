"""Two micro-batches against one over a slow link: every row takes a given time, in which a rank may compute.

The link is slower than this machine computes: transfers of a step take ``LINK_TIMES`` its processor time, more than on an idle machine is
needed to hide all computing, because a busy one computes slower. The ranks share the machine's cores; both strategies run in turn in the same processes, and the ratio counts.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

import attrs
import torch
from crossdock.engine_seams import AgreedStep
from crossdock.groups import resolve_sizes
from crossdock.observe.span_shares import SpanShares, span_shares
from crossdock.observe.timeline import SAMPLE_EVERY, HostClock, PassMarks, Timeline
from crossdock.overlap_decision import OverlapRules, decide_overlap
from crossdock.overlap_gate import OverlapGate
from crossdock.testing.model_driver import ModelDriver, Work
from crossdock.testing.model_parts import DriverChoice
from crossdock.testing.random_checkpoint import write_random_checkpoint
from crossdock.testing.tiny_models import FAMILY_FIELDS, FRAME
from crossdock.testing.world import RankContext, RankPool
from crossdock.types.parallel import ParallelSizes
from crossdock.types.step import DispatchMode, ForwardMode, PaddingMode, StepPlan, StepRecord
from crossdock.types.strategy import OverlapLimits

FIELDS = {"num_hidden_layers": 2, "hidden_size": 512, "head_dim": 64, "moe_intermediate_size": 256, "num_experts": 16}
ROUNDS = 12
LENGTHS = (256, 256, 256, 256)
LINK_TIMES = 1.5
GATED_STEPS = 32
TRANSFERS = 2 * FIELDS["num_hidden_layers"]
"""Of a step, each of which every row takes part in."""


@attrs.frozen(kw_only=True)
class Measured:
    """One strategy on one rank."""

    step_s: tuple[float, ...]
    cpu_s: float
    """Processor time of a step."""
    shares: SpanShares


def computing_us(context: RankContext, choice: DriverChoice, sizes: ParallelSizes, work: list[Work]) -> float:
    """Processor time of a step over a link that holds nothing up."""
    torch.set_num_threads(1)
    driver = ModelDriver(choice, sizes, context.place(sizes), context.comms_of(sizes))
    times: list[float] = []
    for turn in range(ROUNDS):
        begun_s = time.process_time()
        driver.step([{100 * turn + number: ids for number, ids in rows.items()} for rows in work])
        times.append(time.process_time() - begun_s)
    return 1e6 * statistics.median(times)


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


@attrs.frozen(kw_only=True)
class Gated:
    """Steps under the gate, and in turn with them sequential ones, on one rank."""

    reasons: tuple[str, ...]
    gated_s: tuple[float, ...]
    sequential_s: tuple[float, ...]


def measure_gated(
    context: RankContext, choices: tuple[DriverChoice, ...], sizes: ParallelSizes, work: list[Work]
) -> Gated:
    """Prefill steps as the gate decides from the records of both ranks."""
    torch.set_num_threads(1)
    comms = context.comms_of(sizes)
    sequential, two_batch = (ModelDriver(each, sizes, context.place(sizes), comms) for each in choices)
    timeline = Timeline(rank=context.rank)
    gate = OverlapGate(limits=OverlapLimits(), timeline=timeline, gauges={})
    reasons: list[str] = []
    gated_s: list[float] = []
    sequential_s: list[float] = []
    lengths, rows = [len(ids) for ids in work[0].values()], sum(LENGTHS)
    for step in range(1, GATED_STEPS + 1):
        fresh = [{1000 * step + number: ids for number, ids in each.items()} for each in work]
        own = gate.vote(StepRecord(num_tokens=rows, local_forward_mode=int(ForwardMode.PREFILL)), lengths)
        answers = comms.host.world.all_gather(torch.tensor([[own.overlap_gain_us, own.overlap_trial]]))
        records = tuple(attrs.evolve(own, overlap_gain_us=gain, overlap_trial=way) for gain, way in answers.tolist())
        overlaps, reason = decide_overlap(records, DispatchMode.NORMAL, OverlapRules())
        driver = two_batch if overlaps else sequential
        driver.marks = timeline.begin_pass(SAMPLE_EVERY * step + 1)
        begun_s = time.perf_counter()
        driver.step(fresh)
        gated_s.append(time.perf_counter() - begun_s)
        timeline.pass_launched()
        timeline.end_pass()
        plan = StepPlan(
            step=SAMPLE_EVERY * step + 1,
            eplb_pass=step,
            live_tokens=(rows, rows),
            padded_tokens=(rows, rows),
            padding_mode=PaddingMode.SUM_LEN,
            forward_mode=ForwardMode.PREFILL,
            dispatch_mode=DispatchMode.NORMAL,
            overlap=overlaps,
            overlap_reason=reason,
        )
        gate.after_step(AgreedStep(plan=plan, records=records))
        reasons.append(reason or "on")
        sequential.marks = None
        begun_s = time.perf_counter()
        sequential.step([{1000 * step + 500 + number: ids for number, ids in each.items()} for each in work])
        sequential_s.append(time.perf_counter() - begun_s)
    return Gated(reasons=tuple(reasons), gated_s=tuple(gated_s), sequential_s=tuple(sequential_s))


def print_gated(name: str, found: Gated) -> None:
    """Reasons in order, and what the steps after the verdict take beside sequential ones."""
    decided = [at for at, reason in enumerate(found.reasons) if reason != "probe"]
    ratios = sorted(found.sequential_s[at] / found.gated_s[at] for at in decided[-GATED_STEPS // 2 :])
    print(
        f"gate, {name}: {', '.join(found.reasons)}\n"
        f"            sequential / gated in turn after that: {statistics.median(ratios):.3f} (from {ratios[0]:.2f} to {ratios[-1]:.2f})"
    )


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
            # Every row to every rank: no exchange of counts in which ranks wait for one another in a begin.
            dispatcher_options={"one_round_bytes": 1 << 24},
            num_pages=1 + (ROUNDS + 1) * sum(LENGTHS) // 4,
            max_rows=sum(LENGTHS),
            poison_new_pages=False,
        )
        alone_us = max(pool.run(computing_us, plain, sizes, work, timeout_s=300))
        row_us = LINK_TIMES * alone_us / TRANSFERS / sum(LENGTHS)
        plain = attrs.evolve(plain, link_row_us=row_us)
        overlapped = attrs.evolve(plain, strategy="two_batch", always_overlaps=True)
        (sequential, two_batch), _ = pool.run(measure, (plain, overlapped), sizes, work, timeout_s=300)
        pages = 1 + 2 * (GATED_STEPS + 1) * sum(LENGTHS) // 4
        gated = {
            name: pool.run(
                measure_gated,
                tuple(attrs.evolve(one, link_row_us=us, num_pages=pages) for one in (plain, overlapped)),
                sizes,
                work,
                timeout_s=300,
            )[0]
            for name, us in (("over that link", row_us), ("over a link that holds nothing up", 0.0))
        }
    print(f"2 ranks on this machine, {sum(LENGTHS)} prompt tokens a rank, {FIELDS}")
    print(f"computing alone {alone_us / 1e3:.1f} ms; a row takes {row_us:.1f} us each way")
    for name, found in (("sequential", sequential), ("two_batch", two_batch)):
        print(
            f"{name:>10}: median {1e3 * statistics.median(found.step_s):7.1f} ms, {1e3 * found.cpu_s:.1f} ms of them computing, exposed "
            f"{found.shares.exposed_us / 1e3:6.1f} ms  overlap ratio {found.shares.overlap_ratio:.2f}  bubble {found.shares.bubble:.2f}"
        )
        print(
            "            "
            + ", ".join(f"{name} {us / 1e3:.1f}" for name, us in sorted(found.shares.category_us.items()))
        )
    calm = [statistics.median(sorted(found.step_s)[: ROUNDS // 3]) for found in (sequential, two_batch)]
    print(f"sequential / two_batch, fastest third of the steps of each: {calm[0] / calm[1]:.2f}")
    ratios = sorted(a / b for a, b in zip(sequential.step_s, two_batch.step_s, strict=True))
    print(f"step by step: {statistics.median(ratios):.2f} (from {ratios[0]:.2f} to {ratios[-1]:.2f})")
    for name, each in gated.items():
        print_gated(name, each)


if __name__ == "__main__":
    main()
