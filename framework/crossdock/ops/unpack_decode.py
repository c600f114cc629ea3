"""One packed upload of a decode step -> the static tensors that a captured pass reads, and pending ids from the step before."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np
import numpy.typing as npt
import torch

from crossdock.ops.unpack_decode_torch import unpack_decode_torch

HEADER_INTS = 1
"""The width of the page rows."""
ROW_FIELDS = 5
"""Token id, its source, position, cache slot, sequence length."""


@attrs.frozen(kw_only=True, eq=False)
class DecodeTensors:
    """Static tensors of one bucket of b rows; r rows reach the dispatcher."""

    input_ids: torch.Tensor
    """[b] int64."""
    positions: torch.Tensor
    """[b] int64."""
    kv_slots: torch.Tensor
    """[b] int64."""
    seq_lens: torch.Tensor
    """[b] int32, 0 for a row without a sequence."""
    page_table: torch.Tensor
    """[b, columns] int32; entries beyond a sequence's pages are left as they are."""
    padded_rows: torch.Tensor
    """[r, 1] bool."""


def packed_ints(bucket: int, dispatch_rows: int, columns: int) -> int:
    """Most integers of a packed step."""
    return HEADER_INTS + ROW_FIELDS * bucket + dispatch_rows + bucket * columns


def pack_decode(
    rows: npt.NDArray[np.int32],
    page_table: npt.NDArray[np.int32],
    padded_rows: npt.NDArray[np.bool_],
    bucket: int,
    out: npt.NDArray[np.int32],
) -> int:
    """Writes a step of n <= ``bucket`` live rows to ``out`` and returns how many integers it took.

    Args:
        rows: [5, n]: token ids, sources, positions, cache slots, sequence lengths. A negative id stands for ``sampled[source]``.
        page_table: [n, width].
        padded_rows: [r], which of the dispatcher's rows carry no token.
        bucket: rows of the captured pass.
        out: at least ``packed_ints`` long.
    """
    live, width = page_table.shape
    out[0] = width
    fields = out[HEADER_INTS : HEADER_INTS + ROW_FIELDS * bucket].reshape(ROW_FIELDS, bucket)
    fields[:, :live] = rows
    fields[:, live:] = 0
    at = HEADER_INTS + ROW_FIELDS * bucket
    out[at : at + len(padded_rows)] = padded_rows
    at += len(padded_rows)
    out[at : at + page_table.size] = page_table.ravel()
    return at + page_table.size


def unpack_decode(packed: torch.Tensor, sampled: torch.Tensor, to: DecodeTensors) -> None:
    """Fills ``to`` from ``packed`` [>= packed_ints] int32 and ``sampled`` [most] int64; nothing is read by the host."""
    if not packed.is_cuda:
        unpack_decode_torch(packed, sampled, to)
        return
    unpack_decode_fused(packed, sampled, to)


def unpack_decode_fused(packed: torch.Tensor, sampled: torch.Tensor, to: DecodeTensors) -> None:
    """The kernel's form of ``unpack_decode``."""
    # Imported at the first call: CPU installations have no triton.
    from crossdock.ops.unpack_decode_triton import unpack_decode_kernel

    bucket, columns = to.page_table.shape
    dispatch_rows = to.padded_rows.shape[0]
    launch: Any = unpack_decode_kernel
    launch[(max(bucket, dispatch_rows),)](
        packed,
        sampled,
        to.input_ids,
        to.positions,
        to.kv_slots,
        to.seq_lens,
        to.page_table,
        to.padded_rows.view(torch.uint8),
        bucket,
        dispatch_rows,
        columns,
        page_block=128,
        num_warps=1,
    )
