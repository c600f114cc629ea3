"""Grouped expert computation and the tensors it owns (DESIGN section 8)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import attrs

from crossdock.types.dispatch import Received, ReceiveLayout, WireDtype

if TYPE_CHECKING:
    import torch


@attrs.frozen(kw_only=True, eq=False)
class ExpertTensors:
    """Per-expert tensors of one layer on one rank: dim 0 = local slot, in checkpoint form.

    The only thing that is moved, saved and compared. Names: ``gate_up`` [S, 2I, H] (gate rows first), ``down`` [S, H, I], and
    for fp8 checkpoints ``gate_up_scale`` [S, 2*ceil(I/128), ceil(H/128)] and ``down_scale`` [S, ceil(H/128), ceil(I/128)] float32.
    I is the rank's share of the intermediate size when moe_tp > 1. Storage never changes after construction: updates copy in place.
    """

    layer: int
    tensors: Mapping[str, torch.Tensor]

    @property
    def num_slots(self) -> int:
        return int(next(iter(self.tensors.values())).shape[0])


@attrs.frozen(kw_only=True)
class ExpertsCapabilities:
    """Receive layouts, devices and weight forms that an experts plugin takes."""

    layouts: tuple[ReceiveLayout, ...]
    """Layouts taken as they are, best first."""
    devices: frozenset[str] = frozenset({"cpu"})
    weight_dtypes: frozenset[str] = frozenset({"float32", "bfloat16"})
    """Names: float32, bfloat16, fp8_block."""
    wire_dtypes: frozenset[WireDtype] = frozenset({WireDtype.NATIVE})
    expert_alignment: int = 1
    graph_capture: bool = False
    applies_row_weights: bool = True
    row_invariant: bool = False
    """On a CPU in float32 it can give a row the same bits whatever rows are beside it, where ``ExpertsSpec.row_invariant`` asks for it."""


@attrs.frozen(kw_only=True, eq=False)
class ExpertsSpec:
    """What an experts plugin is built for."""

    hidden_size: int
    intermediate_size: int
    """The rank's share."""
    num_local_experts: int
    top_k: int
    activation: str
    """``silu``: SwiGLU with gate rows first."""
    dtype: torch.dtype
    device: torch.device
    weight_dtype: str = "native"
    row_invariant: bool = False
    """A row's bits must not depend on the rows beside it."""


class Experts(Protocol):
    """Runs the local experts on received rows."""

    @property
    def capabilities(self) -> ExpertsCapabilities: ...

    def attach(self, tensors: ExpertTensors) -> None:
        """Takes the tensors of a layer (kept by reference) and builds derived forms. Idempotent."""
        ...

    def refresh(self, layer: int, slots: Sequence[int]) -> None:
        """Rebuilds derived forms of these local slots after their tensors were overwritten in place."""
        ...

    def run(self, layer: int, received: Received, sm_budget: int | None = None) -> torch.Tensor:
        """Output with the leading dims of ``received.rows``, bf16 or fp32, row weights applied when given."""
        ...
