"""Replica pickers: solve time, distance from the optimum, and how even real batches become.

``python tests/benchmarks/bench_pickers.py [--trace FILE.npz] [--config SLOTS:GPUS]``. CPU-clock times of one thread. Without a trace, loads
are drawn: zipf 1, permuted per layer, that drift from one window to the next. Each rank's batch has a topic of its own (lognormal 0.5).
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable

import attrs
import numpy as np
import numpy.typing as npt
import torch
from crossdock.placement import plan
from crossdock.types.placement import ExpertLoad, Placement, Topology
from crossdock_eplb_algos._shared.copy_table import CopyTable, copy_table, loads_without_choice
from crossdock_eplb_algos._shared.kernels.copy_ends import own_ends, whole_ends
from crossdock_eplb_algos._shared.kernels.copy_picks import copy_picks, expert_counts
from crossdock_eplb_algos._shared.kernels.water_fill import WaterFill, batched_fill, shares_of_table
from crossdock_eplb_algos._shared.layer_copies import LayerCopies, layer_copies
from scipy.optimize import linprog

TOP_K = 8


@attrs.frozen(kw_only=True, eq=False)
class Case:
    """One layer with the batch of every rank."""

    table: CopyTable
    copies: LayerCopies
    replica_lists: list[list[int]]
    ids: list[torch.Tensor]
    """[tokens, K] of each rank."""

    def counts(self) -> torch.Tensor:
        return torch.stack([expert_counts(ids, len(self.replica_lists)) for ids in self.ids])


def windows(options: argparse.Namespace) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Loads [L, E] that the placement is made for, and that the batches come from."""
    if options.trace:
        load = np.load(options.trace)["load"].astype(np.float64)
        return load[0], load[1] if len(load) > 1 else load[0]
    rng = np.random.default_rng(0)
    before = np.stack([rng.permutation(1e4 / np.arange(1, 257)) for _ in range(58)])
    return before, before * rng.lognormal(0, 0.4, before.shape)


def cases(options: argparse.Namespace, topology: Topology) -> list[Case]:
    before, now = windows(options)
    placement: Placement = plan("crossdock", ExpertLoad(counts=before), topology)
    rng = np.random.default_rng(1)
    made: list[Case] = []
    for layer in range(placement.num_layers):
        lists = [[int(slot) for slot in row if slot >= 0] for row in placement.logical_to_physical[layer]]
        ids = []
        for _ in range(topology.num_gpus):
            topic = now[layer] * rng.lognormal(0, 0.5, now.shape[1]) + 1e-9
            draws = rng.gumbel(size=(options.tokens, now.shape[1])) + np.log(topic)
            ids.append(torch.from_numpy(np.argsort(-draws, axis=1)[:, :TOP_K].copy()))
        table = copy_table(placement.logical_to_physical[layer], topology)
        made.append(Case(table=table, copies=layer_copies(table), replica_lists=lists, ids=ids))
    return made


def lp_shares(case: Case, form: str = "auto") -> torch.Tensor:
    """[M, R] tokens of copies."""
    return shares_of_table(case.copies, WaterFill(case.copies, form=form).solve(case.counts().sum(0)), case.table)


def lp_picks(case: Case, topology: Topology) -> list[torch.Tensor]:
    counts = case.counts()
    ends = whole_ends(lp_shares(case), counts.sum(0), case.table)
    return [
        copy_picks(ids, counts[rank], own_ends(ends, counts, case.table, rank, topology.num_nodes), case.table)
        for rank, ids in enumerate(case.ids)
    ]


def random_picks(case: Case, topology: Topology) -> list[torch.Tensor]:
    rng = np.random.default_rng(2)
    return [
        torch.tensor([[rng.choice(case.replica_lists[expert]) for expert in row] for row in ids.tolist()])
        for ids in case.ids
    ]


def evenness(all_cases: list[Case], topology: Topology, pick: Callable[[Case, Topology], list[torch.Tensor]]) -> float:
    """Mean over layers of the largest over the mean load of a rank."""
    ratios = []
    for case in all_cases:
        slots = torch.cat([picks.flatten() for picks in pick(case, topology)])
        loads = torch.bincount(slots // topology.slots_per_gpu, minlength=topology.num_gpus)
        ratios.append(float(loads.max() / loads.double().mean()))
    return float(np.mean(ratios))


def excess(case: Case, topology: Topology) -> float:
    """How far the largest load is above the optimum of the linear program, as a part of it."""
    tokens = case.counts().sum(0)
    slots = [(expert, slot) for expert, row in enumerate(case.replica_lists) for slot in row]
    owners = np.zeros((len(tokens), len(slots) + 1))
    ranks = np.zeros((topology.num_gpus, len(slots) + 1))
    for place, (expert, slot) in enumerate(slots):
        owners[expert, place] = ranks[slot // topology.slots_per_gpu, place] = 1.0
    ranks[:, -1] = -1.0
    cost = np.zeros(len(slots) + 1)
    cost[-1] = 1.0
    best = linprog(cost, A_ub=ranks, b_ub=np.zeros(len(ranks)), A_eq=owners, b_eq=tokens.numpy(), method="highs")
    ours = (loads_without_choice(case.table, tokens) + lp_shares(case).sum(0)).max()
    return float(ours) / float(best.fun) - 1


def median_ms(call: Callable[[], object], times: int) -> float:
    call()
    taken = []
    for _ in range(times):
        begin = time.thread_time()
        call()
        taken.append(1e3 * (time.thread_time() - begin))
    return float(np.median(taken))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", default="")
    parser.add_argument("--config", default="288:32")
    parser.add_argument("--tokens", type=int, default=64, help="of each rank")
    parser.add_argument("--layers", type=int, default=10, help="layers compared with HiGHS and with random picks")
    options = parser.parse_args()
    torch.set_num_threads(1)
    slots, gpus = (int(part) for part in options.config.split(":"))
    topology = Topology(num_gpus=gpus, num_nodes=1, num_physical_experts=slots)
    all_cases = cases(options, topology)
    tokens = torch.stack([case.counts().sum(0) for case in all_cases])
    fill = batched_fill([case.copies for case in all_cases])
    solvers = {form: WaterFill(all_cases[0].copies, form=form) for form in ("native", "torch")}
    some = all_cases[: options.layers]
    report = {
        "config": options.config,
        "layers": len(all_cases),
        "all_layers_torch_ms": round(median_ms(lambda: fill.solve(tokens), 9), 2),
        "goal_all_layers_torch_ms": 15.0,
        "layer_native_us": round(1e3 * median_ms(lambda: solvers["native"].solve(tokens[0]), 50), 1),
        "layer_native_form": solvers["native"].form,
        "layer_torch_us": round(1e3 * median_ms(lambda: solvers["torch"].solve(tokens[0]), 20), 1),
        "above_optimum_percent_worst": round(100 * max(excess(case, topology) for case in some), 4),
        "max_over_mean_lp": round(evenness(some, topology, lp_picks), 4),
        "max_over_mean_random": round(evenness(some, topology, random_picks), 4),
    }
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
