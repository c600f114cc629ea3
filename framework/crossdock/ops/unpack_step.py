"""One packed upload of a captured step -> the static tensors that a captured pass reads, and pending ids from the step before."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np
import numpy.typing as npt
import torch

from crossdock.ops.unpack_step_torch import unpack_step_torch

HEADER_INTS = 1
"""The width of the page rows."""
ROW_FIELDS = 6
"""Token id, its source, position, cache slot, tokens that it sees with its own, sequence."""


@attrs.frozen(kw_only=True, eq=False)
class StepTensors:
    """Static tensors of one bucket of b rows; r rows reach the dispatcher."""

    input_ids: torch.Tensor
    """[b] int64."""
    positions: torch.Tensor
    """[b] int64."""
    kv_slots: torch.Tensor
    """[b] int64."""
    seq_lens: torch.Tensor
    """[b] int32 tokens that each row sees, its own included; 0 for a row without a sequence."""
    page_table: torch.Tensor
    """[b, columns] int32 pages of each row's sequence; entries beyond them are left as they are."""
    logit_rows: torch.Tensor
    """[l <= b] int64 rows with logits; empty where they are the same in every step."""
    padded_rows: torch.Tensor
    """[r, 1] bool."""


def packed_ints(bucket: int, dispatch_rows: int, logit_rows: int, page_entries: int) -> int:
    """Integers of a packed step with ``page_entries`` in its page table."""
    return HEADER_INTS + ROW_FIELDS * bucket + dispatch_rows + logit_rows + page_entries


def pack_step(
    rows: npt.NDArray[np.int32],
    page_table: npt.NDArray[np.int32],
    padded_rows: npt.NDArray[np.bool_],
    logit_rows: npt.NDArray[np.int32],
    bucket: int,
    out: npt.NDArray[np.int32],
) -> int:
    """Writes a step of n <= ``bucket`` live rows to ``out`` and returns how many integers it took.

    Args:
        rows: [6, n]: token ids, sources, positions, cache slots, tokens that the row sees, its row of ``page_table``. A negative id stands for
            ``sampled[source]``.
        page_table: [B, width].
        padded_rows: [r], which of the dispatcher's rows carry no token.
        logit_rows: [l].
        bucket: rows of the captured pass.
        out: at least ``packed_ints`` long.
    """
    live = rows.shape[1]
    out[0] = page_table.shape[1]
    fields = out[HEADER_INTS : HEADER_INTS + ROW_FIELDS * bucket].reshape(ROW_FIELDS, bucket)
    fields[:, :live] = rows
    fields[:, live:] = 0
    at = HEADER_INTS + ROW_FIELDS * bucket
    for part in (padded_rows, logit_rows, page_table.ravel()):
        out[at : at + part.size] = part
        at += part.size
    return at


def unpack_step(packed: torch.Tensor, sampled: torch.Tensor, to: StepTensors) -> None:
    """Fills ``to`` from ``packed`` [>= packed_ints] int32 and ``sampled`` [most] int64; nothing is read by the host."""
    if not packed.is_cuda:
        unpack_step_torch(packed, sampled, to)
        return
    unpack_step_fused(packed, sampled, to)


def unpack_step_fused(packed: torch.Tensor, sampled: torch.Tensor, to: StepTensors) -> None:
    """The kernel's form of ``unpack_step``."""
    # Imported at the first call: CPU installations have no triton.
    from crossdock.ops.unpack_step_triton import unpack_step_kernel

    bucket, columns = to.page_table.shape
    dispatch_rows = to.padded_rows.shape[0]
    launch: Any = unpack_step_kernel
    launch[(max(bucket, dispatch_rows),)](
        packed,
        sampled,
        to.input_ids,
        to.positions,
        to.kv_slots,
        to.seq_lens,
        to.page_table,
        to.padded_rows.view(torch.uint8),
        to.logit_rows,
        bucket,
        dispatch_rows,
        to.logit_rows.shape[0],
        columns,
        page_block=128,
        num_warps=1,
    )
