"""The ``lp`` and ``locality`` pickers on one GPU: microseconds a layer in a CUDA graph, and how far from the optimum they are.

    python tests/benchmarks/gpu/pickers.py --out FILE.json
    python -m torch.distributed.run --nproc-per-node 2 tests/benchmarks/gpu/pickers.py --out FILE.json

Loads are drawn (zipf 1, permuted, drifting); the placement is planned for the load before. Most ranks are made up: their counts lie where
an all-gather would put them. With one process its time is not in the figures; with several these exchange their counts over NCCL in the
captured pick.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Callable
from typing import Any, cast

import attrs
import numpy as np
import torch
from crossdock.groups import rank_place, resolve_sizes
from crossdock.location import make_expert_location, overwrite_layer, placement_maps
from crossdock.placement import plan
from crossdock.types.comm import Comms, GroupComm
from crossdock.types.location import Picker, PickerSpec
from crossdock.types.placement import Placement, Topology
from crossdock_eplb_algos._shared.copy_table import copy_table, loads_without_choice
from crossdock_eplb_algos._shared.kernels.copy_picks import expert_counts
from crossdock_eplb_algos._shared.kernels.even_shares import even_shares_compiled
from crossdock_eplb_algos._shared.kernels.water_fill import WaterFill, shares_of_table
from crossdock_eplb_algos._shared.layer_copies import layer_copies

DEVICE = torch.device("cuda")
TOP_K = 8
SHAPES = ((256, 288, 8), (256, 288, 16), (256, 288, 32), (256, 288, 72), (256, 288, 144), (128, 144, 16))
"""experts, slots, ranks."""
INNER, REPEATS = 20, 15


def median_us(call: Callable[[], Any]) -> float:
    """Median time of one call over replays of a graph of ``INNER`` calls."""
    graph = captured(call, INNER)
    times = []
    for _ in range(REPEATS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / INNER)
    return round(statistics.median(times), 1)


def captured(call: Callable[[], Any], inner: int = 1) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(inner):
            call()
    return graph


@attrs.frozen(eq=False)
class OtherRanks:
    """An all-gather of the processes that there are; all other ranks hold still."""

    counts: torch.Tensor
    """[R, E]; those of the processes come first."""

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        if not torch.distributed.is_initialized():
            return torch.cat((x, self.counts[1:]))
        num_processes = torch.distributed.get_world_size()
        result = self.counts.clone()
        torch.distributed.all_gather_into_tensor(result[:num_processes], x)
        return result


@attrs.frozen(eq=False)
class FakeComms:
    moe_ep: GroupComm


@attrs.frozen(kw_only=True, eq=False)
class Case:
    topology: Topology
    placements: tuple[Placement, Placement]
    ids: list[torch.Tensor]
    """[tokens, K] of each rank."""

    def spec(self, *, replicated: bool) -> PickerSpec:
        num_experts, sizes = (
            self.placements[0].num_logical_experts,
            resolve_sizes(ranks=self.topology.num_gpus, attn_dp_size=self.topology.num_gpus),
        )
        counts = torch.stack([expert_counts(ids, num_experts) for ids in self.ids])
        return PickerSpec(
            maps=placement_maps(self.placements[0], DEVICE, max_replicas=self.topology.num_gpus),
            topology=self.topology,
            sizes=sizes,
            place=rank_place(sizes, torch.distributed.get_rank() if torch.distributed.is_initialized() else 0),
            comms=cast("Comms", FakeComms(cast("GroupComm", OtherRanks(counts)))),
            replicated_rows=replicated,
        )


def make_case(experts: int, slots: int, ranks: int, tokens: int) -> Case:
    rng = np.random.default_rng(0)
    before = np.stack([rng.permutation(1e4 / np.arange(1, experts + 1)) for _ in range(2)])
    topology = Topology(num_gpus=ranks, num_nodes=max(1, ranks // 8), num_physical_experts=slots)
    placement = plan("crossdock", before, topology)
    swapped = Placement.from_physical(placement.physical_to_logical[::-1].copy(), experts)
    now = before[0] * rng.lognormal(0, 0.4, experts)
    ids = []
    for _ in range(ranks):
        draws = rng.gumbel(size=(tokens, experts)) + np.log(now * rng.lognormal(0, 0.5, experts))
        ids.append(torch.from_numpy(np.argsort(-draws, axis=1)[:, :TOP_K].copy()).to(DEVICE))
    return Case(topology=topology, placements=(placement, swapped), ids=ids)


def above_sweeps_percent(case: Case) -> float:
    """Largest load of the kernel's split above that of the CPU's sweeps, which are within 0.1 % of the optimum."""
    replicas = case.placements[0].logical_to_physical[0]
    counts = torch.stack([expert_counts(ids, len(replicas)) for ids in case.ids]).sum(0)
    on_host = copy_table(replicas, case.topology)
    base = loads_without_choice(on_host, counts.cpu())
    copies = layer_copies(on_host)
    swept = shares_of_table(copies, WaterFill(copies, form="torch").solve(counts.cpu()), on_host)
    peaks = [
        float((base + shares.sum(0)).max())
        for shares in (even_shares_compiled(counts, on_host.to(DEVICE)).cpu(), swept)
    ]
    return round(100 * (peaks[0] / peaks[1] - 1), 4)


def graph_follows_a_switch(case: Case, picker: Picker, spec: PickerSpec) -> bool:
    """A captured pick, replayed after the placement has changed, names slots that hold the experts."""
    ids = case.ids[0]
    result: list[torch.Tensor] = []
    graph = captured(lambda: result.append(picker.pick(0, ids, ids.shape[0])))
    right = []
    for placement in case.placements:
        overwrite_layer(spec.maps, 0, placement)
        picker.placement_changed(0)
        graph.replay()
        right.append(torch.equal(spec.maps.physical_to_logical[0][result[-1]], ids))
    return all(right)


def measured(shape: tuple[int, int, int], tokens: int) -> dict[str, Any]:
    case = make_case(*shape, tokens)
    ids = case.ids[0]
    row: dict[str, Any] = {"shape": "{}->{} on {}".format(*shape), "tokens": tokens}
    table = copy_table(case.placements[0].logical_to_physical[0], case.topology).to(DEVICE)
    counts = expert_counts(ids, shape[0])
    row["solve_us"] = median_us(lambda: even_shares_compiled(counts, table))
    comm = case.spec(replicated=False).comms.moe_ep
    row["exchange_us"] = median_us(lambda: comm.all_gather(counts[None]))
    row["above_sweeps_percent"] = above_sweeps_percent(case)
    for name in ("lp", "locality", "dynamic"):
        for replicated in (True, False):
            spec = case.spec(replicated=replicated)
            picker = make_expert_location(name, {}, spec)
            key = f"{name}_{'same_rows' if replicated else 'own_rows'}"
            row[f"{key}_us"] = median_us(lambda picker=picker: picker.pick(0, ids, ids.shape[0]))
            row[f"{key}_right"] = graph_follows_a_switch(case, picker, spec)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--ranks", type=int, nargs="+", default=sorted({shape[2] for shape in SHAPES}))
    options = parser.parse_args()
    if "LOCAL_RANK" in os.environ:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch.distributed.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
    rows = []
    for shape in [shape for shape in SHAPES if shape[2] in options.ranks]:
        for tokens in options.tokens:
            rows.append(measured(shape, tokens))
            print(json.dumps(rows[-1]), flush=True)
    if options.out and os.environ.get("RANK", "0") == "0":
        with open(options.out, "w", encoding="utf-8") as file:
            json.dump({"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
