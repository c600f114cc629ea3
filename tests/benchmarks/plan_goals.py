"""The goals of placement and balancing, one line each with what came and whether it holds.

    python tests/benchmarks/bench_plan.py --traces FOLDER

FOLDER holds the traces dsv3_prefill, semireal_dsv3_decode_drift, semireal_dsv3_prefill_drift, gptoss20b_topics, calib_32x8_mixtral and
stress_*, as ``.npz`` files with ``load`` [steps, layers, experts]. Milliseconds are CPU time of one thread: the least and the median of many.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import attrs
import numpy as np
import torch
from bench_pickers import cases as picker_cases
from bench_pickers import evenness, excess, lp_picks, median_ms, random_picks
from crossdock.placement import balancedness, make_eplb_algo, placement_change, plan
from crossdock.types.placement import ExpertLoad, Placement, Topology
from crossdock_eplb_algos._shared.arrays import Floats
from crossdock_eplb_algos._shared.copy_table import copy_table, loads_without_choice
from crossdock_eplb_algos._shared.kernels.water_fill import WaterFill, batched_fill, shares_of_table
from crossdock_eplb_algos._shared.layer_copies import layer_copies

EXPERTS, SLOTS = 256, 288
NODES = {16: 2, 32: 4, 72: 9, 96: 12, 144: 18}
VLLM = {16: (0.9971, 0.9932), 32: (0.9933, 0.9870), 72: (0.9766, 0.9515), 96: (0.9645, 0.8341), 144: (0.8556, 0.5802)}
"""Balancedness of vLLM's default policy on dsv3_prefill: mean, worst layer."""


@attrs.frozen
class Line:
    """One goal."""

    goal: str
    found: str
    holds: bool


def topology(gpus: int, slots: int = SLOTS, groups: int = 1) -> Topology:
    return Topology(num_gpus=gpus, num_nodes=NODES.get(gpus, 1), num_physical_experts=slots, num_groups=groups)


@attrs.frozen
class Traces:
    """Loads by name."""

    folder: Path

    def load(self, name: str) -> Floats:
        return np.asarray(np.load(self.folder / f"{name}.npz")["load"], dtype=np.float64)

    def planned(self, name: str) -> Floats:
        """All steps but the last, which would have no next one; that is how the references were judged."""
        return self.load(name)[:-1]


def timed_plans(load: Floats, where: Topology, repeat: int, **options: object) -> tuple[list[Placement], list[float]]:
    """A plan for each step, and milliseconds of all calls."""
    algo = make_eplb_algo("crossdock", options)
    made, taken = [], []
    for step in load:
        given = ExpertLoad(counts=step)
        for _ in range(repeat):
            begin = time.thread_time()
            placement = algo.plan(given, where, None)
            taken.append(1e3 * (time.thread_time() - begin))
        made.append(placement)
    return made, taken


def reached(placements: list[Placement], load: Floats, where: Topology) -> tuple[float, float]:
    """Mean and worst balancedness of plans on their own steps."""
    found = np.stack([balancedness(one, step, where) for one, step in zip(placements, load, strict=True)])
    return float(found.mean()), float(found.min())


def speed(traces: Traces) -> Iterator[Line]:
    load = traces.planned("dsv3_prefill")
    for gpus, (mean, worst) in VLLM.items():
        made, taken = timed_plans(load, topology(gpus), 30, effort="fast")
        now = reached(made, load, topology(gpus))
        median = statistics.median(taken)
        yield Line(
            f"1 EP{gpus}: fast <= 5 ms, now >= vLLM {mean} ({worst})",
            f"{min(taken):.2f} / {median:.2f} ms, {now[0]:.4f} ({now[1]:.4f})",
            median <= 5 and round(now[0], 4) >= mean and round(now[1], 4) >= worst,
        )


BALANCE = (
    ("dsv3_prefill", 16, SLOTS, "default", 0.999, 0.0, 20),
    ("dsv3_prefill", 32, SLOTS, "default", 0.999, 0.0, 20),
    ("dsv3_prefill", 72, SLOTS, "default", 0.996, 0.0, 20),
    ("dsv3_prefill", 96, SLOTS, "default", 0.985, 0.0, 20),
    ("dsv3_prefill", 144, SLOTS, "default", 0.862, 0.0, 20),
    ("dsv3_prefill", 72, SLOTS, "high", 0.998, 0.0, 300),
    ("dsv3_prefill", 96, SLOTS, "high", 0.989, 0.0, 300),
    ("stress_hot50", 32, SLOTS, "default", 0.999, 0.0, 20),
    ("stress_zipf1.5", 32, SLOTS, "default", 0.989, 0.945, 20),
    ("gptoss20b_topics", 16, 48, "default", 0.985, 0.0, 20),
    ("calib_32x8_mixtral", 8, 16, "default", 0.945, 0.0, 20),
)
"""Trace, GPUs, slots, effort, least mean, least worst layer, milliseconds."""


def balance(traces: Traces) -> Iterator[Line]:
    for name, gpus, slots, effort, mean, worst, limit_ms in BALANCE:
        load = traces.planned(name)
        where = attrs.evolve(topology(gpus, slots), num_nodes=1)
        made, taken = timed_plans(load, where, 3, effort=effort)
        now, median = reached(made, load, where), statistics.median(taken)
        yield Line(
            f"2 {name} EP{gpus} {effort}: now >= {mean}{f' ({worst})' if worst else ''} in {limit_ms} ms",
            f"{now[0]:.4f} ({now[1]:.4f}), {min(taken):.1f} / {median:.1f} ms",
            now[0] >= mean and now[1] >= worst and median <= limit_ms,
        )


def hierarchy(traces: Traces) -> Iterator[Line]:
    load, where = traces.planned("dsv3_prefill"), topology(32, groups=8)
    for algo, options in (("hierarchical", {"escape": 0.1}), ("crossdock", {"outside": 0.1})):
        made = [plan(algo, step, where, **options) for step in load]
        now = reached(made, load, where)[0]
        away = max(float(outside(one, step, where).max()) for one, step in zip(made, load, strict=True))
        yield Line(
            f"3 {algo} {options}: now >= .97, <= 10 % of a layer's slots away from home",
            f"{now:.4f}, {away:.1%}",
            now >= 0.97 and away <= 0.1,
        )


def outside(placement: Placement, load: Floats, where: Topology) -> Floats:
    """[L] part of the slots that are not on the node where most slots of their expert's group are."""
    num_layers, num_slots = placement.physical_to_logical.shape
    group = placement.physical_to_logical // (load.shape[1] // where.num_groups)
    node = np.arange(num_slots) // (num_slots // where.num_nodes)
    held = np.zeros((num_layers, where.num_groups, where.num_nodes))
    for layer in range(num_layers):
        np.add.at(held[layer], (group[layer], node), 1)
    return 1 - held.max(axis=2).sum(axis=1) / num_slots


def churn(traces: Traces) -> Iterator[Line]:
    steps = traces.load("semireal_dsv3_decode_drift")
    load = steps[: len(steps) // 4 * 4].reshape(-1, 4, *steps.shape[1:]).sum(axis=1)
    for gpus, moves, least in ((32, 0.10, 0.98), (72, 0.25, 0.978)):
        where = topology(gpus)
        current = plan("crossdock", load[0], where)
        rows = []
        for step in range(1, len(load) - 1):
            fresh, placement = plan("global", load[step], where), plan("crossdock", load[step], where, current)
            rows.append(
                (
                    placement_change(current, placement, where).moved.mean() / SLOTS,
                    balancedness(placement, load[step], where).mean(),
                    balancedness(placement, load[step + 1], where).mean(),
                    balancedness(fresh, load[step + 1], where).mean(),
                )
            )
            current = placement
        moved, now, after, fresh_after = np.mean(rows, axis=0)
        yield Line(
            f"4 EP{gpus}: <= {moves:.0%} moved, now >= {least}, next within .003 of vLLM's full replan",
            f"{moved:.1%}, {now:.4f}, {after:.4f} against {fresh_after:.4f}",
            bool(moved <= moves and now >= least and after >= fresh_after - 0.003),
        )
    limited = plan("crossdock", load[1], topology(32), plan("crossdock", load[0], topology(32)), max_moves=8)
    most = int(placement_change(plan("crossdock", load[0], topology(32)), limited, topology(32)).moved.max())
    yield Line("4 max_moves = 8 is kept", f"{most} at most", most <= 8)


def dispatch(traces: Traces) -> Iterator[Line]:
    where = topology(32)
    options = argparse.Namespace(trace=str(traces.folder / "dsv3_prefill.npz"), tokens=64)
    cases = picker_cases(options, attrs.evolve(where, num_nodes=1))
    tokens = torch.stack([case.counts().sum(0) for case in cases])
    fill, native = batched_fill([case.copies for case in cases]), WaterFill(cases[0].copies)
    all_ms = median_ms(lambda: fill.solve(tokens), 9)
    layer_us = 1e3 * median_ms(lambda: native.solve(tokens[0]), 50)
    above = max(excess(case, where) for case in cases[:15])
    even, drawn = (evenness(cases[:15], where, pick) for pick in (lp_picks, random_picks))
    yield Line("5 split within .1 % of the optimum", f"{above:.4%}", above <= 1e-3)
    yield Line(f"5 a layer, {native.form}: <= 50 us", f"{layer_us:.1f} us", layer_us <= 50)
    yield Line("5 58 layers in torch: <= 15 ms", f"{all_ms:.1f} ms", all_ms <= 15)
    yield Line("5 EP32 decode: max / mean <= 1.13", f"{even:.3f} (random {drawn:.3f})", even <= 1.13)


def split_balance(placement: Placement, load: Floats, where: Topology) -> float:
    """Mean over layers of balancedness when a picker splits the whole window."""
    found = []
    for layer, step in enumerate(load):
        table, tokens = copy_table(placement.logical_to_physical[layer], where), torch.from_numpy(step)
        copies = layer_copies(table)
        shares = shares_of_table(copies, WaterFill(copies).solve(tokens), table)
        loads = loads_without_choice(table, tokens) + shares.sum(0)
        found.append(float(loads.mean() / loads.max()))
    return float(np.mean(found))


def following(traces: Traces) -> Iterator[Line]:
    where = topology(32)
    for name in ("semireal_dsv3_decode_drift", "semireal_dsv3_prefill_drift"):
        load = traces.load(name)
        for split in ("even", "batch"):
            steps = range(0, len(load) - 1, 2)
            found = np.mean(
                [split_balance(plan("crossdock", load[s], where, split=split), load[s + 1], where) for s in steps]
            )
            yield Line(f"6 {name}, split = {split}: next with the split >= .93", f"{found:.4f}", bool(found >= 0.93))
    load, where = traces.load("gptoss20b_topics"), topology(8, 40)
    next_of = {}
    for forecast in ("last", "ewma", "margin", "auto"):
        next_of[forecast] = np.mean(
            [
                balancedness(plan("crossdock", load[: s + 1], where, forecast=forecast), load[s + 1], where).mean()
                for s in range(2, len(load) - 1)
            ]
        )
    best = max(next_of, key=lambda name: float(next_of[name]))
    gain = next_of[best] - next_of["last"]
    yield Line(
        "6 gptoss20b_topics EP8: a forecaster gains >= .01 over last",
        ", ".join(f"{name} {value:.4f}" for name, value in next_of.items()),
        bool(gain >= 0.01),
    )


def never(traces: Traces) -> Iterator[Line]:
    twins, worse = 0, 0
    for name in ("dsv3_prefill", "stress_hot50", "stress_zipf1.5", "stress_all_zero_layer"):
        load = traces.load(name)
        for gpus in NODES:
            where, current = topology(gpus), None
            for step in load[:3]:
                placement = plan("crossdock", step, where, current)
                by_gpu = np.sort(placement.physical_to_logical.reshape(len(step), gpus, -1), axis=2)
                twins += int((by_gpu[..., 1:] == by_gpu[..., :-1]).sum())
                if current is not None:
                    old, new = (balancedness(one, step, where) for one in (current, placement))
                    worse += int((new < old - 1e-9).sum())
                current = placement
    yield Line("7 two copies on one GPU", str(twins), twins == 0)
    yield Line("7 layers that a plan made worse", str(worse), worse == 0)
    load, where = traces.load("dsv3_prefill")[0], topology(32)
    first = plan("crossdock", load, where).physical_to_logical
    torch.set_num_threads(1 + torch.get_num_threads())
    same = bool((plan("crossdock", load, where).physical_to_logical == first).all())
    yield Line("7 the plan depends on threads", "no" if same else "yes", same)


GOALS: dict[int, Callable[[Traces], Iterator[Line]]] = {
    1: speed,
    2: balance,
    3: hierarchy,
    4: churn,
    5: dispatch,
    6: following,
    7: never,
}


def print_goals(folder: Path, only: Sequence[int] = tuple(GOALS)) -> None:
    """All goals, or those with some numbers."""
    torch.set_num_threads(1)
    lines = []
    for number in only:
        for line in GOALS[number](Traces(folder)):
            lines.append(line)
            print(f"{'holds ' if line.holds else 'MISSES'}  {line.goal:<88} {line.found}", flush=True)
    print(f"{sum(line.holds for line in lines)} of {len(lines)} hold")
