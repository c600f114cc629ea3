"""Entry point of the DeepSeek-V2 and V3 models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from crossdock.hookapi import hookimpl
from crossdock.types.capability import ModelCapabilities

from crossdock_models.model.deepseek.config import FAMILIES, read_deepseek

if TYPE_CHECKING:
    from crossdock.types.capability import Environment, Refusal
    from crossdock.types.model import Model, ModelInfo, ModelSpec
    from crossdock.types.parallel import ParallelSizes, RankPlace

HOOK_API_VERSION = 1


@hookimpl
def model_info(config: Mapping[str, object], sizes: ParallelSizes, place: RankPlace) -> ModelInfo | None:
    """Facts of a ``deepseek_v2`` or ``deepseek_v3`` checkpoint; declines others."""
    if config.get("model_type") not in FAMILIES:
        return None
    return read_deepseek(config).info(sizes, place)


@hookimpl
def make_model(spec: ModelSpec) -> Model | None:
    """A ``deepseek_v2`` or ``deepseek_v3`` checkpoint with this rank's weights; declines others."""
    if spec.config.get("model_type") not in FAMILIES:
        return None
    from crossdock_models.model.deepseek.model import make_deepseek

    return make_deepseek(spec)


@hookimpl
def model_capabilities(options: Mapping[str, object], env: Environment) -> ModelCapabilities | Refusal | None:
    """fp32 and bf16 on CPU and CUDA, any strategy."""
    return ModelCapabilities()
