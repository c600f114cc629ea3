"""One expert's matrices in the compute dtype, whatever form the checkpoint has."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from crossdock.ops.fp8_block import dequantise_blocks

if TYPE_CHECKING:
    from crossdock.types.experts import ExpertTensors


def expert_matrices(tensors: ExpertTensors, slot: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """``gate_up`` [2I, H] (gate rows first) and ``down`` [H, I] of a slot in ``dtype``; views where nothing has to be computed.

    fp8 block weights are multiplied by their scales on each call: a second copy of the weights would cost more memory than fp8 saves.
    """
    gate_up, down = tensors.tensors["gate_up"][slot], tensors.tensors["down"][slot]
    if "gate_up_scale" not in tensors.tensors:
        return gate_up.to(dtype), down.to(dtype)
    gate_scale, up_scale = tensors.tensors["gate_up_scale"][slot].chunk(2)
    gate, up = gate_up.chunk(2)
    halves = (dequantise_blocks(gate, gate_scale, dtype), dequantise_blocks(up, up_scale, dtype))
    return torch.cat(halves), dequantise_blocks(down, tensors.tensors["down_scale"][slot], dtype)
