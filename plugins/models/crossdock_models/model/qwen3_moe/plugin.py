"""Entry point of the Qwen3-MoE models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from crossdock.hookapi import hookimpl
from crossdock.types.capability import ModelCapabilities

from crossdock_models.model.qwen3_moe.config import read_qwen3_moe

if TYPE_CHECKING:
    from crossdock.types.capability import Environment, Refusal
    from crossdock.types.model import Model, ModelInfo, ModelSpec
    from crossdock.types.parallel import ParallelSizes, RankPlace

HOOK_API_VERSION = 1


@hookimpl
def model_info(config: Mapping[str, object], sizes: ParallelSizes, place: RankPlace) -> ModelInfo | None:
    """Facts of a ``qwen3_moe`` checkpoint; declines others."""
    if config.get("model_type") != "qwen3_moe":
        return None
    return read_qwen3_moe(config).info(sizes, place)


@hookimpl
def make_model(spec: ModelSpec) -> Model | None:
    """A ``qwen3_moe`` checkpoint with this rank's weights; declines others."""
    if spec.config.get("model_type") != "qwen3_moe":
        return None
    from crossdock_models.model.qwen3_moe.model import make_qwen3_moe

    return make_qwen3_moe(spec)


@hookimpl
def model_capabilities(options: Mapping[str, object], env: Environment) -> ModelCapabilities | Refusal | None:
    """fp32 and bf16 on CPU and CUDA, any strategy."""
    return ModelCapabilities()
