"""Quotas become picks: nothing is lost, and what can stay near stays near."""

from __future__ import annotations

import torch
from crossdock.types.placement import Topology
from crossdock_eplb_algos._shared.layer_copies import LayerCopies, copies_of_layer
from crossdock_eplb_algos._shared.transport import copy_of_tokens, expert_counts, own_quotas, whole_quotas
from hypothesis import given, settings
from hypothesis import strategies as st

TOPOLOGY = Topology(num_gpus=4, num_nodes=2, num_physical_experts=12)


def copies_of(slots: list[int], num_experts: int) -> LayerCopies:
    return copies_of_layer(
        [[slot for slot, owner in enumerate(slots) if owner == expert] for expert in range(num_experts)], TOPOLOGY
    )


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_every_rank_sends_what_it_has_and_every_copy_gets_its_quota(data: st.DataObject) -> None:
    num_experts = 5
    rest = data.draw(st.lists(st.integers(0, num_experts - 1), min_size=7, max_size=7))
    slots = data.draw(st.permutations([*range(num_experts), *rest]))
    copies = copies_of(list(slots), num_experts)
    numbers = st.lists(st.integers(0, 30), min_size=num_experts, max_size=num_experts)
    counts = torch.tensor([data.draw(numbers) for _ in range(4)])[:, copies.experts]
    totals = counts.sum(0)
    weights = torch.rand(copies.ranks.shape, generator=torch.Generator().manual_seed(data.draw(st.integers(0, 99))))
    weights = torch.where(copies.ranks < 4, weights + 1e-3, 0.0).to(torch.float64)
    shares = weights / weights.sum(1, keepdim=True) * totals[:, None]
    quotas = whole_quotas(shares, totals)
    assert bool(((quotas - shares).abs() <= 1.0 + 1e-9).all())
    sent = torch.stack([own_quotas(quotas, counts, copies, rank, TOPOLOGY.num_nodes) for rank in range(4)])
    assert bool((sent >= 0).all())
    assert torch.equal(sent.sum(2), counts)
    assert torch.equal(sent.sum(0), quotas)
    own = torch.where(copies.ranks < 4, copies.ranks, -1)
    for rank in range(4):
        stays = torch.where(own == rank, sent[rank], 0).sum(1)
        room = torch.where(own == rank, quotas, 0).sum(1)
        assert torch.equal(stays, torch.minimum(counts[rank], room)), "a token left a rank that had room for it"


def test_what_leaves_a_rank_stays_on_its_machine_where_it_can() -> None:
    # Expert 0 has a copy on rank 1 and one on rank 2; rank 0 shares a machine with rank 1.
    copies = copies_of([1, 2, 3, 0, 1, 2, 0, 3, 1, 1, 2, 3], 4)
    row = copies.experts.tolist().index(0)
    counts = torch.zeros((4, copies.num_rows), dtype=torch.int64)
    counts[0, row], counts[3, row] = 10, 10
    quotas = torch.zeros_like(copies.ranks)
    quotas[row, :2] = 10
    assert own_quotas(quotas, counts, copies, 0, 2)[row, :2].tolist() == [10, 0]
    assert own_quotas(quotas, counts, copies, 3, 2)[row, :2].tolist() == [0, 10]


def test_tokens_go_to_copies_in_the_order_of_the_batch() -> None:
    copies = copies_of([0, 1, 2, 0, 3, 1, 2, 3, 3, 3, 3, 0], 4)
    ids = torch.tensor([[0, 1], [0, -1], [-1, -1], [0, 2], [1, 0]])
    counts = expert_counts(ids, 4)
    assert counts.tolist() == [4, 2, 1, 0]
    quotas = torch.zeros_like(copies.ranks)
    by_expert = {0: [1, 1, 2], 1: [0, 2], 2: [1, 0]}
    for row, expert in enumerate(copies.experts.tolist()):
        found = by_expert.get(expert, [])
        quotas[row, : len(found)] = torch.tensor(found, dtype=torch.int64)
    picks = copy_of_tokens(ids, counts, quotas, copies)
    assert picks.tolist() == [[0, 5], [3, -1], [-1, -1], [11, 2], [5, 11]]


def test_no_row_and_only_padding_are_fine() -> None:
    copies = copies_of([0, 1, 2, 0, 3, 1, 2, 3, 3, 3, 3, 0], 4)
    for ids in (torch.empty((0, 2), dtype=torch.int64), torch.full((3, 2), -1)):
        counts = expert_counts(ids, 4)
        assert counts.tolist() == [0, 0, 0, 0]
        assert torch.equal(copy_of_tokens(ids, counts, torch.zeros_like(copies.ranks), copies), ids)
