# Launch options (num_warps, ...) are no parameters of the kernel.
# pyright: reportCallIssue=false
"""``block_order``: which (row, choice) pairs each block of a grouped product works on, found on the device."""

from __future__ import annotations

import attrs
import torch
from crossdock.ops.early_launch import early_launch

SCAN_PAIRS = 1024
"""Pairs that a program looks at together."""
ONE_SEGMENT = 2048
"""Up to here every program counts all pairs itself, which saves a launch."""
MAX_SEGMENTS = 32
"""Programs that share an expert; each looks at a segment of the pairs."""
EXPERTS_EACH = 8


@attrs.frozen(kw_only=True, eq=False)
class BlockOrder:
    """Pairs by expert in whole blocks of rows; M blocks at most."""

    pairs: torch.Tensor
    """[M * block_rows] int32 flat indices r * K + k, R * K where a block is not full."""
    block_experts: torch.Tensor
    """[M] int32, -1 for unused blocks, which come last."""
    num_blocks: torch.Tensor
    """[1] int32: blocks that are used."""


def max_blocks(num_pairs: int, num_experts: int, block_rows: int) -> int:
    """Most blocks that ``num_pairs`` pairs can need: every used expert wastes less than a block, and a pair uses one expert."""
    return -(-num_pairs // block_rows) + min(num_pairs, num_experts)


def block_order(local_ids: torch.Tensor, num_experts: int, block_rows: int) -> BlockOrder:
    """local_ids [R, K] int64 (-1 = none) -> their order in M = ``max_blocks`` blocks."""
    num_pairs = local_ids.numel()
    blocks = max_blocks(num_pairs, num_experts, block_rows)
    pairs, block_experts, num_blocks = (
        torch.empty(size, dtype=torch.int32, device=local_ids.device) for size in (blocks * block_rows, blocks, 1)
    )
    order = BlockOrder(pairs=pairs, block_experts=block_experts, num_blocks=num_blocks)
    if blocks == 0:
        num_blocks.zero_()
        return order
    # Imported at the first call: CPU installations have no triton.
    import triton

    from crossdock_models.experts.triton.kernels.block_order_triton import count_pairs_kernel, place_pairs_kernel

    local_ids = local_ids.contiguous()
    scan = min(SCAN_PAIRS, max(16, triton.next_power_of_2(num_pairs)))
    segments = 1
    if num_pairs > ONE_SEGMENT:
        segments = min(MAX_SEGMENTS, triton.next_power_of_2(triton.cdiv(num_pairs, scan)))
    segment_pairs = triton.cdiv(triton.cdiv(num_pairs, segments), scan) * scan
    experts_block = triton.next_power_of_2(num_experts + 1)
    counts = torch.empty(segments, experts_block, dtype=torch.int32, device=local_ids.device)
    if segments > 1:  # one segment is counted by who places it
        count_pairs_kernel[(segments,)](
            local_ids,
            counts,
            num_pairs,
            segment_pairs,
            experts_block=experts_block,
            scan=scan,
            num_warps=4,
            **early_launch(local_ids),
        )
    # Where the device is full anyway a program looks for several experts: what it read is still near.
    experts_each = 1 if segments == 1 else EXPERTS_EACH
    place_pairs_kernel[(triton.cdiv(num_experts, experts_each), segments)](
        local_ids,
        counts,
        pairs,
        block_experts,
        num_blocks,
        num_pairs,
        segment_pairs,
        num_experts,
        blocks,
        block_rows=block_rows,
        experts_block=experts_block,
        segments=segments,
        experts_each=experts_each,
        scan=scan,
        num_warps=4,
        **early_launch(local_ids),
    )
    return order
