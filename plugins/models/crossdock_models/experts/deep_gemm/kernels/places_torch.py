"""Readable truth of the places: pairs of an expert in input order."""

from __future__ import annotations

import torch


def segments_torch(
    local_ids: torch.Tensor, num_experts: int, num_places: int, segment: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Counts [S], starts [S] and groups [P], all int32, as in ``Places``."""
    counts = torch.bincount(local_ids[local_ids >= 0], minlength=num_experts)
    aligned = -(-counts // segment) * segment
    starts = aligned.cumsum(0) - aligned
    groups = torch.full((num_places,), -1, dtype=torch.int32, device=local_ids.device)
    experts = torch.arange(num_experts, dtype=torch.int32, device=local_ids.device).repeat_interleave(aligned)
    groups[: experts.numel()] = experts
    return counts.to(torch.int32), starts.to(torch.int32), groups
