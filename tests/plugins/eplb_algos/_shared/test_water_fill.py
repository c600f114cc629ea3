"""The split of a batch over replicas against the optimum of the linear program, solved by HiGHS."""

from __future__ import annotations

import attrs
import numpy as np
import numpy.typing as npt
import pytest
import torch
from crossdock.types.placement import Topology
from crossdock_eplb_algos._shared.kernels.water_fill import WaterFill, batched_fill, loads_of
from crossdock_eplb_algos._shared.kernels.water_fill_native import native_reason
from crossdock_eplb_algos._shared.layer_copies import LayerCopies, copies_of_layer
from crossdock_eplb_algos._shared.reference import reference_map
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

NEAR_OPTIMUM = 1.001
"""The promise: within 0.1 % of the optimum."""


@attrs.frozen(kw_only=True, eq=False)
class Problem:
    """One layer: who holds what, and a batch."""

    slots: npt.NDArray[np.int64]
    tokens: npt.NDArray[np.int64]
    topology: Topology

    @property
    def replica_lists(self) -> list[list[int]]:
        return [np.flatnonzero(self.slots == expert).tolist() for expert in range(len(self.tokens))]

    def copies(self) -> LayerCopies:
        return copies_of_layer(self.replica_lists, self.topology)


def optimum(problem: Problem) -> float:
    """The least possible load of the fullest rank: one variable a slot and the level, no trick of ours."""
    num_slots, num_ranks = len(problem.slots), problem.topology.num_gpus
    on_rank = np.repeat(np.eye(num_ranks), problem.topology.slots_per_gpu, axis=1)
    holds = (problem.slots[None] == np.arange(len(problem.tokens))[:, None]).astype(np.float64)
    answer = linprog(
        c=[0.0] * num_slots + [1.0],
        A_ub=np.hstack([on_rank, -np.ones((num_ranks, 1))]),
        b_ub=np.zeros(num_ranks),
        A_eq=np.hstack([holds, np.zeros((len(holds), 1))]),
        b_eq=problem.tokens,
        method="highs",
    )
    return float(answer.fun)


def planned(num_experts: int, num_slots: int, num_ranks: int, seed: int, skew: float) -> Problem:
    """A placement planned for one load, and a batch from a load that has moved away from it."""
    rng = np.random.default_rng(seed)
    before = rng.permutation(1.0 / np.arange(1, num_experts + 1) ** skew)
    slots = reference_map(before[None] * 1e4, num_slots, 1, 1, num_ranks)[0]
    now = before * rng.lognormal(0, 0.5, num_experts)
    tokens = rng.multinomial(64 * num_ranks * 8, now / now.sum())
    topology = Topology(num_gpus=num_ranks, num_nodes=1, num_physical_experts=num_slots)
    return Problem(slots=slots, tokens=tokens, topology=topology)


SHAPES = [(64, 72, 8), (128, 160, 32), (256, 288, 16), (256, 288, 32), (256, 288, 72), (8, 16, 8), (32, 48, 16)]


@pytest.mark.parametrize("form", ["native", "torch"])
@pytest.mark.parametrize(("num_experts", "num_slots", "num_ranks"), SHAPES)
def test_the_fullest_rank_is_within_a_thousandth_of_the_optimum(
    num_experts: int, num_slots: int, num_ranks: int, form: str
) -> None:
    if form == "native" and native_reason():
        pytest.skip(f"no C kernel here: {native_reason()}")
    for seed, skew in enumerate((0.5, 1.0, 1.5)):
        problem = planned(num_experts, num_slots, num_ranks, seed, skew)
        copies, tokens = problem.copies(), torch.from_numpy(problem.tokens)
        fill = WaterFill(copies, form=form)
        assert fill.form == form
        shares = fill.solve(tokens)
        assert float(loads_of(copies, tokens, shares).max()) <= NEAR_OPTIMUM * optimum(problem)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_shares_add_up_and_are_never_worse_than_the_optimum_by_a_thousandth(data: st.DataObject) -> None:
    num_ranks = data.draw(st.integers(1, 6))
    num_experts = data.draw(st.integers(1, 8))
    slots_per_rank = data.draw(st.integers(-(-num_experts // num_ranks), 8))
    num_slots = num_ranks * slots_per_rank
    spare = data.draw(
        st.lists(st.integers(0, num_experts - 1), min_size=num_slots - num_experts, max_size=num_slots - num_experts)
    )
    slots = np.array(data.draw(st.permutations([*range(num_experts), *spare])), dtype=np.int64)
    tokens = np.array(data.draw(st.lists(st.integers(0, 500), min_size=num_experts, max_size=num_experts)))
    topology = Topology(num_gpus=num_ranks, num_nodes=1, num_physical_experts=num_slots)
    problem = Problem(slots=slots, tokens=tokens, topology=topology)
    copies, batch = problem.copies(), torch.from_numpy(tokens)
    shares = WaterFill(copies, form="torch").solve(batch)
    assert bool((shares >= 0).all())
    torch.testing.assert_close(shares.sum(1), batch[copies.experts].to(torch.float64))
    assert float(shares[copies.ranks == num_ranks].sum()) == 0, "a share in padding"
    assert float(loads_of(copies, batch, shares).max()) <= NEAR_OPTIMUM * optimum(problem) + 1e-6


def test_the_c_kernel_and_torch_give_the_same() -> None:
    if native_reason():
        pytest.skip(f"no C kernel here: {native_reason()}")
    problem = planned(256, 288, 32, 5, 1.0)
    copies, tokens = problem.copies(), torch.from_numpy(problem.tokens)
    torch.testing.assert_close(
        WaterFill(copies).solve(tokens), WaterFill(copies, form="torch").solve(tokens), rtol=0, atol=1e-6
    )


def test_many_layers_at_once_are_as_good_as_one_by_one() -> None:
    problems = [planned(128, 144, 16, seed, 1.0) for seed in range(6)]
    copies = [problem.copies() for problem in problems]
    tokens = torch.from_numpy(np.stack([problem.tokens for problem in problems]))
    fill = batched_fill(copies)
    shares = fill.solve(tokens)
    layer_of_row = fill.row_experts // 128
    for layer, problem in enumerate(problems):
        own = shares[layer_of_row == layer][:, : copies[layer].ranks.shape[1]]
        assert float(loads_of(copies[layer], tokens[layer], own).max()) <= NEAR_OPTIMUM * optimum(problem)


def test_two_copies_on_one_rank_count_as_one_way_out() -> None:
    """Without merging, the rank with two copies looks as if it could take twice as much."""
    topology = Topology(num_gpus=2, num_nodes=1, num_physical_experts=6)
    problem = Problem(slots=np.array([0, 0, 1, 0, 2, 2]), tokens=np.array([90, 30, 0]), topology=topology)
    copies = problem.copies()
    assert copies.experts.tolist() == [0]
    assert copies.slots.tolist() == [[0, 3]]
    shares = WaterFill(copies).solve(torch.from_numpy(problem.tokens))
    torch.testing.assert_close(shares, torch.tensor([[30.0, 60.0]], dtype=torch.float64))


def test_a_layer_without_tokens_or_without_replicas_is_fine() -> None:
    topology = Topology(num_gpus=2, num_nodes=1, num_physical_experts=4)
    for form in ("auto", "torch"):
        idle = Problem(slots=np.array([0, 1, 2, 0]), tokens=np.zeros(3, dtype=np.int64), topology=topology).copies()
        assert WaterFill(idle, form=form).solve(torch.zeros(3, dtype=torch.int64)).tolist() == [[0.0, 0.0]]
        alone = Problem(slots=np.arange(4), tokens=np.ones(4, dtype=np.int64), topology=topology).copies()
        assert WaterFill(alone, form=form).solve(torch.ones(4, dtype=torch.int64)).shape == (0, 0)
