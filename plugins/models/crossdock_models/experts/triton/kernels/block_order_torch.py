"""Readable truth of ``block_order``."""

from __future__ import annotations

import torch


def block_order_torch(
    local_ids: torch.Tensor, num_experts: int, block_rows: int, max_blocks: int, halves: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(pairs, block_experts, places), see ``crossdock_models.experts.triton.kernels.block_order.BlockOrder``."""
    ids = local_ids.reshape(-1)
    whole: list[tuple[int, torch.Tensor]] = []
    half: list[tuple[int, torch.Tensor]] = []
    for expert in range(num_experts):
        mine = (ids == expert).nonzero().flatten().to(torch.int32)
        for block in mine.split(block_rows) if mine.numel() else ():
            (half if halves and block.numel() <= block_rows // 2 else whole).append((expert, block))
    pairs = torch.full((max_blocks * block_rows,), ids.numel(), dtype=torch.int32, device=ids.device)
    experts = torch.full((max_blocks,), -1, dtype=torch.int32, device=ids.device)
    places = torch.full((ids.numel(),), -1, dtype=torch.int32, device=ids.device)
    for number, (expert, block) in enumerate(whole + half):
        experts[number] = expert
        lanes = torch.arange(block.numel(), dtype=torch.int32, device=ids.device) + number * block_rows
        pairs[lanes.long()] = block
        places[block.long()] = lanes
    return pairs, experts, places
