# Launch options (num_warps, ...) are no parameters of the kernel.
# pyright: reportCallIssue=false
"""``least_cost``: the split of a layer's batch that weighs the largest load against the way, without a look at its data on the host."""

from __future__ import annotations

import torch

from crossdock_eplb_algos._shared.copy_table import CopyTable, loads_without_choice, tokens_of_rows
from crossdock_eplb_algos._shared.kernels.even_shares import MOST_CELLS, block_of, has_kernels
from crossdock_eplb_algos.expert_location.locality.kernels.least_cost_torch import (
    MIXTURES,
    WayPrices,
    least_cost_torch,
)


def least_cost(
    even: torch.Tensor, counts: torch.Tensor, tokens: torch.Tensor, table: CopyTable, prices: WayPrices
) -> torch.Tensor:
    """[M, R] float32 evenest split, [R, E] int64 tokens of each rank and [E] their sums -> [M, R] float32 tokens of each copy."""
    if has_kernels(even.device) and block_of(table.num_rows) * block_of(table.num_ranks) <= MOST_CELLS:
        return least_cost_compiled(even, counts, tokens, table, prices)
    held = tokens_of_rows(table, counts).t().to(torch.float32)
    base = loads_without_choice(table, tokens).to(torch.float32)
    return least_cost_torch(even, held, table.slots >= 0, base, prices)


def least_cost_compiled(
    even: torch.Tensor, counts: torch.Tensor, tokens: torch.Tensor, table: CopyTable, prices: WayPrices
) -> torch.Tensor:
    """As ``least_cost``, by the Triton kernels."""
    from crossdock_eplb_algos.expert_location.locality.kernels.least_cost_triton import (
        least_cost_kernel,
        nearest_kernel,
    )

    num_rows, num_ranks = table.slots.shape
    shares = torch.empty_like(even)
    if not num_rows:
        return shares
    near, mixtures_block = torch.empty_like(even), block_of(MIXTURES)
    ways = torch.empty((num_rows, mixtures_block), dtype=torch.float32, device=even.device)
    counts = counts.contiguous()
    nearest_kernel[(num_rows,)](
        even,
        table.slots,
        counts,
        table.experts,
        near,
        ways,
        counts.shape[1],
        num_ranks,
        prices.num_nodes,
        prices.link_cost,
        prices.node_cost,
        mixtures=MIXTURES,
        mixtures_block=mixtures_block,
        nodes_block=block_of(prices.num_nodes),
        node_ranks_block=block_of(num_ranks // prices.num_nodes),
        num_warps=1,
    )
    num_slots = table.only_experts.shape[1]
    cells = block_of(num_rows) * block_of(num_ranks)
    least_cost_kernel[(1,)](
        even,
        near,
        ways,
        tokens,
        table.only_experts,
        shares,
        counts.shape[1],
        num_rows,
        num_ranks,
        num_slots,
        mixtures=MIXTURES,
        mixtures_block=mixtures_block,
        rows_block=block_of(num_rows),
        ranks_block=block_of(num_ranks),
        slots_block=block_of(num_slots),
        num_warps=4 if cells <= 2048 else 16,
    )
    return shares
