"""Triton kernel that orders (row, choice) pairs by expert, each expert's run padded to whole blocks of rows.

One program an expert: it counts every expert's pairs to find where its own run starts, then writes the run in input order. No atomics:
the order, and with it every later sum, is the same in each run.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_pairs", "max_blocks"])
def block_order_kernel(
    # pointers
    local_ids,
    pairs,
    block_experts,
    # sizes
    num_pairs,
    num_experts,
    max_blocks,
    # meta
    block_rows: tl.constexpr,
    experts_block: tl.constexpr,
    scan: tl.constexpr,
):
    expert = tl.program_id(0)
    lanes = tl.arange(0, scan)
    experts = tl.arange(0, experts_block)
    # Count: pairs of every expert; ids that stay elsewhere (-1) fall into the last bin.
    counts = tl.zeros((experts_block,), dtype=tl.int32)
    for start in range(0, num_pairs, scan):
        ids = tl.load(local_ids + start + lanes, mask=start + lanes < num_pairs, other=-1).to(tl.int32)
        counts += tl.histogram(tl.where(ids < 0, experts_block - 1, ids), experts_block)
    blocks = tl.where(experts < num_experts, (counts + block_rows - 1) // block_rows, 0)
    first_block = tl.sum(tl.where(experts < expert, blocks, 0), axis=0)
    own_blocks = tl.sum(tl.where(experts == expert, blocks, 0), axis=0)
    # Run: own pairs in input order.
    written = first_block * block_rows
    for start in range(0, num_pairs, scan):
        ids = tl.load(local_ids + start + lanes, mask=start + lanes < num_pairs, other=-1).to(tl.int32)
        mine = (ids == expert).to(tl.int32)
        place = written + tl.cumsum(mine, axis=0) - 1
        tl.store(pairs + place, start + lanes, mask=ids == expert)
        written += tl.sum(mine, axis=0)
    # Fill: the rest of the last block, the expert of each own block, and (last program) the unused blocks.
    fill = tl.arange(0, block_rows)
    end = (first_block + own_blocks) * block_rows
    tl.store(pairs + written + fill, num_pairs + fill * 0, mask=written + fill < end)
    for block in range(first_block, first_block + own_blocks):
        tl.store(block_experts + block, expert)
    if expert == num_experts - 1:
        for block in range(first_block + own_blocks, max_blocks):
            tl.store(block_experts + block, -1)
            tl.store(pairs + block * block_rows + fill, num_pairs + fill * 0)
