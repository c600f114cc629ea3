"""A SwiGLU feed-forward block, whole or a rank's part of it: dense layers and shared experts."""

from __future__ import annotations

import torch
from crossdock.ops.swiglu import swiglu

from crossdock_models._shared.linears import Linear, LinearPart, load_linear
from crossdock_models._shared.shards import Shard
from crossdock_models._shared.weights import WeightReader


class GatedFfn:
    """``down(silu(gate(x)) * up(x))`` over a part of the intermediate size; parts of all ranks add up to the block's output."""

    def __init__(self, gate_up: Linear, down: Linear) -> None:
        """``gate_up`` of [2I, H], gate rows first; ``down`` of [H, I]."""
        self._gate_up = gate_up
        self._down = down

    def __call__(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[n, H] -> [n, H]."""
        return self._down(swiglu(self._gate_up(hidden_states)))


def load_gated_ffn(reader: WeightReader, prefix: str, part: Shard) -> GatedFfn:
    """Reads ``<prefix>.{gate,up,down}_proj``, only the ``part`` of the intermediate size."""
    halves = [LinearPart(prefix=f"{prefix}.{name}_proj", rows=part) for name in ("gate", "up")]
    return GatedFfn(
        load_linear(reader, halves), load_linear(reader, [LinearPart(prefix=f"{prefix}.down_proj", cols=part)])
    )
