"""The readable truth: one loop over the local experts, nothing prepared, nothing skipped."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from crossdock.types.dispatch import ReceiveLayout

from crossdock_models.experts.torch.capabilities import TORCH_EXPERTS_CAPABILITIES
from crossdock_models.experts.torch.weights import expert_matrices

if TYPE_CHECKING:
    from crossdock.types.dispatch import Received
    from crossdock.types.experts import ExpertsCapabilities, ExpertsSpec, ExpertTensors


class ReferenceExperts:
    """Weighted SwiGLU experts, expert by expert, sums in float32."""

    def __init__(self, spec: ExpertsSpec) -> None:
        self._spec = spec
        self._layers: dict[int, ExpertTensors] = {}

    @property
    def capabilities(self) -> ExpertsCapabilities:
        return TORCH_EXPERTS_CAPABILITIES

    def attach(self, tensors: ExpertTensors) -> None:
        self._layers[tensors.layer] = tensors

    def refresh(self, layer: int, slots: Sequence[int]) -> None:
        """Nothing is derived, so there is nothing to rebuild."""

    def run(self, layer: int, received: Received, sm_budget: int | None = None) -> torch.Tensor:
        tensors = self._layers[layer]
        total = torch.zeros(received.rows.shape, dtype=torch.float32, device=received.rows.device)
        for slot in range(tensors.num_slots):
            rows, weights = _rows_of_expert(received, slot)
            gate_up, down = expert_matrices(tensors, slot, self._spec.dtype)
            gate, up = F.linear(received.rows[rows], gate_up).chunk(2, dim=-1)
            out = F.linear(F.silu(gate) * up, down).to(torch.float32)
            total.index_add_(0, rows, out if weights is None else out * weights[:, None])
        return total.to(self._spec.dtype)


def _rows_of_expert(received: Received, slot: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Indices of the rows that go to a local expert, and their weights where the experts step applies them."""
    if received.layout is ReceiveLayout.FLAT:
        counts = received.counts
        assert isinstance(counts, list), "flat rows come with counts on the host"
        start = sum(counts[:slot])
        rows = torch.arange(start, start + counts[slot], device=received.rows.device)
        return rows, None if received.row_weights is None else received.row_weights[rows]
    assert received.local_topk_ids is not None, "rows by token come with local ids"
    rows, column = (received.local_topk_ids == slot).nonzero(as_tuple=True)
    return rows, None if received.row_weights is None else received.row_weights[rows, column]
