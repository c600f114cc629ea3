"""Entry point of the Mixtral models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from crossdock.hookapi import hookimpl
from crossdock.types.capability import ModelCapabilities

from crossdock_models.model.mixtral.config import read_mixtral

if TYPE_CHECKING:
    from crossdock.types.capability import Environment, Refusal
    from crossdock.types.model import Model, ModelInfo, ModelSpec
    from crossdock.types.parallel import ParallelSizes, RankPlace

HOOK_API_VERSION = 1


@hookimpl
def model_info(config: Mapping[str, object], sizes: ParallelSizes, place: RankPlace) -> ModelInfo | None:
    """Facts of a ``mixtral`` checkpoint; declines others."""
    if config.get("model_type") != "mixtral":
        return None
    return read_mixtral(config).info(sizes, place)


@hookimpl
def make_model(spec: ModelSpec) -> Model | None:
    """A ``mixtral`` checkpoint with this rank's weights; declines others."""
    if spec.config.get("model_type") != "mixtral":
        return None
    from crossdock_models.model.mixtral.model import make_mixtral

    return make_mixtral(spec)


@hookimpl
def model_capabilities(options: Mapping[str, object], env: Environment) -> ModelCapabilities | Refusal | None:
    """fp32 and bf16 on CPU and CUDA, any strategy."""
    return ModelCapabilities()
