"""Entry point of the ``triton`` experts plugin."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from crossdock.hookapi import hookimpl
from crossdock.options import read_options
from crossdock.types.capability import Refusal

from crossdock_models.experts.triton.capabilities import triton_capabilities
from crossdock_models.experts.triton.options import TritonExpertsOptions

if TYPE_CHECKING:
    from crossdock.types.capability import Environment
    from crossdock.types.experts import Experts, ExpertsCapabilities, ExpertsSpec

HOOK_API_VERSION = 1


@hookimpl
def make_experts(options: Mapping[str, object], spec: ExpertsSpec) -> Experts | None:
    """Grouped products in Triton on the device of the spec. Declines other activations than SwiGLU."""
    read_options(TritonExpertsOptions, options, where="[experts]")
    if spec.activation != "silu":
        return None
    from crossdock_models.experts.triton.experts import TritonExperts

    return TritonExperts(spec)


@hookimpl
def experts_capabilities(options: Mapping[str, object], env: Environment) -> ExpertsCapabilities | Refusal | None:
    """Rows by token and replicated rows on CUDA, bf16, weights also in fp8 blocks, rows in fp8 beside these; capturable."""
    read_options(TritonExpertsOptions, options, where="[experts]")
    if env.device == "cuda" and "triton" not in env.packages:
        return Refusal(code="package_missing", sentence="experts triton needs triton; choose experts 'torch'")
    moe = env.model.moe if env.model is not None else None
    if moe is None:
        return triton_capabilities("native", 0, 0)
    return triton_capabilities(moe.weight_dtype, moe.hidden_size, moe.intermediate_size // env.sizes.moe_tp_size)
