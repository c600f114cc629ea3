"""Builds decoders with grouped-query attention and softmax-routed experts."""

from __future__ import annotations

from crossdock.ops.topk_routing import TopkRule
from crossdock.types.model import Model, ModelSpec

from crossdock_models._shared.build import DecoderRecipe, build_decoder
from crossdock_models._shared.gqa import GqaAttention, load_gqa
from crossdock_models._shared.gqa_moe_config import GqaMoeConfig
from crossdock_models._shared.router import TopkRouter
from crossdock_models._shared.weights import WeightReader


def make_gqa_moe(spec: ModelSpec, config: GqaMoeConfig) -> Model:
    """The model with this rank's weights loaded."""
    rule = TopkRule(top_k=config.moe.top_k, scoring="softmax", renormalise=config.renormalise)

    def load_attention(reader: WeightReader, layer: int) -> GqaAttention:
        return load_gqa(reader, config.attention, spec, layer)

    def load_router(reader: WeightReader, prefix: str) -> TopkRouter:
        return TopkRouter(reader.matrix(f"{prefix}.gate"), None, rule)

    recipe = DecoderRecipe(
        info=config.info(spec.sizes, spec.place),
        fields=config.fields,
        rope=config.rope,
        dense_size=config.dense_size,
        shared_size=0,
        load_attention=load_attention,
        load_router=load_router,
    )
    return build_decoder(spec, recipe)
