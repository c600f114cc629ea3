"""Readable truth of ``block_order``."""

from __future__ import annotations

import torch


def block_order_torch(
    local_ids: torch.Tensor, num_experts: int, block_rows: int, max_blocks: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``crossdock_models.experts.triton.kernels.block_order.block_order``."""
    ids = local_ids.reshape(-1)
    pairs = torch.full((max_blocks * block_rows,), ids.numel(), dtype=torch.int32, device=ids.device)
    experts = torch.full((max_blocks,), -1, dtype=torch.int32, device=ids.device)
    block = 0
    for expert in range(num_experts):
        mine = (ids == expert).nonzero().flatten().to(torch.int32)
        blocks = -(-mine.numel() // block_rows)
        pairs[block * block_rows : block * block_rows + mine.numel()] = mine
        experts[block : block + blocks] = expert
        block += blocks
    return pairs, experts
