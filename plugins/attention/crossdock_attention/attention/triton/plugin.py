"""Entry point of the ``triton`` attention backend."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from crossdock.hookapi import hookimpl
from crossdock.options import read_options
from crossdock.types.capability import Refusal

from crossdock_attention.attention.triton.capabilities import TRITON_ATTENTION_CAPABILITIES
from crossdock_attention.attention.triton.options import TritonAttentionOptions

if TYPE_CHECKING:
    from crossdock.types.attention import Attention, AttentionCapabilities, AttentionSpec
    from crossdock.types.capability import Environment

HOOK_API_VERSION = 1


@hookimpl
def make_attention(options: Mapping[str, object], spec: AttentionSpec) -> Attention | None:
    """Paged attention in Triton kernels on the device of the spec."""
    read_options(TritonAttentionOptions, options, where="[attention]")
    from crossdock_attention.attention.triton.attention import TritonAttention

    return TritonAttention(spec)


@hookimpl
def attention_capabilities(options: Mapping[str, object], env: Environment) -> AttentionCapabilities | Refusal | None:
    """GQA and MLA on CUDA; decode can be captured."""
    read_options(TritonAttentionOptions, options, where="[attention]")
    if env.device == "cuda" and "triton" not in env.packages:
        return Refusal(code="package_missing", sentence="attention triton needs triton; choose attention 'torch'")
    return TRITON_ATTENTION_CAPABILITIES
