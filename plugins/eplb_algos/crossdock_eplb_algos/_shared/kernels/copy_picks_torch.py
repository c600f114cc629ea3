"""Which copy each token goes to, once it is known how many go where."""

from __future__ import annotations

import torch

from crossdock_eplb_algos._shared.copy_table import CopyTable

_MOST_COMPARED = 1 << 21
"""Choices times ranks that are compared one with another; more of them are looked up in a sorted list, which has a high price to begin."""


def expert_counts_torch(topk_ids: torch.Tensor, num_experts: int) -> torch.Tensor:
    """[E] int64 how often each logical expert is chosen; -1 is not counted."""
    ids = topk_ids.reshape(-1) + 1
    if ids.device.type == "cpu":
        return torch.bincount(ids, minlength=num_experts + 1)[1:]
    # Elsewhere that waits for the device, to learn how large the result is.
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=ids.device)
    return counts.scatter_add_(0, ids, torch.ones_like(ids))[1:]


def copy_picks_torch(
    topk_ids: torch.Tensor, own_counts: torch.Tensor, ends: torch.Tensor, table: CopyTable
) -> torch.Tensor:
    """[n, K] int64 logical ids (-1 none) -> physical ids: the first tokens of an expert to its first copy, and so on.

    Args:
        own_counts: [E] int64, how often each expert is among the ids.
        ends: [M, R] int64 tokens of this rank that go to ranks 0 to r; the last of a row is the expert's count.
    """
    ids = topk_ids.reshape(-1)
    known = ids.clamp(min=0)
    slots = table.first_slot[known]
    if table.num_rows:
        row = table.row_of_expert[known]
        has_choice = row < table.num_rows
        row = row.clamp(max=table.num_rows - 1)
        place = torch.where(has_choice, _places_within_expert(ids, own_counts), 0)
        rank = _ranks_passed(place, row, ends)
        chosen = table.slots[row, rank.clamp(max=table.num_ranks - 1)]
        slots = torch.where(has_choice, chosen, slots)
    return torch.where(ids >= 0, slots, -1).view(topk_ids.shape)


def _ranks_passed(place: torch.Tensor, row: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """[n] how many of the row's ends are at or below the place."""
    num_rows, num_ranks = ends.shape
    if place.shape[0] * num_ranks <= _MOST_COMPARED:
        return (place[:, None] >= ends[row]).sum(1)
    # One sorted list for all rows: each row's ends lifted above those of the rows before.
    lift = place.shape[0] + 1
    lifted = (ends + torch.arange(num_rows, device=ends.device)[:, None] * lift).view(-1)
    return torch.searchsorted(lifted, place + row * lift, right=True) - row * num_ranks


def _places_within_expert(ids: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """How many earlier ids name the same expert; -1 gets any number."""
    order = torch.argsort(ids, stable=True)
    first = torch.nn.functional.pad(counts, (1, 0)).cumsum(0)
    num_without = ids.shape[0] - first[-1]
    # Sorted, an expert's ids begin behind those of -1 and of smaller experts.
    places = torch.empty_like(ids)
    places[order] = torch.arange(ids.shape[0], device=ids.device)
    return (places - num_without - first[ids.clamp(min=0)]).clamp(min=0)
