"""Entry point of the ``torch`` attention backend."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from crossdock.hookapi import hookimpl
from crossdock.options import read_options

from crossdock_attention.attention.torch.capabilities import TORCH_ATTENTION_CAPABILITIES
from crossdock_attention.attention.torch.options import TorchAttentionOptions

if TYPE_CHECKING:
    from crossdock.types.attention import Attention, AttentionCapabilities, AttentionSpec
    from crossdock.types.capability import Environment, Refusal

HOOK_API_VERSION = 1


@hookimpl
def make_attention(options: Mapping[str, object], spec: AttentionSpec) -> Attention | None:
    """GQA and MLA on any device; declines other cache forms."""
    chosen = read_options(TorchAttentionOptions, options, where="[attention]")
    if spec.kv.kind not in TORCH_ATTENTION_CAPABILITIES.kinds:
        return None
    from crossdock_attention.attention.torch.attention import TorchAttention

    return TorchAttention(chosen, spec)


@hookimpl
def attention_capabilities(options: Mapping[str, object], env: Environment) -> AttentionCapabilities | Refusal | None:
    """fp32 and bf16 on CPU and CUDA; not for graph capture, because batches are grouped by length on the host."""
    read_options(TorchAttentionOptions, options, where="[attention]")
    return TORCH_ATTENTION_CAPABILITIES
