# mypy: ignore-errors
"""Triton kernel that sends expert outputs home and sums them there, in rank order.

Each program handles the same rows on every rank, in chunks: it puts chunk c for its peers while the peers' chunk c - 1 is on
its way, then sums that one. The local contribution is read where the experts left it, never copied.
"""

from __future__ import annotations

import triton
import triton.language as tl

from crossdock_dispatchers.nvlink.kernels.put_rows_triton import rows_needed, signal_and_wait


@triton.jit
def put_outputs(
    expert_out,
    received_ids,
    peer_homes,
    first,
    last,
    stride,
    bucket,
    my_rank,
    hidden_size,
    top_k,
    wire_type: tl.constexpr,
    world: tl.constexpr,
    top_k_block: tl.constexpr,
    rows_block: tl.constexpr,
    block: tl.constexpr,
):
    """Tiles that begin at rows ``first``, ``first + stride``, ... below ``last``, of every other source, to their home rank."""
    k = tl.arange(0, top_k_block)[None, :]
    columns = tl.arange(0, block)[None, :]
    row_elements = hidden_size.to(tl.int64)  # row offsets pass 2**31
    for begin in range(first, last, stride):
        row = (begin + tl.arange(0, rows_block))[:, None]
        for i in tl.static_range(1, world):
            source = (my_rank + i) % world
            there = source * bucket + row
            choices = tl.where(row < bucket, top_k, 0)
            ids = tl.load(received_ids + there * top_k + k, mask=k < choices, other=-1)
            sent = tl.where(tl.max(ids, axis=1)[:, None] >= 0, hidden_size, 0)
            home = tl.multiple_of(tl.load(peer_homes + source).to(tl.pointer_type(wire_type)), 16)
            landing = my_rank * bucket + row
            for start in range(0, hidden_size, block):
                mask = start + columns < sent
                y = tl.load(expert_out + there * row_elements + start + columns, mask=mask, other=0.0)
                tl.store(home + landing * row_elements + start + columns, y.to(wire_type), mask=mask)


@triton.jit
def sum_outputs(
    expert_out,
    topk_ids,
    my_home,
    out,
    first,
    last,
    stride,
    num_rows,
    bucket,
    my_rank,
    slots_per_rank,
    hidden_size,
    top_k,
    world: tl.constexpr,
    top_k_block: tl.constexpr,
    rows_block: tl.constexpr,
    block: tl.constexpr,
):
    """out[t] = sum over ranks, ascending, of the contribution of each rank that holds an expert of token t; the same tiles."""
    k = tl.arange(0, top_k_block)[None, :]
    columns = tl.arange(0, block)[None, :]
    row_elements = hidden_size.to(tl.int64)  # row offsets pass 2**31
    for begin in range(first, last, stride):
        row = (begin + tl.arange(0, rows_block))[:, None]
        choices = tl.where(row < num_rows, top_k, 0)
        ids = tl.load(topk_ids + row * top_k + k, mask=k < choices, other=-1)
        for start in range(0, hidden_size, block):
            total = tl.zeros((rows_block, block), dtype=tl.float32)
            for rank in tl.static_range(world):
                wanted = tl.where(rows_needed(ids, rank, slots_per_rank)[:, None] > 0, hidden_size, 0)
                at = (rank * bucket + row) * row_elements + start + columns
                own_columns = tl.where(my_rank == rank, wanted, 0)
                own = tl.load(expert_out + at, mask=start + columns < own_columns, other=0.0)
                sent = tl.load(my_home + at, mask=start + columns < wanted - own_columns, other=0.0)
                total += own.to(tl.float32) + sent.to(tl.float32)
            stored = tl.where(row < num_rows, hidden_size, 0)
            at_out = row * row_elements + start + columns
            tl.store(out + at_out, total.to(out.dtype.element_ty), mask=start + columns < stored)


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
    program = tl.program_id(0)
    # Tiles are dealt to programs in turn; a chunk is the same span of rows on every rank.
    stride = tl.num_programs(0) * rows_block
    chunk_rows = tl.cdiv(tl.cdiv(bucket, stride), chunks) * stride
    begin = program * rows_block
    for chunk in range(chunks + 1):
        if put and chunk < chunks:
            put_outputs(
                expert_out,
                received_ids,
                peer_homes,
                chunk * chunk_rows + begin,
                tl.minimum((chunk + 1) * chunk_rows, bucket),
                stride,
                bucket,
                my_rank,
                hidden_size,
                top_k,
                wire_type,
                world,
                top_k_block,
                rows_block,
                block,
            )
        if reduce and chunk > 0:
            signal_and_wait(
                peer_flags, my_flags, my_rank, program * chunks + chunk - 1, flag_stride, world, False, synchronise
            )
            sum_outputs(
                expert_out,
                topk_ids,
                my_home,
                out,
                (chunk - 1) * chunk_rows + begin,
                tl.minimum(chunk * chunk_rows, bucket),
                stride,
                num_rows,
                bucket,
                my_rank,
                slots_per_rank,
                hidden_size,
                top_k,
                world,
                top_k_block,
                rows_block,
                block,
            )
        if put and chunk < chunks:
            # Told only now: the stores were on their way while the chunk before was summed, so the release has little to wait for.
            signal_and_wait(
                peer_flags, my_flags, my_rank, program * chunks + chunk, flag_stride, world, synchronise, False
            )
