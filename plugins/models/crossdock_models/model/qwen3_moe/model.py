"""Qwen3-MoE: GQA with a norm on queries and keys, softmax routing, no shared expert."""

from __future__ import annotations

from crossdock.types.model import Model, ModelSpec

from crossdock_models._shared.gqa_moe_model import make_gqa_moe
from crossdock_models.model.qwen3_moe.config import read_qwen3_moe


def make_qwen3_moe(spec: ModelSpec) -> Model:
    """Builds the model and loads this rank's weights."""
    return make_gqa_moe(spec, read_qwen3_moe(spec.config))
