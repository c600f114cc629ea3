# Launch options (num_warps, ...) are no parameters of the kernel.
# pyright: reportCallIssue=false
"""``block_order``: which (row, choice) pairs each block of a grouped product works on, found on the device."""

from __future__ import annotations

import attrs
import torch
from crossdock.ops.early_launch import early_launch

SEGMENT_PAIRS = 64
"""Pairs of a segment where every program counts all pairs itself, and pairs that are placed together."""
COUNT_PAIRS = 1024
"""Pairs that are counted together."""
UNCOUNTED_PAIRS = 2048
"""Up to here every program counts all pairs itself, which saves a launch."""
MOST_SEGMENTS = 128
"""About one a multiprocessor: each looks at the counts of all."""


@attrs.frozen(kw_only=True, eq=False)
class BlockOrder:
    """Pairs by expert in whole blocks of rows; M blocks at most.

    Where half blocks are told apart, the last block of an expert that is at most half full comes behind all others.
    """

    pairs: torch.Tensor
    """[M * block_rows] int32 flat indices r * K + k, R * K where a block is not full."""
    places: torch.Tensor
    """[R * K] int32: where ``pairs`` names the pair, -1 for choices elsewhere."""
    block_experts: torch.Tensor
    """[M] int32, -1 for unused blocks, which come last."""
    num_blocks: torch.Tensor
    """[2] int32: blocks that are used, and those of them that are no half blocks."""


def max_blocks(num_pairs: int, num_experts: int, block_rows: int) -> int:
    """Most blocks that ``num_pairs`` pairs can need: every used expert wastes less than a block, and a pair uses one expert."""
    return -(-num_pairs // block_rows) + min(num_pairs, num_experts)


def block_order(local_ids: torch.Tensor, num_experts: int, block_rows: int, halves: bool = False) -> BlockOrder:
    """local_ids [R, K] int64 (-1 = none) -> their order in M = ``max_blocks`` blocks; ``halves`` tells half blocks apart."""
    num_pairs = local_ids.numel()
    blocks = max_blocks(num_pairs, num_experts, block_rows)
    pairs, places, block_experts, num_blocks = (
        torch.empty(size, dtype=torch.int32, device=local_ids.device)
        for size in (blocks * block_rows, num_pairs, blocks, 2)
    )
    order = BlockOrder(pairs=pairs, places=places, block_experts=block_experts, num_blocks=num_blocks)
    if blocks == 0:
        num_blocks.zero_()
        return order
    # Imported at the first call: CPU installations have no triton.
    import triton

    from crossdock_models.experts.triton.kernels.block_order_triton import count_pairs_kernel, place_pairs_kernel

    local_ids = local_ids.contiguous()
    experts_block = max(16, triton.next_power_of_2(num_experts))
    scan = min(SEGMENT_PAIRS, max(16, triton.next_power_of_2(num_pairs)))
    count_scan = min(COUNT_PAIRS, max(16, triton.next_power_of_2(num_pairs)))
    is_counted = num_pairs > UNCOUNTED_PAIRS
    segment_pairs = scan
    if is_counted:
        segment_pairs = max(scan, triton.cdiv(triton.cdiv(num_pairs, MOST_SEGMENTS), scan) * scan)
    segments = triton.next_power_of_2(triton.cdiv(num_pairs, segment_pairs))
    counts = torch.empty(segments if is_counted else 0, experts_block, dtype=torch.int32, device=local_ids.device)
    if is_counted:
        count_pairs_kernel[(segments,)](
            local_ids,
            counts,
            num_pairs,
            segment_pairs,
            experts_block=experts_block,
            scan=count_scan,
            num_warps=4,
            **early_launch(local_ids),
        )
    place_pairs_kernel[(max(segments, num_experts),)](
        local_ids,
        counts,
        pairs,
        places,
        block_experts,
        num_blocks,
        num_pairs,
        segment_pairs,
        num_experts,
        blocks,
        block_rows=block_rows,
        experts_block=experts_block,
        segments=segments,
        scan=scan,
        count_scan=count_scan,
        is_counted=is_counted,
        halves=halves,
        num_warps=8,
        **early_launch(local_ids),
    )
    return order
