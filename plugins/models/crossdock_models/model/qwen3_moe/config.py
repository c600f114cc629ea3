"""The config of Qwen3-MoE checkpoints; torch is not imported."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from crossdock_models._shared.config_fields import ConfigReader, read_decoder_fields, refuse_sliding_window
from crossdock_models._shared.gqa_moe_config import GqaMoeConfig
from crossdock_models._shared.gqa_sizes import GqaSizes
from crossdock_models._shared.moe_fields import MoeFields
from crossdock_models._shared.quantisation import read_quantisation
from crossdock_models._shared.rope_fields import read_rope_fields


def read_qwen3_moe(config: Mapping[str, Any]) -> GqaMoeConfig:
    """Reads ``config.json``: a norm on queries and keys, softmax routing, dense layers by list or by step.

    Raises:
        CheckpointError: a field is missing or out of range.
    """
    reader = ConfigReader(config)
    fields = read_decoder_fields(reader)
    if reader.flag("use_sliding_window", default=False):
        refuse_sliding_window(reader, reader.optional_integer("sliding_window"), fields.max_positions)
    head_dim = reader.integer("head_dim", default=fields.hidden_size // fields.num_heads)
    step, dense_layers = reader.integer("decoder_sparse_step", default=1), reader.integers("mlp_only_layers")
    num_experts = reader.integer("num_experts", "num_local_experts")
    moe_layers = [layer for layer in range(fields.num_layers) if layer not in dense_layers and (layer + 1) % step == 0]
    return GqaMoeConfig(
        fields=fields,
        attention=GqaSizes(
            num_heads=fields.num_heads,
            num_kv_heads=reader.integer("num_key_value_heads"),
            head_dim=head_dim,
            hidden_size=fields.hidden_size,
            norm_eps=fields.norm_eps,
            has_qk_norm=True,
            has_bias=reader.flag("attention_bias", default=False),
        ),
        rope=read_rope_fields(reader, head_dim),
        quantisation=read_quantisation(config),
        moe=MoeFields(
            layers=tuple(moe_layers) if num_experts else (),
            num_experts=num_experts,
            top_k=reader.integer("num_experts_per_tok"),
            intermediate_size=reader.integer("moe_intermediate_size"),
        ),
        dense_size=reader.integer("intermediate_size", default=0),
        renormalise=reader.flag("norm_topk_prob", default=False),
    )
