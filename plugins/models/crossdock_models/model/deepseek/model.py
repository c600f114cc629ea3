"""DeepSeek-V2 and V3: latent attention, first layers dense, shared and routed experts with grouped choice."""

from __future__ import annotations

from crossdock.ops.topk_routing import TopkRule
from crossdock.types.model import Model, ModelSpec

from crossdock_models._shared.build import DecoderRecipe, build_decoder
from crossdock_models._shared.router import TopkRouter
from crossdock_models._shared.weights import WeightReader
from crossdock_models.model.deepseek.config import read_deepseek
from crossdock_models.model.deepseek.mla import MlaAttention, load_mla


def make_deepseek(spec: ModelSpec) -> Model:
    """Builds the model and loads this rank's weights."""
    config = read_deepseek(spec.config)
    routing = config.routing
    rule = TopkRule(
        top_k=config.moe.top_k,
        scoring=routing.scoring,
        renormalise=routing.renormalise,
        routed_scaling=routing.routed_scaling,
        num_groups=config.moe.num_groups,
        kept_groups=routing.kept_groups,
        group_score=routing.group_score,
    )

    def load_attention(reader: WeightReader, layer: int) -> MlaAttention:
        return load_mla(reader, config.attention, config.rope.softmax_factor, spec, layer)

    def load_router(reader: WeightReader, prefix: str) -> TopkRouter:
        bias = reader.float_vector(f"{prefix}.gate.e_score_correction_bias") if routing.has_correction_bias else None
        return TopkRouter(reader.matrix(f"{prefix}.gate"), bias, rule)

    recipe = DecoderRecipe(
        info=config.info(spec.sizes, spec.place),
        fields=config.fields,
        rope=config.rope,
        dense_size=config.dense_size,
        shared_size=config.shared_size,
        load_attention=load_attention,
        load_router=load_router,
    )
    return build_decoder(spec, recipe)
