"""Experts simple enough to know their answer, on received rows of any layout; and the dense sum they must give."""

from __future__ import annotations

import attrs
import torch

from crossdock.types.dispatch import Received, ReceiveLayout
from crossdock.types.parallel import ParallelSizes, RankPlace


@attrs.frozen(kw_only=True, eq=False)
class ToyExperts:
    """Physical expert e turns a row x into ``x * factors[e] + offsets[e]``."""

    factors: torch.Tensor
    """[P] float32."""
    offsets: torch.Tensor
    """[P] float32."""

    def to(self, device: str) -> ToyExperts:
        """The same experts on a device."""
        return ToyExperts(factors=self.factors.to(device), offsets=self.offsets.to(device))

    def dense(self, rows: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor) -> torch.Tensor:
        """The weighted sum that dispatch, experts and combine must give; [n, H] float32, ids of -1 add nothing."""
        weights = torch.where(topk_ids >= 0, topk_weights, 0.0)
        ids = topk_ids.clamp(min=0)
        factor = (weights * self.factors[ids]).sum(dim=1, keepdim=True)
        offset = (weights * self.offsets[ids]).sum(dim=1, keepdim=True)
        return rows.to(torch.float32) * factor + offset

    def run(self, received: Received, sizes: ParallelSizes, place: RankPlace) -> torch.Tensor:
        """Output of this rank's experts with the leading dims of ``received.rows``, float32; ranks of one moe_tp group share it evenly."""
        num_local = self.factors.shape[0] // sizes.moe_ep_size
        first = place.moe_ep_rank * num_local
        factors = self.factors[first : first + num_local] / sizes.moe_tp_size
        offsets = self.offsets[first : first + num_local] / sizes.moe_tp_size
        rows = received.rows.to(torch.float32)
        if received.scales is not None:
            rows = rows * received.scales.repeat_interleave(128, dim=-1)
        if received.layout is ReceiveLayout.EXPERT_MAJOR:
            return rows * factors[:, None, None] + offsets[:, None, None]
        if received.layout is ReceiveLayout.FLAT:
            counts = torch.as_tensor(received.counts, dtype=torch.int64, device=rows.device)
            expert = torch.arange(num_local, device=rows.device).repeat_interleave(counts)
            out = rows * factors[expert, None] + offsets[expert, None]
            return out if received.row_weights is None else out * received.row_weights[:, None]
        local_ids, weights = received.local_topk_ids, received.row_weights
        assert local_ids is not None, f"{received.layout.value} rows need local ids"
        assert weights is not None, f"{received.layout.value} rows need weights"
        live = local_ids >= 0
        assert not bool((local_ids >= num_local).any()), "a local id beyond the slots of the rank"
        share = torch.where(live, weights, 0.0)
        ids = local_ids.clamp(min=0)
        total = torch.where(live.any(dim=1, keepdim=True), rows, 0.0)
        return total * (share * factors[ids]).sum(dim=1, keepdim=True) + (share * offsets[ids]).sum(dim=1, keepdim=True)


def identity_experts(num_physical_experts: int) -> ToyExperts:
    """Every expert returns its input."""
    return ToyExperts(factors=torch.ones(num_physical_experts), offsets=torch.zeros(num_physical_experts))


def distinct_experts(num_physical_experts: int) -> ToyExperts:
    """No two experts do the same."""
    numbers = torch.arange(num_physical_experts, dtype=torch.float32)
    return ToyExperts(factors=1.0 + numbers / 4, offsets=numbers - 2.0)


def replicated_experts(num_physical_experts: int) -> ToyExperts:
    """Slots 2e and 2e + 1 do the same, as replicas of one expert do, be they on one rank or on two."""
    logical = torch.arange(num_physical_experts) // 2
    return ToyExperts(factors=1.0 + logical / 4, offsets=logical - 2.0)


def constant_experts(num_physical_experts: int) -> ToyExperts:
    """The first expert returns 1 everywhere, the others 10."""
    offsets = torch.full((num_physical_experts,), 10.0)
    offsets[0] = 1.0
    return ToyExperts(factors=torch.zeros(num_physical_experts), offsets=offsets)
