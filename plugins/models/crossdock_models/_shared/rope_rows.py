"""Rotations of a step's rows, looked up once for all layers."""

from __future__ import annotations

import torch
from crossdock.ops.rope import RopeTable, halves_to_pairs
from crossdock.ops.rope_spec import RopeSpec
from crossdock.types.batch import ForwardBatch


class StepRotations:
    """The rotary table of a model."""

    def __init__(self, spec: RopeSpec, device: torch.device) -> None:
        self._table = RopeTable(spec, device)

    def __call__(self, batch: ForwardBatch) -> torch.Tensor:
        """[N, 1, dim / 2] complex64; padded rows have position 0."""
        return self._table.rows(batch.positions, max(batch.seq_lens, default=0))


def pair_heads(weight: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Reorders the rows of every head from halves to pairs: [heads * head_dim, ...] in the same shape. For projections, their biases and norm weights."""
    order = torch.tensor(halves_to_pairs(head_dim), device=weight.device)
    heads: torch.Tensor = weight.unflatten(0, (-1, head_dim))
    return heads.index_select(1, order).flatten(0, 1)
