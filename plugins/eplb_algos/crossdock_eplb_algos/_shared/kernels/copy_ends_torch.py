"""From tokens of copies to what one rank sends where, without talking: every rank works from the same counts."""

from __future__ import annotations

import torch

PARTS = 4096
"""Of a token: shares are rounded to them before they are added up."""


def whole_ends_torch(shares: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Rounds tokens of copies so that nothing is lost.

    Args:
        shares: [M, R] float tokens of each copy; rows add up to ``tokens`` but for rounding.
        tokens: [M] int64.

    Returns:
        [M, R] int64 tokens that go to ranks 0 to r together; differences along a row are within one of the shares.
    """
    if not shares.numel():
        return torch.zeros(shares.shape, dtype=torch.int64, device=shares.device)
    # Sums of integers: those of floats would depend on the order, and could grow where there is no share.
    sums = (shares * PARTS + 0.5).to(torch.int64).cumsum(1)
    ends = torch.minimum((sums + PARTS // 2) >> PARTS.bit_length() - 1, tokens[:, None])
    # What rounding lost goes to the last rank that has a share; those behind it have none.
    place = torch.arange(1, shares.shape[1] + 1, device=shares.device)
    last = ((shares > 0) * place).amax(1, keepdim=True)
    return torch.where(place >= last, tokens[:, None], ends)


def own_ends_torch(ends: torch.Tensor, counts: torch.Tensor, own_rank: int, num_nodes: int) -> torch.Tensor:
    """What one rank sends to each copy: to itself as much as fits, then within its node, then anywhere.

    Args:
        ends: [M, R] int64 tokens that go to the copies on ranks 0 to r from all ranks together (``whole_ends_torch``).
        counts: [R, M] int64 tokens that each rank has; per expert they add up to the last of ``ends``.
        own_rank: the rank that is asked for.
        num_nodes: machines; ranks of a machine have neighbouring numbers.

    Returns:
        [M, R] int64 the same for the tokens of ``own_rank`` alone. Added over ranks they are ``ends``.
    """
    wanted, held = torch.diff(ends, dim=1, prepend=torch.zeros_like(ends[:, :1])), counts.t()
    stays = torch.minimum(held, wanted)
    own = torch.zeros_like(wanted)
    own[:, own_rank] = stays[:, own_rank]
    held, wanted = held - stays, wanted - stays
    for groups in (num_nodes, 1) if num_nodes > 1 else (1,):
        sent, held, wanted = _matched(held, wanted, own_rank, groups)
        own = own + sent
    return own.cumsum(1)


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
    size = ranks // groups
    held, wanted = held.reshape(rows, groups, size), wanted.reshape(rows, groups, size)
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
