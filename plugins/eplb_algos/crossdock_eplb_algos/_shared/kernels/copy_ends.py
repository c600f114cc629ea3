# Launch options (num_warps, ...) are no parameters of the kernel.
# pyright: reportCallIssue=false
"""``copy_ends``: how many tokens of this rank go to the copies of each expert, as running sums over ranks."""

from __future__ import annotations

import torch

from crossdock_eplb_algos._shared.copy_table import CopyTable, tokens_of_rows
from crossdock_eplb_algos._shared.kernels.copy_ends_torch import PARTS, own_ends_torch, whole_ends_torch
from crossdock_eplb_algos._shared.kernels.even_shares import block_of, has_kernels


def whole_ends(shares: torch.Tensor, tokens: torch.Tensor, table: CopyTable) -> torch.Tensor:
    """[M, R] float tokens of copies and [E] int64 tokens of experts -> [M, R] int64 whole tokens of ranks 0 to r together."""
    if has_kernels(shares.device):
        return whole_ends_compiled(shares, tokens, table)
    return whole_ends_torch(shares, tokens_of_rows(table, tokens))


def own_ends(ends: torch.Tensor, counts: torch.Tensor, table: CopyTable, own_rank: int, num_nodes: int) -> torch.Tensor:
    """[M, R] ends over all ranks and [R, E] int64 tokens of each rank -> [M, R] int64 ends of what ``own_rank`` sends."""
    if has_kernels(ends.device):
        return own_ends_compiled(ends, counts, table, own_rank, num_nodes)
    return own_ends_torch(ends, tokens_of_rows(table, counts), own_rank, num_nodes)


def whole_ends_compiled(shares: torch.Tensor, tokens: torch.Tensor, table: CopyTable) -> torch.Tensor:
    """As ``whole_ends``, by the Triton kernel."""
    from crossdock_eplb_algos._shared.kernels.copy_ends_triton import whole_ends_kernel

    num_rows, num_ranks = table.slots.shape
    ends = torch.empty((num_rows, num_ranks), dtype=torch.int64, device=tokens.device)
    if num_rows:
        whole_ends_kernel[(num_rows,)](
            shares.to(torch.float32).contiguous(),
            tokens,
            table.experts,
            ends,
            tokens.shape[0],
            num_ranks,
            parts=PARTS,
            ranks_block=block_of(num_ranks),
            num_warps=1,
        )
    return ends


def own_ends_compiled(
    ends: torch.Tensor, counts: torch.Tensor, table: CopyTable, own_rank: int, num_nodes: int
) -> torch.Tensor:
    """As ``own_ends``, by the Triton kernel."""
    from crossdock_eplb_algos._shared.kernels.copy_ends_triton import own_ends_kernel

    num_rows, num_ranks = table.slots.shape
    own = torch.empty_like(ends)
    if num_rows:
        own_ends_kernel[(num_rows,)](
            ends,
            counts.contiguous(),
            table.experts,
            own,
            counts.shape[1],
            num_ranks,
            own_rank,
            num_nodes,
            nodes_block=block_of(num_nodes),
            node_ranks_block=block_of(num_ranks // num_nodes),
            num_warps=1,
        )
    return own
