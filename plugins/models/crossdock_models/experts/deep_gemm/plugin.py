"""Entry point of the ``deep_gemm`` experts plugin."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from crossdock.hookapi import hookimpl
from crossdock.options import read_options

from crossdock_models.experts.deep_gemm.capabilities import ALIGNMENT, deep_gemm_answer
from crossdock_models.experts.deep_gemm.options import DeepGemmOptions

if TYPE_CHECKING:
    from crossdock.types.capability import Environment, Refusal
    from crossdock.types.experts import Experts, ExpertsCapabilities, ExpertsSpec

HOOK_API_VERSION = 1


@hookimpl
def make_experts(options: Mapping[str, object], spec: ExpertsSpec) -> Experts | None:
    """DeepGEMM's grouped products. Declines off CUDA, other activations than SwiGLU and sizes that are no multiples of 128."""
    chosen = read_options(DeepGemmOptions, options, where="[experts]")
    has_shape = spec.hidden_size % ALIGNMENT == 0 and spec.intermediate_size % ALIGNMENT == 0
    if spec.device.type != "cuda" or spec.activation != "silu" or not has_shape:
        return None
    from crossdock_models.experts.deep_gemm.experts import DeepGemmExperts
    from crossdock_models.experts.deep_gemm.library import load_products

    return DeepGemmExperts(chosen, spec, load_products())


@hookimpl
def experts_capabilities(options: Mapping[str, object], env: Environment) -> ExpertsCapabilities | Refusal | None:
    """Rows in places, rows by token and replicated rows on CUDA, bf16 and fp8 blocks; capturable."""
    read_options(DeepGemmOptions, options, where="[experts]")
    return deep_gemm_answer(env)
