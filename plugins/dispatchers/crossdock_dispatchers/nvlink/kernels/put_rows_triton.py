# mypy: ignore-errors
"""Triton kernel that puts token rows straight into the receive buffers of the ranks that hold their experts.

Row t of source rank s always lands at row ``s * bucket + t`` of a destination, so neither a layout pass nor an exchange of
counts stands before the transfer. Rows that a destination does not need are not sent; their ids there say -1.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def signal_peers(peer_flags, my_rank, index, stride, world: tl.constexpr):
    """Tells program ``index`` of every other rank that this program's stores are done.

    A flag counts what was told and not yet awaited, so that replays of a graph need no epoch and nobody waits for an answer from afar.
    """
    # All threads' stores happen before the one thread's release (cumulativity over the barrier).
    tl.debug_barrier()
    for i in tl.static_range(1, world):
        flag = tl.load(peer_flags + (my_rank + i) % world).to(tl.pointer_type(tl.int32)) + my_rank * stride + index
        tl.atomic_add(flag, 1, sem="release", scope="sys")


@triton.jit
def wait_for_peers(flags, my_rank, stride, world: tl.constexpr):
    """Waits until every other rank has told the flag at ``flags`` (one a rank, ``stride`` apart), and takes one off."""
    for i in tl.static_range(1, world):
        flag = flags + (my_rank + i) % world * stride
        while tl.atomic_add(flag, 0, sem="acquire", scope="sys") < 1:
            pass
        tl.atomic_add(flag, -1, sem="relaxed", scope="sys")
    tl.debug_barrier()


@triton.jit
def rows_needed(ids, rank, slots_per_rank):
    """ids [rows, K] physical -> [rows] int32, 1 where ``rank`` holds one of the row's experts."""
    local = ids - rank * slots_per_rank
    here = (ids >= 0) & (local >= 0) & (local < slots_per_rank)
    return tl.max(here.to(tl.int32), axis=1)


@triton.jit(do_not_specialize=["num_rows", "bucket", "my_rank"])
def put_rows_kernel(
    # pointers: own inputs
    hidden,
    topk_ids,
    topk_weights,
    # pointers: int64 tables of every rank's buffer addresses, and own flags
    peer_rows,
    peer_scales,
    peer_ids,
    peer_weights,
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
    quantise: tl.constexpr,
    signal: tl.constexpr,
    wait: tl.constexpr,
):
    """A program puts tiles of ``rows_block`` rows. Tiles are large so that few multiprocessors keep enough bytes on the way."""
    program = tl.program_id(0)
    k = tl.arange(0, top_k_block)[None, :]
    columns = tl.arange(0, block)[None, :]
    row_elements = hidden_size.to(tl.int64)  # row offsets pass 2**31
    groups: tl.constexpr = block // 128
    for first in range(program * rows_block, bucket, tl.num_programs(0) * rows_block):
        row = (first + tl.arange(0, rows_block))[:, None]
        landing = my_rank * bucket + row
        # Ids and weights go to every rank, -1 where it holds none of the experts.
        choices = tl.where(row < num_rows, top_k, 0)
        ids = tl.load(topk_ids + row * top_k + k, mask=k < choices, other=-1)
        weights = tl.load(topk_weights + row * top_k + k, mask=k < choices, other=0.0)
        written = tl.where(row < bucket, top_k, 0)
        for i in tl.static_range(world):
            peer = (my_rank + 1 + i) % world
            local = ids - peer * slots_per_rank
            local = tl.where((ids >= 0) & (local >= 0) & (local < slots_per_rank), local, -1)
            ids_there = tl.load(peer_ids + peer).to(tl.pointer_type(tl.int64))
            tl.store(ids_there + landing * top_k + k, local, mask=k < written)
            weights_there = tl.load(peer_weights + peer).to(tl.pointer_type(tl.float32))
            tl.store(weights_there + landing * top_k + k, weights, mask=k < written)
        # The payload is read once and stored to each rank that needs it.
        for start in range(0, hidden_size, block):
            loaded = tl.where(row < num_rows, hidden_size, 0)
            x = tl.load(hidden + row * row_elements + start + columns, mask=start + columns < loaded, other=0.0)
            if quantise:
                blocks = tl.reshape(x.to(tl.float32), (rows_block, groups, 128))
                scale = tl.maximum(tl.max(tl.abs(blocks), axis=2), 1e-10) / 448.0
                payload = tl.reshape((blocks / scale[:, :, None]).to(wire_type), (rows_block, block))
                group = start // 128 + tl.arange(0, groups)[None, :]
            else:
                payload = x.to(wire_type)
            for i in tl.static_range(world):
                peer = (my_rank + 1 + i) % world
                sent = tl.where(rows_needed(ids, peer, slots_per_rank)[:, None] > 0, hidden_size, 0)
                there = tl.multiple_of(tl.load(peer_rows + peer).to(tl.pointer_type(wire_type)), 16)
                tl.store(there + landing * row_elements + start + columns, payload, mask=start + columns < sent)
                if quantise:
                    scales_there = tl.load(peer_scales + peer).to(tl.pointer_type(tl.float32))
                    tl.store(scales_there + landing * (hidden_size // 128) + group, scale, mask=group < sent // 128)
    if signal:
        signal_peers(peer_flags, my_rank, program, flag_stride, world)
    if wait:
        wait_for_peers(my_flags + program, my_rank, flag_stride, world)


@triton.jit(do_not_specialize=["my_rank"])
def wait_rows_kernel(my_flags, my_rank, flag_stride, world: tl.constexpr):
    """Program p waits for program p of every peer's put; launched by ``dispatch_end`` when begin did not wait."""
    wait_for_peers(my_flags + tl.program_id(0), my_rank, flag_stride, world)
