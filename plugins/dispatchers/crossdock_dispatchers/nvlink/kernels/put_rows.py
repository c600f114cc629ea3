# Launch options (num_warps, ...) are no parameters of the kernel.
# pyright: reportCallIssue=false
"""``put_rows``: token rows to the ranks that hold their experts, one launch, no layout pass and no exchange of counts."""

from __future__ import annotations

import attrs
import torch
from crossdock.errors import DispatchMisuse
from crossdock.ops.fp8_block_torch import BLOCK

from crossdock_dispatchers.nvlink.workspace import SlotBuffers

MOST_TILE_ROWS = 8
TILE_ELEMENTS = 16384
WARPS = 16
"""512 threads with a tile of 8 x 2048 bf16: 64 bytes each on the way, so that 24 multiprocessors can fill the link."""


@attrs.frozen(kw_only=True)
class CopyTile:
    """Rows and columns that a program moves at once."""

    rows: int
    columns: int


def copy_tile(bucket: int, programs: int, hidden_size: int) -> CopyTile:
    """Whole rows while every program has one at most, else several rows of 2048 elements."""
    rows = 1
    while rows < MOST_TILE_ROWS and 2 * rows * programs <= bucket:
        rows *= 2
    whole = 1 << (hidden_size - 1).bit_length()
    return CopyTile(rows=rows, columns=min(whole, TILE_ELEMENTS // rows))


def put_rows(
    hidden: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    slot: SlotBuffers,
    *,
    rank: int,
    bucket: int,
    slots_per_rank: int,
    programs: int,
    synchronise: bool,
    wait: bool,
) -> None:
    """Puts this rank's rows; with ``wait`` also returns (in stream order) only after every peer's rows have landed here.

    hidden [n, H] contiguous bf16/fp16/fp32, topk_ids [n, K] int64 physical (-1 none), topk_weights [n, K] float32, n <= bucket <= capacity,
    ``bucket`` equal on all ranks. ``synchronise`` False leaves the flags alone (tests in one process).
    Errors: ``DispatchMisuse`` for shapes that do not fit.
    """
    # Imported at the first call: CPU installations have no triton.
    import triton
    import triton.language as tl

    from crossdock_dispatchers.nvlink.kernels.put_rows_triton import put_rows_kernel

    num_rows, hidden_size = hidden.shape
    world, top_k = slot.put_flags.local.shape[0], topk_ids.shape[1]
    if num_rows > bucket or world * bucket > slot.rows.local.shape[0]:
        raise DispatchMisuse(
            f"nvlink dispatch of {num_rows} rows does not fit bucket {bucket} of capacity {slot.rows.local.shape[0] // world}"
        )
    if programs > slot.put_flags.local.shape[1]:
        raise DispatchMisuse(f"nvlink dispatch with {programs} programs, flags for {slot.put_flags.local.shape[1]}")
    quantised = slot.scales is not None
    if quantised and hidden_size % BLOCK:
        raise DispatchMisuse(f"fp8 wire needs hidden size % {BLOCK} == 0, got {hidden_size}")
    tile = copy_tile(bucket, programs, hidden_size)
    scales = slot.scales if slot.scales is not None else slot.weights
    wire_types = {
        torch.float8_e4m3fn: tl.float8e4nv,
        torch.bfloat16: tl.bfloat16,
        torch.float16: tl.float16,
        torch.float32: tl.float32,
    }
    put_rows_kernel[(programs,)](
        hidden,
        topk_ids,
        topk_weights,
        slot.rows.addresses,
        scales.addresses,
        slot.ids.addresses,
        slot.weights.addresses,
        slot.put_flags.addresses,
        slot.put_flags.local,
        num_rows,
        bucket,
        rank,
        slots_per_rank,
        hidden_size,
        top_k,
        slot.put_flags.local.shape[1],
        wire_type=wire_types[slot.rows.local.dtype],
        world=world,
        top_k_block=triton.next_power_of_2(top_k),
        rows_block=tile.rows,
        block=max(tile.columns, BLOCK) if quantised else tile.columns,
        quantise=quantised,
        signal=synchronise,
        wait=synchronise and wait,
        num_warps=WARPS if tile.rows * tile.columns >= 4096 else 4,
    )


def wait_rows(slot: SlotBuffers, *, rank: int, programs: int) -> None:
    """Second half of a ``put_rows`` that did not wait."""
    from crossdock_dispatchers.nvlink.kernels.put_rows_triton import wait_rows_kernel

    flags = slot.put_flags.local
    wait_rows_kernel[(programs,)](flags, rank, flags.shape[1], world=flags.shape[0], num_warps=1)
