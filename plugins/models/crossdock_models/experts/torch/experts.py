"""Builds the path that the options and the machine ask for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from crossdock_models.experts.torch.reference import ReferenceExperts

if TYPE_CHECKING:
    from crossdock.types.experts import Experts, ExpertsSpec

    from crossdock_models.experts.torch.options import TorchExpertsOptions


def make_torch_experts(options: TorchExpertsOptions, spec: ExpertsSpec) -> Experts:
    """The reference; the fast path takes its place where it is available."""
    return ReferenceExperts(spec)
