"""Shares become picks: nothing is lost, and what can stay near stays near; kernels and torch say the same."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from crossdock.types.placement import Placement, Topology
from crossdock_eplb_algos._shared.copy_table import CopyTable, copy_table, tokens_of_rows
from crossdock_eplb_algos._shared.kernels import copy_picks_torch as copy_picks_module
from crossdock_eplb_algos._shared.kernels.copy_ends import own_ends_compiled, whole_ends_compiled
from crossdock_eplb_algos._shared.kernels.copy_ends_torch import own_ends_torch, whole_ends_torch
from crossdock_eplb_algos._shared.kernels.copy_picks import copy_picks_compiled, expert_counts_compiled
from crossdock_eplb_algos._shared.kernels.copy_picks_torch import copy_picks_torch, expert_counts_torch
from hypothesis import given, settings
from hypothesis import strategies as st

TOPOLOGY = Topology(num_gpus=4, num_nodes=2, num_physical_experts=12)
SLOTS = [0, 1, 2, 0, 3, 1, 2, 3, 3, 3, 3, 0]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed (extra `interpreter`)"
)


def table_of(slots: list[int], num_experts: int) -> CopyTable:
    replicas = Placement.from_physical([slots], num_experts).logical_to_physical[0]
    return copy_table(replicas, TOPOLOGY).to(DEVICE)


def drawn_shares(table: CopyTable, totals: torch.Tensor, seed: int) -> torch.Tensor:
    """Any split of the totals over copies."""
    weights = torch.rand(table.slots.shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE) + 1e-3
    weights = torch.where(table.slots >= 0, weights, 0.0)
    return weights / weights.sum(1, keepdim=True).clamp(min=1e-30) * totals[:, None]


def sent_by_rank(ends: torch.Tensor) -> torch.Tensor:
    return torch.diff(ends, dim=-1, prepend=torch.zeros_like(ends[..., :1]))


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_every_rank_sends_what_it_has_and_every_copy_gets_its_share(data: st.DataObject) -> None:
    num_experts = 5
    rest = data.draw(st.lists(st.integers(0, num_experts - 1), min_size=7, max_size=7))
    slots = data.draw(st.permutations([*range(num_experts), *rest]))
    table = table_of(list(slots), num_experts)
    numbers = st.lists(st.integers(0, 30), min_size=num_experts, max_size=num_experts)
    counts = tokens_of_rows(table, torch.tensor([data.draw(numbers) for _ in range(4)], device=DEVICE))
    totals = counts.sum(0)
    shares = drawn_shares(table, totals, data.draw(st.integers(0, 99)))
    ends = whole_ends_torch(shares, totals)
    quotas = sent_by_rank(ends)
    assert bool(((quotas - shares).abs() <= 1.0 + 1e-2).all())
    assert torch.equal(quotas.sum(1), totals)
    assert int(quotas[table.slots < 0].sum()) == 0, "tokens for a rank without a copy"
    sent = torch.stack([sent_by_rank(own_ends_torch(ends, counts, rank, TOPOLOGY.num_nodes)) for rank in range(4)])
    assert bool((sent >= 0).all())
    assert torch.equal(sent.sum(2), counts)
    assert torch.equal(sent.sum(0), quotas)
    for rank in range(4):
        stays = torch.minimum(counts[rank], quotas[:, rank])
        assert torch.equal(sent[rank, :, rank], stays), "a token left a rank that had room for it"


def test_a_share_of_nothing_gets_no_token_whatever_rounding_does() -> None:
    shares = torch.tensor([[0.0, 1.49, 0.0, 2.51], [3.3333333, 0.0, 6.6666665, 0.0], [0.0, 0.0, 0.0, 0.0]])
    ends = whole_ends_torch(shares, torch.tensor([4, 10, 0]))
    assert sent_by_rank(ends).tolist() == [[0, 1, 0, 3], [3, 0, 7, 0], [0, 0, 0, 0]]


def test_what_leaves_a_rank_stays_on_its_machine_where_it_can() -> None:
    # Expert 0 has a copy on rank 1 and one on rank 2; rank 0 shares a machine with rank 1.
    table = table_of([1, 2, 3, 0, 1, 2, 0, 3, 1, 1, 2, 3], 4)
    row = int(table.row_of_expert[0])
    counts = torch.zeros((4, table.num_rows), dtype=torch.int64, device=DEVICE)
    counts[0, row], counts[3, row] = 10, 10
    ends = torch.zeros_like(table.slots)
    ends[row] = torch.tensor([0, 10, 20, 20])
    assert own_ends_torch(ends, counts, 0, 2)[row].tolist() == [0, 10, 10, 10]
    assert own_ends_torch(ends, counts, 3, 2)[row].tolist() == [0, 0, 10, 10]


def test_tokens_go_to_copies_in_the_order_of_the_batch() -> None:
    table = table_of(SLOTS, 4)
    ids = torch.tensor([[0, 1], [0, -1], [-1, -1], [0, 2], [1, 0]], device=DEVICE)
    counts = expert_counts_torch(ids, 4)
    assert counts.tolist() == [4, 2, 1, 0]
    by_rank = {0: [1, 2, 2, 4], 1: [0, 2, 2, 2], 2: [1, 1, 1, 1]}
    ends = torch.zeros_like(table.slots)
    for expert, row_ends in by_rank.items():
        ends[table.row_of_expert[expert]] = torch.tensor(row_ends)
    expected = [[0, 5], [3, -1], [-1, -1], [11, 2], [5, 11]]
    assert copy_picks_torch(ids, counts, ends, table).tolist() == expected


def test_many_choices_are_looked_up_as_few_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    table = table_of(SLOTS, 4)
    ids = torch.randint(-1, 4, (200, 2), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    counts = expert_counts_torch(ids, 4)
    tokens = tokens_of_rows(table, counts)
    ends = whole_ends_torch(drawn_shares(table, tokens, 0), tokens)
    few = copy_picks_torch(ids, counts, ends, table)
    monkeypatch.setattr(copy_picks_module, "_MOST_COMPARED", 0)
    assert torch.equal(copy_picks_torch(ids, counts, ends, table), few)


def test_no_row_and_only_padding_are_fine() -> None:
    table = table_of(SLOTS, 4)
    for ids in (torch.empty((0, 2), dtype=torch.int64), torch.full((3, 2), -1)):
        ids = ids.to(DEVICE)
        counts = expert_counts_torch(ids, 4)
        assert counts.tolist() == [0, 0, 0, 0]
        assert torch.equal(copy_picks_torch(ids, counts, torch.zeros_like(table.slots), table), ids)


@needs_triton
@pytest.mark.parametrize("rows", [0, 1, 63, 64, 65, 300])
@pytest.mark.parametrize("slots", [SLOTS, [*range(12)]], ids=["copies", "no copies"])
def test_the_kernels_round_match_and_pick_as_torch_does(rows: int, slots: list[int]) -> None:
    num_experts = max(slots) + 1
    table = table_of(slots, num_experts)
    generator = torch.Generator().manual_seed(rows)
    ids = [torch.randint(-1, num_experts, (rows + rank, 1), generator=generator).to(DEVICE) for rank in range(4)]
    counts = torch.stack([expert_counts_torch(each, num_experts) for each in ids])
    totals = counts.sum(0)
    shares = drawn_shares(table, tokens_of_rows(table, totals), rows)
    ends = whole_ends_torch(shares, tokens_of_rows(table, totals))
    assert torch.equal(whole_ends_compiled(shares, totals, table), ends)
    for rank, own_ids in enumerate(ids):
        assert torch.equal(expert_counts_compiled(own_ids, num_experts), counts[rank])
        own = own_ends_torch(ends, tokens_of_rows(table, counts), rank, 2)
        assert torch.equal(own_ends_compiled(ends, counts, table, rank, 2), own)
        picks = copy_picks_torch(own_ids, counts[rank], own, table)
        assert torch.equal(copy_picks_compiled(own_ids, own, table), picks)
        held = torch.tensor(slots, device=DEVICE)[picks.clamp(min=0)]
        assert torch.equal(torch.where(picks >= 0, held, -1), own_ids)


@needs_triton
@pytest.mark.parametrize(("gpus", "nodes"), [(144, 18), (72, 9), (12, 3), (12, 12), (6, 1)])
def test_the_own_part_is_that_of_torch_on_any_number_of_nodes(gpus: int, nodes: int) -> None:
    generator = torch.Generator().manual_seed(gpus)
    num_experts = 2 * gpus - gpus // 4
    rest = torch.randint(0, num_experts, (2 * gpus - num_experts,), generator=generator).tolist()
    replicas = Placement.from_physical([[*range(num_experts), *rest]], num_experts).logical_to_physical[0]
    topology = Topology(num_gpus=gpus, num_nodes=nodes, num_physical_experts=2 * gpus)
    table = copy_table(replicas, topology).to(DEVICE)
    counts = torch.randint(0, 30, (gpus, num_experts), generator=generator).to(DEVICE)
    totals = tokens_of_rows(table, counts.sum(0))
    ends = whole_ends_torch(drawn_shares(table, totals, gpus), totals)
    for rank in (0, gpus // 2, gpus - 1):
        expected = own_ends_torch(ends, tokens_of_rows(table, counts), rank, nodes)
        assert torch.equal(own_ends_compiled(ends, counts, table, rank, nodes), expected)
