"""Rows by token -> rows by local expert, and back: the permutation between ``token_rows``/``replicated`` and ``flat``."""

from __future__ import annotations

import attrs
import torch

from crossdock.errors import DispatchMisuse
from crossdock.ops.permute_torch import sort_by_expert_torch, weighted_sum_torch
from crossdock.types.dispatch import Received, ReceiveLayout, ScaleForm


@attrs.frozen(kw_only=True, eq=False)
class SortedRows:
    """Rows sorted by local expert. R = rows before, K = top-k, S = local experts, F = sum of counts."""

    rows: torch.Tensor
    """[F, H], the dtype of the input; rows that only pad a segment are zero."""
    counts: list[int]
    """Rows of each local expert [S], padding to the alignment included."""
    weights: torch.Tensor
    """[F] float32, 0 for rows that only pad."""
    positions: torch.Tensor
    """[R, K] int64: where the row for this expert lies in ``rows``, -1 where the id was -1."""


def sort_by_expert(
    rows: torch.Tensor, local_ids: torch.Tensor, weights: torch.Tensor, num_local_experts: int, alignment: int = 1
) -> SortedRows:
    """Copies each row once per local expert that it goes to.

    Args:
        rows: [R, H], any dtype; may be strided; not changed.
        local_ids: [R, K] int64 local expert ids, -1 = not on this rank.
        weights: [R, K] float32.
        num_local_experts: S.
        alignment: each expert's segment is filled up to a multiple of this; empty segments stay empty.

    Raises:
        DispatchMisuse: shapes do not belong together.

    Rows of one expert keep the order of the input, so the result is deterministic.
    """
    if rows.dim() != 2 or local_ids.shape != weights.shape or local_ids.shape[0] != rows.shape[0]:
        raise DispatchMisuse(
            f"permute: rows {list(rows.shape)}, ids {list(local_ids.shape)} and weights {list(weights.shape)} must be "
            "[R, H], [R, K] and [R, K]"
        )
    sorted_rows, counts, sorted_weights, positions = sort_by_expert_torch(
        rows, local_ids, weights, num_local_experts, alignment
    )
    return SortedRows(rows=sorted_rows, counts=counts, weights=sorted_weights, positions=positions)


def weighted_sum(flat_out: torch.Tensor, positions: torch.Tensor, weights: torch.Tensor | None = None) -> torch.Tensor:
    """The way back: [F, H] outputs -> [R, H], the sum over k of the row's outputs, float32 inside, in the order of k.

    Args:
        flat_out: [F, H] float32 or bfloat16.
        positions: [R, K] as ``SortedRows.positions``; entries of -1 add nothing.
        weights: [R, K] float32 applied here; None when ``flat_out`` has its weights already.

    Returns:
        [R, H] in the dtype of ``flat_out``; rows without an expert are exactly zero.
    """
    return weighted_sum_torch(flat_out, positions, weights)


def rows_of_places(received: Received) -> Received:
    """``expert_major`` rows as ``token_rows``: every place is a row with one choice, its expert, or none beyond the expert's count.

    Raises:
        DispatchMisuse: the counts are missing, or scales are packed.
    """
    if received.counts is None:
        raise DispatchMisuse("permute: expert_major rows need counts")
    scales = received.scales
    if scales is not None:
        if received.scale_form is ScaleForm.UE8M0_PACKED:
            raise DispatchMisuse("permute: packed scales of expert_major rows; take dispatcher.wire = 'bf16'")
        # Row by row, whatever their strides were.
        scales = scales.reshape(-1, scales.shape[-1]).contiguous()
    num_experts, capacity, hidden_size = received.rows.shape
    counts = torch.as_tensor(received.counts, device=received.rows.device)
    place = torch.arange(capacity, device=received.rows.device)
    expert = torch.arange(num_experts, device=received.rows.device)[:, None]
    ids = torch.where(place < counts[:, None], expert, -1).view(-1, 1)
    return attrs.evolve(
        received,
        layout=ReceiveLayout.TOKEN_ROWS,
        rows=received.rows.view(-1, hidden_size),
        scales=scales,
        scale_form=None if scales is None else ScaleForm.FP32_ROW,
        counts=None,
        local_topk_ids=ids,
        row_weights=torch.ones(ids.shape, device=ids.device),
    )
