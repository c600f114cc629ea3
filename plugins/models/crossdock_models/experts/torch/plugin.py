"""Entry point of the ``torch`` experts plugin."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from crossdock.hookapi import hookimpl
from crossdock.options import read_options

from crossdock_models.experts.torch.capabilities import torch_experts_capabilities
from crossdock_models.experts.torch.options import TorchExpertsOptions

if TYPE_CHECKING:
    from crossdock.types.capability import Environment, Refusal
    from crossdock.types.experts import Experts, ExpertsCapabilities, ExpertsSpec

HOOK_API_VERSION = 1


@hookimpl
def make_experts(options: Mapping[str, object], spec: ExpertsSpec) -> Experts | None:
    """Experts in torch operators, any device. Declines other activations than SwiGLU."""
    chosen = read_options(TorchExpertsOptions, options, where="[experts]")
    if spec.activation != "silu":
        return None
    from crossdock_models.experts.torch.experts import TorchExperts

    return TorchExperts(chosen, spec)


@hookimpl
def experts_capabilities(options: Mapping[str, object], env: Environment) -> ExpertsCapabilities | Refusal | None:
    """Rows by token, replicated rows and rows sorted by expert, in fp32 or bf16, weights also in fp8 blocks."""
    return torch_experts_capabilities(read_options(TorchExpertsOptions, options, where="[experts]").form)
