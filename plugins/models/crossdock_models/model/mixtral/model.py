"""Mixtral: plain GQA, softmax routing with renormalised weights, no shared expert."""

from __future__ import annotations

from crossdock.types.model import Model, ModelSpec

from crossdock_models._shared.gqa_moe_model import make_gqa_moe
from crossdock_models.model.mixtral.config import read_mixtral


def make_mixtral(spec: ModelSpec) -> Model:
    """Builds the model and loads this rank's weights."""
    return make_gqa_moe(spec, read_mixtral(spec.config))
