"""Grouped SwiGLU experts in torch operators: the readable truth, one loop over experts."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F

from crossdock.ops.fp8_block import dequantise_blocks
from crossdock.ops.host_lists import int_rows
from crossdock.ops.permute import sort_by_expert, weighted_sum


def grouped_mlp_torch(
    rows: torch.Tensor, local_ids: torch.Tensor, weights: torch.Tensor, tensors: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    """See ``crossdock.ops.grouped_mlp.GroupedMlp.run``."""
    total = torch.zeros(rows.shape, dtype=torch.float32, device=rows.device)
    for expert in range(tensors["down"].shape[0]):
        chosen, column = (local_ids == expert).nonzero(as_tuple=True)
        gate_up, down = expert_matrices(tensors, expert, rows.dtype)
        gate, up = F.linear(rows[chosen], gate_up).chunk(2, dim=-1)
        out = F.linear(F.silu(gate) * up, down).to(torch.float32)
        total.index_add_(0, chosen, out * weights[chosen, column, None])
    return total


def grouped_mlp_rows(
    rows: torch.Tensor, local_ids: torch.Tensor, weights: torch.Tensor, tensors: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    """The same for each row by itself: slow, and every product has one height."""
    total = torch.zeros(rows.shape, dtype=torch.float32, device=rows.device)
    for row, experts in enumerate(int_rows(local_ids)):
        chosen = sorted((expert, column) for column, expert in enumerate(experts) if expert >= 0)
        for expert, column in chosen:
            gate_up, down = expert_matrices(tensors, expert, rows.dtype)
            # A copy lies where vectors begin, wherever the row lay.
            gate, up = F.linear(rows[row : row + 1].clone(), gate_up).chunk(2, dim=-1)
            total[row] += F.linear(F.silu(gate) * up, down)[0].to(torch.float32) * weights[row, column]
    return total


def expert_matrices(
    tensors: Mapping[str, torch.Tensor], expert: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """``gate_up`` [2I, H] (gate rows first) and ``down`` [H, I] of one expert in ``dtype``; views where nothing has to be computed.

    fp8 block weights are multiplied by their scales on each call: a second copy of the weights would cost more memory than fp8 saves.
    """
    gate_up, down = tensors["gate_up"][expert], tensors["down"][expert]
    if "gate_up_scale" not in tensors:
        return gate_up.to(dtype), down.to(dtype)
    gate_scale, up_scale = tensors["gate_up_scale"][expert].chunk(2)
    gate, up = gate_up.chunk(2)
    halves = (dequantise_blocks(gate, gate_scale, dtype), dequantise_blocks(up, up_scale, dtype))
    return torch.cat(halves), dequantise_blocks(down, tensors["down_scale"][expert], dtype)


def grouped_mlp_sorted(
    rows: torch.Tensor, local_ids: torch.Tensor, weights: torch.Tensor, tensors: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    """The same through rows sorted by expert and torch's grouped product; weights in the dtype of the rows, widths multiples of 8."""
    gate_up, down = tensors["gate_up"], tensors["down"]
    ordered = sort_by_expert(rows, local_ids, weights, gate_up.shape[0])
    if not ordered.rows.shape[0]:
        return torch.zeros(rows.shape, dtype=torch.float32, device=rows.device)
    ends = torch.tensor(ordered.counts, dtype=torch.int32, device=rows.device).cumsum(0, dtype=torch.int32)
    gate, up = F.grouped_mm(ordered.rows, gate_up.transpose(1, 2), offs=ends).chunk(2, dim=-1)
    out = F.grouped_mm(F.silu(gate) * up, down.transpose(1, 2), offs=ends).to(torch.float32)
    return weighted_sum(out * ordered.weights[:, None], ordered.positions)
