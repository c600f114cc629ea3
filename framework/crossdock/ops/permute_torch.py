"""The permutation by local expert in torch operators: the readable truth for kernels."""

from __future__ import annotations

import torch

from crossdock.ops.host_lists import int_list


def sort_by_expert_torch(
    rows: torch.Tensor, local_ids: torch.Tensor, weights: torch.Tensor, num_local_experts: int, alignment: int
) -> tuple[torch.Tensor, list[int], torch.Tensor, torch.Tensor]:
    """See ``crossdock.ops.permute.sort_by_expert``; returns rows, counts, weights, positions."""
    top_k = local_ids.shape[1]
    ids = local_ids.reshape(-1)
    # 1. Pairs (row, k) that stay, by expert, in input order inside an expert.
    pairs = (ids >= 0).nonzero().flatten()
    pairs = pairs[torch.argsort(ids[pairs], stable=True)]
    live_counts = torch.bincount(ids[pairs], minlength=num_local_experts)
    # 2. Segments filled up to the alignment.
    counts = (live_counts + alignment - 1) // alignment * alignment
    shift = (counts - live_counts).cumsum(0) - (counts - live_counts)
    place = torch.arange(pairs.numel(), device=ids.device) + shift[ids[pairs]]
    # 3. Copies.
    host_counts = int_list(counts)
    total = sum(host_counts)
    if total == pairs.numel():
        sorted_rows, sorted_weights = rows[pairs // top_k], weights.reshape(-1)[pairs]
    else:
        sorted_rows = rows.new_zeros((total, rows.shape[1]))
        sorted_weights = weights.new_zeros(total)
        sorted_rows[place] = rows[pairs // top_k]
        sorted_weights[place] = weights.reshape(-1)[pairs]
    positions = torch.full_like(ids, -1)
    positions[pairs] = place
    return sorted_rows, host_counts, sorted_weights, positions.view(local_ids.shape)


def weighted_sum_torch(flat_out: torch.Tensor, positions: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
    """See ``crossdock.ops.permute.weighted_sum``."""
    total = flat_out.new_zeros((positions.shape[0], flat_out.shape[1]), dtype=torch.float32)
    for k in range(positions.shape[1]):
        live = (positions[:, k] >= 0).nonzero().flatten()
        part = flat_out[positions[live, k]].to(torch.float32)
        if weights is not None:
            part = part * weights[live, k, None]
        total.index_add_(0, live, part)
    return total.to(flat_out.dtype)
