"""The ``lp`` picker: batches are split as the optimum says, by real picks on several ranks."""

from __future__ import annotations

import numpy as np
import torch
from crossdock.groups import resolve_sizes
from crossdock.location import make_expert_location, placement_maps
from crossdock.testing.world import OneProcessWorld, RankContext
from crossdock.types.location import PickerSpec
from crossdock.types.placement import Placement, Topology
from crossdock_eplb_algos._shared.reference import reference_map
from scipy.optimize import linprog

NUM_RANKS, NUM_EXPERTS, NUM_SLOTS = 4, 16, 24
SIZES = resolve_sizes(ranks=NUM_RANKS, attn_dp_size=NUM_RANKS)
TOPOLOGY = Topology(num_gpus=NUM_RANKS, num_nodes=2, num_physical_experts=NUM_SLOTS)
LOAD = 1000.0 / np.arange(1, NUM_EXPERTS + 1)
SLOTS = reference_map(LOAD[None], NUM_SLOTS, 1, 1, NUM_RANKS)


def ids_of(rank: int, rows: int) -> torch.Tensor:
    """A batch of its own for each rank; hot experts are others than the placement was made for."""
    shares = torch.from_numpy(np.roll(LOAD, 3))
    generator = torch.Generator().manual_seed(rank)
    return torch.multinomial(shares.expand(rows, -1), 2, generator=generator) if rows else torch.empty(0, 2).long()


def pick(context: RankContext, rows: tuple[int, ...], name: str, options: dict[str, object]) -> torch.Tensor:
    spec = PickerSpec(
        maps=placement_maps(Placement.from_physical(SLOTS, NUM_EXPERTS), torch.device("cpu")),
        topology=TOPOLOGY,
        sizes=SIZES,
        place=context.place(SIZES),
        comms=context.comms_of(SIZES),
        replicated_rows=False,
    )
    picker = make_expert_location(name, options, spec)
    return picker.pick(0, ids_of(context.rank, rows[context.rank]), rows[context.rank])


def rank_loads(picks: list[torch.Tensor]) -> np.ndarray:  # type: ignore[type-arg]
    slots = torch.cat([each.flatten() for each in picks])
    return np.bincount(slots.numpy() // TOPOLOGY.slots_per_gpu, minlength=NUM_RANKS)


def optimum(rows: tuple[int, ...]) -> float:
    ids = torch.cat([ids_of(rank, count).flatten() for rank, count in enumerate(rows)])
    tokens = np.bincount(ids.numpy(), minlength=NUM_EXPERTS)
    on_rank = np.repeat(np.eye(NUM_RANKS), TOPOLOGY.slots_per_gpu, axis=1)
    answer = linprog(
        c=[0.0] * NUM_SLOTS + [1.0],
        A_ub=np.hstack([on_rank, -np.ones((NUM_RANKS, 1))]),
        b_ub=np.zeros(NUM_RANKS),
        A_eq=np.hstack([SLOTS[0] == np.arange(NUM_EXPERTS)[:, None], np.zeros((NUM_EXPERTS, 1))]).astype(float),
        b_eq=tokens,
        method="highs",
    )
    return float(answer.fun)


def test_picks_of_all_ranks_together_reach_the_optimum_up_to_whole_tokens() -> None:
    for rows in ((200, 200, 200, 200), (400, 0, 30, 1)):
        picks = OneProcessWorld(SIZES).run(pick, rows, "lp", {})
        replicated_on_a_rank = TOPOLOGY.slots_per_gpu
        assert rank_loads(picks).max() <= 1.001 * optimum(rows) + replicated_on_a_rank


def test_it_is_evener_than_dynamic_and_static() -> None:
    rows = (200, 200, 200, 200)
    most = {
        name: rank_loads(OneProcessWorld(SIZES).run(pick, rows, name, {})).max() for name in ("lp", "dynamic", "static")
    }
    assert most["lp"] < most["dynamic"]
    assert most["lp"] < most["static"]


def test_ranks_without_tokens_join_the_exchange() -> None:
    picks = OneProcessWorld(SIZES).run(pick, (0, 5, 0, 0), "lp", {})
    assert [each.shape[0] for each in picks] == [0, 5, 0, 0]
    assert [each.shape[0] for each in OneProcessWorld(SIZES).run(pick, (0, 0, 0, 0), "lp", {})] == [0, 0, 0, 0]


def test_the_torch_solver_picks_as_the_c_kernel_does() -> None:
    rows = (64, 64, 64, 64)
    auto, plain = (OneProcessWorld(SIZES).run(pick, rows, "lp", {"solver": solver}) for solver in ("auto", "torch"))
    loads = [rank_loads(picks) for picks in (auto, plain)]
    assert np.abs(loads[0] - loads[1]).max() <= TOPOLOGY.slots_per_gpu
