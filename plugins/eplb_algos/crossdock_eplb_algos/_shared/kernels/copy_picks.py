# Launch options (num_warps, ...) are no parameters of the kernel.
# pyright: reportCallIssue=false
"""``copy_picks``: logical to physical ids by the number of tokens that each copy gets."""

from __future__ import annotations

import torch

from crossdock_eplb_algos._shared.copy_table import CopyTable
from crossdock_eplb_algos._shared.kernels.copy_picks_torch import copy_picks_torch, expert_counts_torch
from crossdock_eplb_algos._shared.kernels.even_shares import block_of, has_kernels

MOST_IDS = 1 << 14
"""The kernel compares each choice with those before it; above this a sort is cheaper."""
_BLOCK, _OTHERS_BLOCK, _COUNT_BLOCK = 64, 256, 1024


def expert_counts(topk_ids: torch.Tensor, num_experts: int) -> torch.Tensor:
    """[n, K] int64 logical ids (-1 none) -> [E] int64 how often each is chosen. Unlike ``bincount``, no host sync."""
    if has_kernels(topk_ids.device) and topk_ids.numel() <= MOST_IDS:
        return expert_counts_compiled(topk_ids, num_experts)
    return expert_counts_torch(topk_ids, num_experts)


def expert_counts_compiled(topk_ids: torch.Tensor, num_experts: int) -> torch.Tensor:
    """As ``expert_counts``, by the Triton kernel."""
    from crossdock_eplb_algos._shared.kernels.copy_picks_triton import expert_counts_kernel

    ids = topk_ids.contiguous()
    counts = torch.empty(num_experts, dtype=torch.int64, device=ids.device)
    bins = 1 << num_experts.bit_length()
    expert_counts_kernel[(1,)](ids, counts, ids.numel(), num_experts, block=_COUNT_BLOCK, bins=bins, num_warps=4)
    return counts


def copy_picks(topk_ids: torch.Tensor, own_counts: torch.Tensor, ends: torch.Tensor, table: CopyTable) -> torch.Tensor:
    """[n, K] int64 logical ids (-1 none), [E] their counts and [M, R] ends of this rank -> [n, K] int64 physical ids."""
    if has_kernels(topk_ids.device) and topk_ids.numel() <= MOST_IDS:
        return copy_picks_compiled(topk_ids, ends, table)
    return copy_picks_torch(topk_ids, own_counts, ends, table)


def copy_picks_compiled(topk_ids: torch.Tensor, ends: torch.Tensor, table: CopyTable) -> torch.Tensor:
    """As ``copy_picks``, by the Triton kernel."""
    from crossdock_eplb_algos._shared.kernels.copy_picks_triton import copy_picks_kernel

    ids = topk_ids.contiguous()
    picks = torch.empty_like(ids)
    if ids.numel():
        copy_picks_kernel[(-(-ids.numel() // _BLOCK),)](
            ids,
            ends,
            table.row_of_expert,
            table.first_slot,
            table.slots,
            picks,
            ids.numel(),
            table.num_rows,
            table.num_ranks,
            block=_BLOCK,
            others_block=_OTHERS_BLOCK,
            ranks_block=block_of(table.num_ranks),
            num_warps=4,
        )
    return picks
