"""Experts that are run on a few rows at a time, so that a kernel never takes the form that it has for many."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import attrs
import torch

if TYPE_CHECKING:
    from crossdock.types.dispatch import Received
    from crossdock.types.experts import Experts, ExpertsCapabilities, ExpertTensors


@attrs.frozen(eq=False)
class FewRowExperts:
    """Wraps experts that take rows by token; a row is in one part only, so the results are the same sums."""

    inner: Experts
    most_rows: int

    @property
    def capabilities(self) -> ExpertsCapabilities:
        return self.inner.capabilities

    def attach(self, tensors: ExpertTensors) -> None:
        self.inner.attach(tensors)

    def refresh(self, layer: int, slots: Sequence[int]) -> None:
        self.inner.refresh(layer, slots)

    def run(self, layer: int, received: Received, sm_budget: int | None = None) -> torch.Tensor:
        ids, weights = received.local_topk_ids, received.row_weights
        assert ids is not None, "rows by token come with ids"
        assert weights is not None, "rows by token come with weights"
        starts = range(0, received.rows.shape[0], self.most_rows) or (0,)
        parts = [slice(start, start + self.most_rows) for start in starts]
        outputs = [
            self.inner.run(
                layer,
                attrs.evolve(received, rows=received.rows[part], local_topk_ids=ids[part], row_weights=weights[part]),
                sm_budget,
            )
            for part in parts
        ]
        return torch.cat(outputs)
