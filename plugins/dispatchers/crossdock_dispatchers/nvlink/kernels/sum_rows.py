# Launch options (num_warps, ...) are no parameters of the kernel.
# pyright: reportCallIssue=false
"""``sum_rows``: expert outputs go home and are summed there in rank order, in one launch or split in put and sum."""

from __future__ import annotations

import torch
from crossdock.errors import DispatchMisuse

from crossdock_dispatchers.nvlink.kernels.put_rows import WARPS, copy_tile
from crossdock_dispatchers.nvlink.workspace import SlotBuffers

MANY_ROWS_WARPS = 32
"""Twice those of a put where a program has many rows: a tile that goes out and the parts of one that is summed are loaded together."""


def sum_rows(
    expert_out: torch.Tensor,
    topk_ids: torch.Tensor,
    slot: SlotBuffers,
    out: torch.Tensor,
    *,
    rank: int,
    bucket: int,
    slots_per_rank: int,
    programs: int,
    chunks: int,
    put: bool = True,
    reduce: bool = True,
    synchronise: bool = True,
) -> None:
    """Sends outputs of foreign rows home (``put``) and sums own rows over all ranks (``reduce``).

    expert_out [world * bucket, H] contiguous, row s * bucket + t = weighted sum of this rank's experts for token t of source s;
    topk_ids [n, K] int64 physical, this rank's own; out [n, H]. Accumulates in float32, ranks ascending. ``chunks`` pieces a program, equal
    on all ranks: with two or more a piece is summed while another goes out.
    Errors: ``DispatchMisuse`` for shapes that do not fit and another dtype than that of ``homes``.
    """
    # Imported at the first call: CPU installations have no triton.
    import triton
    import triton.language as tl

    from crossdock_dispatchers.nvlink.kernels.sum_rows_triton import sum_rows_kernel

    num_rows, top_k = topk_ids.shape
    world, hidden_size = slot.put_flags.local.shape[0], out.shape[1]
    if expert_out.shape != (world * bucket, hidden_size):
        raise DispatchMisuse(
            f"nvlink combine wants expert_out [{world * bucket}, {hidden_size}], got {list(expert_out.shape)}"
        )
    if expert_out.dtype != slot.homes.local.dtype:
        raise DispatchMisuse(f"nvlink combine sends {slot.homes.local.dtype} home, got {expert_out.dtype}; convert it")
    if synchronise and programs * chunks > slot.sum_flags.local.shape[1]:
        raise DispatchMisuse(f"nvlink combine with {programs} x {chunks} flags, has {slot.sum_flags.local.shape[1]}")
    tile = copy_tile(bucket, programs, hidden_size)
    wire_types = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
    sum_rows_kernel[(programs,)](
        expert_out,
        slot.ids.local,
        topk_ids,
        slot.homes.local,
        out,
        slot.homes.addresses,
        slot.sum_flags.addresses,
        slot.sum_flags.local,
        num_rows,
        bucket,
        rank,
        slots_per_rank,
        hidden_size,
        top_k,
        slot.sum_flags.local.shape[1],
        wire_type=wire_types[slot.homes.local.dtype],
        world=world,
        top_k_block=triton.next_power_of_2(top_k),
        rows_block=tile.rows,
        block=tile.columns,
        chunks=chunks,
        put=put,
        reduce=reduce,
        synchronise=synchronise,
        num_warps=MANY_ROWS_WARPS if tile.rows > 1 else WARPS if tile.columns >= 4096 else 4,
    )


def useful_chunks(most: int, bucket: int, programs: int, hidden_size: int) -> int:
    """``most`` pieces, or fewer where a program has fewer tiles: a piece without rows would only be told and awaited."""
    tiles = -(-bucket // (programs * copy_tile(bucket, programs, hidden_size).rows))
    return max(1, min(most, tiles))


def wait_outputs(slot: SlotBuffers, *, rank: int, flags: int) -> None:
    """Waits for the outputs of every peer's ``put`` with ``flags`` programs times chunks."""
    from crossdock_dispatchers.nvlink.kernels.put_rows_triton import wait_rows_kernel

    arrived = slot.sum_flags.local
    wait_rows_kernel[(flags,)](arrived, rank, arrived.shape[1], world=arrived.shape[0], num_warps=1)
