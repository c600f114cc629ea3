"""Where each (row, choice) pair lies among the experts' rows, found on the device."""

from __future__ import annotations

from typing import Any

import attrs
import torch

COUNT_PAIRS = 256
"""Pairs that a program counts."""
SEGMENT_ROWS = 128
"""Rows of a segment are a multiple of this."""


@attrs.frozen(kw_only=True, eq=False)
class Places:
    """S experts, P places. Which of its places a pair of an expert gets is no fixed order: every row is computed alone, so no result
    depends on it.
    """

    ranks: torch.Tensor
    """[R, K] int32: number of the pair among those of its expert; unwritten where the id is -1."""
    starts: torch.Tensor
    """[S] int32: first place of each expert."""
    counts: torch.Tensor
    """[S] int32: pairs of each expert."""
    num_places: int
    capacity: int
    """Places of every expert; 0 where segments follow one another."""
    groups: torch.Tensor | None
    """[P] int32 expert of a segment's place, -1 behind the last segment; None where every expert has ``capacity`` places."""


def segments_needed(num_pairs: int, num_experts: int) -> int:
    """Most places that segments can need: every used expert wastes less than a segment, and a pair uses one expert."""
    whole = -(-num_pairs // SEGMENT_ROWS) + min(num_pairs, num_experts)
    return whole * SEGMENT_ROWS


def segment_places(local_ids: torch.Tensor, num_experts: int, num_places: int | None) -> Places:
    """local_ids [R, K] int64 (-1 = none) -> segments of ``num_places`` places, a multiple of 128, in the order of experts.

    None asks the device how many there are, and waits for it: the product loads places that nobody needs as slowly as the others.
    """
    counts, ranks = _count(local_ids, num_experts)
    if num_places is None:
        num_places = int(((counts + (SEGMENT_ROWS - 1)) // SEGMENT_ROWS).sum()) * SEGMENT_ROWS
    groups = torch.empty(num_places, dtype=torch.int32, device=local_ids.device)
    starts = torch.empty(num_experts, dtype=torch.int32, device=local_ids.device)
    # Imported at the first call: CPU installations have no triton.
    import triton

    from crossdock_models.experts.deep_gemm.kernels.places_triton import segments_kernel

    launch: Any = segments_kernel
    launch[(max(1, num_places // SEGMENT_ROWS),)](
        counts,
        starts,
        groups,
        num_experts,
        num_places,
        experts_block=triton.next_power_of_2(num_experts),
        segment=SEGMENT_ROWS,
        num_warps=1,
    )
    return Places(ranks=ranks, starts=starts, counts=counts, num_places=num_places, capacity=0, groups=groups)


def fixed_places(local_ids: torch.Tensor, num_experts: int, capacity: int) -> Places:
    """local_ids [R, K] int64 (-1 = none) -> ``capacity`` places for every expert; the caller knows that they suffice."""
    counts, ranks = _count(local_ids, num_experts)
    starts = torch.arange(0, num_experts * capacity, capacity, dtype=torch.int32, device=local_ids.device)
    return Places(
        ranks=ranks, starts=starts, counts=counts, num_places=num_experts * capacity, capacity=capacity, groups=None
    )


def given_places(counts: torch.Tensor, capacity: int) -> Places:
    """Places that rows have already: ``counts`` [S] int32 of ``capacity`` each."""
    num_experts = counts.shape[0]
    return Places(
        ranks=counts[:0],
        starts=counts[:0],
        counts=counts,
        num_places=num_experts * capacity,
        capacity=capacity,
        groups=None,
    )


def _count(local_ids: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Pairs of each expert [S] int32, and each pair's number among them [R, K] int32."""
    counts = torch.zeros(num_experts, dtype=torch.int32, device=local_ids.device)
    ranks = torch.empty(local_ids.shape, dtype=torch.int32, device=local_ids.device)
    num_pairs = local_ids.numel()
    if num_pairs:
        # Imported at the first call: CPU installations have no triton.
        from crossdock_models.experts.deep_gemm.kernels.places_triton import count_kernel

        launch: Any = count_kernel
        launch[(-(-num_pairs // COUNT_PAIRS),)](
            local_ids.contiguous(), counts, ranks, num_pairs, block=COUNT_PAIRS, num_warps=4
        )
    return counts, ranks
