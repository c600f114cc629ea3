# mypy: ignore-errors
"""Triton kernel that sends expert outputs home and sums them there, in rank order.

Each program handles the same rows on every rank, in chunks. While it puts chunk c for its peers it sums chunk c - 2, which they sent while
it put c - 1: a tile that goes out and a tile that is summed are loaded together, so that few multiprocessors keep the link and memory busy
at once, and hardly a flag is waited for. The local contribution is read where the experts left it, never copied.
"""

from __future__ import annotations

import triton
import triton.language as tl

from crossdock_dispatchers.nvlink.kernels.put_rows_triton import rows_needed, signal_peers, wait_for_peers


@triton.jit
def load_ids(ids, row, end, top_k, top_k_block: tl.constexpr):
    """ids [rows, K] of the rows [rows, 1] below ``end``, -1 elsewhere."""
    k = tl.arange(0, top_k_block)[None, :]
    return tl.load(ids + row * top_k + k, mask=k < tl.where(row < end, top_k, 0), other=-1)


@triton.jit
def sum_tile(expert_out, my_home, ids, row, column, bucket, my_rank, slots_per_rank, hidden_size, world: tl.constexpr):
    """Sum over ranks, ascending and in float32, of the contribution of each rank that holds one of ``ids`` [rows, K]."""
    total = tl.zeros((row.shape[0], column.shape[1]), dtype=tl.float32)
    for rank in tl.static_range(world):
        wanted = tl.where(rows_needed(ids, rank, slots_per_rank)[:, None] > 0, hidden_size, 0)
        at = (rank * bucket + row) * hidden_size.to(tl.int64) + column  # row offsets pass 2**31
        parts = tl.multiple_of(tl.where(my_rank == rank, expert_out, my_home), 16)
        total += tl.load(parts + at, mask=column < wanted, other=0.0).to(tl.float32)
    return total


@triton.jit
def move_chunk(
    pointers,
    sizes,
    # rows: first and end of those to send and of those to sum, how far a program's tiles lie apart and how many there are
    put_first,
    put_end,
    sum_first,
    sum_end,
    stride,
    tiles,
    # meta
    wire_type: tl.constexpr,
    world: tl.constexpr,
    top_k_block: tl.constexpr,
    rows_block: tl.constexpr,
    block: tl.constexpr,
    put: tl.constexpr,
    reduce: tl.constexpr,
):
    """Sends the tiles of one chunk to each other rank in turn; beside the tiles for the first of them, sums those of another chunk."""
    expert_out, received_ids, topk_ids, my_home, out, peer_homes = pointers
    bucket, my_rank, slots_per_rank, hidden_size, top_k = sizes
    row_elements = hidden_size.to(tl.int64)
    columns = tl.arange(0, block)[None, :]
    lane = tl.arange(0, rows_block)[:, None]
    others: tl.constexpr = world - 1 if put and world > 1 else 1
    for i in tl.static_range(1, others + 1):
        source = (my_rank + i) % world
        home = tl.multiple_of(tl.load(peer_homes + source).to(tl.pointer_type(wire_type)), 16)
        there = received_ids + source * bucket * top_k
        put_ids = load_ids(there, put_first + lane, put_end, top_k, top_k_block)
        own_ids = load_ids(topk_ids, sum_first + lane, sum_end, top_k, top_k_block)
        for tile in range(tiles):
            put_row, sum_row = put_first + tile * stride + lane, sum_first + tile * stride + lane
            # The ids of the next tile come while this one moves: nothing waits for them.
            next_put_ids = load_ids(there, put_row + stride, put_end, top_k, top_k_block)
            next_own_ids = load_ids(topk_ids, sum_row + stride, sum_end, top_k, top_k_block)
            sent = tl.where(tl.max(put_ids, axis=1)[:, None] >= 0, hidden_size, 0)
            stored = tl.where(sum_row < sum_end, hidden_size, 0)
            for start in range(0, hidden_size, block):
                column = start + columns
                # Every load stands before the first store.
                if put:
                    at = (source * bucket + put_row) * row_elements + column
                    y = tl.load(expert_out + at, mask=column < sent, other=0.0)
                if reduce and i == 1:
                    total = sum_tile(
                        expert_out, my_home, own_ids, sum_row, column,
                        bucket, my_rank, slots_per_rank, hidden_size, world,
                    )  # fmt: skip
                if put:
                    at = (my_rank * bucket + put_row) * row_elements + column
                    tl.store(home + at, y.to(wire_type), mask=column < sent)
                if reduce and i == 1:
                    at = sum_row * row_elements + column
                    tl.store(out + at, total.to(out.dtype.element_ty), mask=column < stored)
            put_ids, own_ids = next_put_ids, next_own_ids


@triton.jit(do_not_specialize=["num_rows", "bucket", "my_rank"])
def sum_rows_kernel(
    # pointers: own inputs, receive side of the way home, output
    expert_out,
    received_ids,
    topk_ids,
    my_home,
    out,
    # pointers: address tables, own flags
    peer_homes,
    peer_flags,
    my_flags,
    # sizes
    num_rows,
    bucket,
    my_rank,
    slots_per_rank,
    hidden_size,
    top_k,
    flag_stride,
    # meta
    wire_type: tl.constexpr,
    world: tl.constexpr,
    top_k_block: tl.constexpr,
    rows_block: tl.constexpr,
    block: tl.constexpr,
    chunks: tl.constexpr,
    put: tl.constexpr,
    reduce: tl.constexpr,
    synchronise: tl.constexpr,
):
    """Tiles are dealt to programs in turn; a chunk is the same span of rows on every rank."""
    pointers = (expert_out, received_ids, topk_ids, my_home, out, peer_homes)
    sizes = (bucket, my_rank, slots_per_rank, hidden_size, top_k)
    program = tl.program_id(0)
    stride = tl.num_programs(0) * rows_block
    first = program * rows_block
    tiles = tl.cdiv(tl.cdiv(bucket, stride), chunks)
    flags = my_flags + program * chunks
    if chunks == 1:
        if put:
            move_chunk(pointers, sizes, first, bucket, 0, 0, stride, tiles,
                       wire_type, world, top_k_block, rows_block, block, True, False)  # fmt: skip
        if put and synchronise:
            signal_peers(peer_flags, my_rank, program, flag_stride, world)
        if reduce and synchronise:
            wait_for_peers(flags, my_rank, flag_stride, world)
        if reduce:
            move_chunk(pointers, sizes, 0, 0, first, num_rows, stride, tiles,
                       wire_type, world, top_k_block, rows_block, block, False, True)  # fmt: skip
    else:
        chunk_rows = tiles * stride
        for step in range(chunks + 2):
            # Chunk ``step`` goes out, chunk ``step - 2`` is summed, of the one between the flag is awaited.
            put_end = tl.where(step < chunks, tl.minimum((step + 1) * chunk_rows, bucket), 0)
            sum_end = tl.where(step > 1, tl.minimum((step - 1) * chunk_rows, num_rows), 0)
            sum_first = tl.maximum(step - 2, 0) * chunk_rows + first
            move_chunk(pointers, sizes, step * chunk_rows + first, put_end, sum_first, sum_end, stride, tiles,
                       wire_type, world, top_k_block, rows_block, block, put, reduce)  # fmt: skip
            if reduce and synchronise and step > 0 and step <= chunks:
                wait_for_peers(flags + step - 1, my_rank, flag_stride, world)
            # Told last: one warp's release goes on while the others load the next tiles.
            if put and synchronise and step < chunks:
                signal_peers(peer_flags, my_rank, program * chunks + step, flag_stride, world)
