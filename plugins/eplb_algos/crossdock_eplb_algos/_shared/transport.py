"""From token quotas of copies to the copy that each token goes to, without talking: every rank works from the same counts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from crossdock_eplb_algos._shared.layer_copies import LayerCopies


def whole_quotas(shares: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """[M, K] float tokens of copies and [M] int64 totals -> [M, K] int64 that add up to the totals, each within one of its share."""
    if not shares.shape[1]:
        return shares.to(torch.int64)
    ends = shares.cumsum(1).round().to(torch.int64)
    ends = torch.minimum(ends, tokens[:, None])
    ends[:, -1] = tokens
    return torch.diff(ends, dim=1, prepend=torch.zeros_like(ends[:, :1]))


def own_quotas(
    quotas: torch.Tensor, counts: torch.Tensor, copies: LayerCopies, own_rank: int, num_nodes: int
) -> torch.Tensor:
    """What one rank sends to each copy: to itself as much as fits, then within its node, then anywhere.

    Args:
        quotas: [M, K] int64 tokens that each copy gets from all ranks together.
        counts: [R, M] int64 tokens that each rank has; per expert they add up to its quotas.
        own_rank: the rank that is asked for.
        num_nodes: machines; ranks of a machine have neighbouring numbers.

    Returns:
        [M, K] int64; rows add up to ``counts[own_rank]``. Added over ranks they are ``quotas``.
    """
    num_ranks = copies.num_ranks
    wanted = quotas.new_zeros((copies.num_rows, num_ranks + 1)).scatter_add_(1, copies.ranks, quotas)[:, :-1]
    held = counts.t().contiguous()
    own = torch.zeros_like(wanted)
    own[:, own_rank] = torch.minimum(held, wanted)[:, own_rank]
    stays = torch.minimum(held, wanted)
    held, wanted = held - stays, wanted - stays
    for groups in (num_nodes, 1) if num_nodes > 1 else (1,):
        sent, held, wanted = _matched(held, wanted, own_rank, groups)
        own += sent
    return torch.nn.functional.pad(own, (0, 1)).gather(1, copies.ranks)


def copy_of_tokens(
    topk_ids: torch.Tensor, own_counts: torch.Tensor, quotas: torch.Tensor, copies: LayerCopies
) -> torch.Tensor:
    """[n, K'] int64 logical ids (-1 none) -> physical ids: the first tokens of an expert to its first copy, and so on.

    Args:
        own_counts: [E] int64, how often each expert is among the ids.
        quotas: [M, K] int64 tokens that go to each copy, adding up to the counts.
    """
    ids = topk_ids.reshape(-1)
    known = ids.clamp(min=0)
    slots = copies.first_slot[known]
    if copies.num_rows:
        row = copies.row_of_expert[known]
        has_choice = (row < copies.num_rows) & (ids >= 0)
        row = row.clamp(max=copies.num_rows - 1)
        passed = (_places_within_expert(ids, own_counts)[:, None] >= quotas.cumsum(1)[row]).sum(1)
        chosen = copies.slots[row, passed.clamp(max=quotas.shape[1] - 1)]
        slots = torch.where(has_choice, chosen, slots)
    return torch.where(ids >= 0, slots, -1).view(topk_ids.shape)


def expert_counts(topk_ids: torch.Tensor, num_experts: int) -> torch.Tensor:
    """[E] int64 how often each logical expert is chosen; -1 is not counted."""
    return torch.bincount(topk_ids.reshape(-1) + 1, minlength=num_experts + 1)[1:]


def _places_within_expert(ids: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """How many earlier ids name the same expert; -1 gets any number."""
    order = torch.argsort(ids, stable=True)
    first = torch.nn.functional.pad(counts, (1, 0)).cumsum(0)
    num_without = ids.shape[0] - int(first[-1])
    # Sorted, an expert's ids begin behind those of -1 and of smaller experts.
    sorted_places = torch.arange(ids.shape[0], device=ids.device)
    places = torch.empty_like(ids)
    places[order] = sorted_places
    return places - num_without - first[ids.clamp(min=0)]


def _matched(
    held: torch.Tensor, wanted: torch.Tensor, own_rank: int, groups: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Matches tokens with places inside groups of neighbouring ranks, both laid end to end in rank order.

    Args:
        held, wanted: [M, R] int64 tokens of ranks without a place, places of ranks without a token.

    Returns:
        [M, R] what ``own_rank`` sends, and what is left of both.
    """
    rows, ranks = held.shape
    held, wanted = held.view(rows, groups, -1), wanted.view(rows, groups, -1)
    size = ranks // groups
    held_ends, wanted_ends = held.cumsum(2), wanted.cumsum(2)
    group, index = divmod(own_rank, size)
    begin = (held_ends - held)[:, group, index, None]
    end = held_ends[:, group, index, None]
    overlap = torch.minimum(end, wanted_ends[:, group]) - torch.maximum(begin, (wanted_ends - wanted)[:, group])
    sent = held.new_zeros((rows, groups, size))
    sent[:, group] = overlap.clamp(min=0)
    matched = torch.minimum(held_ends[..., -1:], wanted_ends[..., -1:])
    left = [parts - _part_below(ends, parts, matched) for ends, parts in ((held_ends, held), (wanted_ends, wanted))]
    return sent.view(rows, ranks), left[0].view(rows, ranks), left[1].view(rows, ranks)


def _part_below(ends: torch.Tensor, parts: torch.Tensor, limit: torch.Tensor) -> torch.Tensor:
    """How much of each part, laid end to end, lies below ``limit``."""
    return torch.minimum(torch.minimum(ends, limit) - (ends - parts), parts).clamp(min=0)
