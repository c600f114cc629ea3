"""The config of Mixtral checkpoints; torch is not imported."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from crossdock_models._shared.config_fields import ConfigReader, read_decoder_fields, refuse_sliding_window
from crossdock_models._shared.gqa_moe_config import GqaMoeConfig
from crossdock_models._shared.gqa_sizes import GqaSizes
from crossdock_models._shared.moe_fields import MoeFields
from crossdock_models._shared.quantisation import read_quantisation
from crossdock_models._shared.rope_fields import read_rope_fields

RENAMES = (("block_sparse_moe", "mlp"), ("w1", "gate_proj"), ("w3", "up_proj"), ("w2", "down_proj"))
"""Mixtral's own words on disk, and ours."""
NORM_EPS = 1e-5
ROPE_THETA = 1e6


def read_mixtral(config: Mapping[str, Any]) -> GqaMoeConfig:
    """Reads ``config.json``: every layer holds experts, weights of the chosen ones are always renormalised.

    Raises:
        CheckpointError: a field is missing or out of range.
    """
    reader = ConfigReader(config)
    fields = read_decoder_fields(reader)
    fields = attrs.evolve(fields, norm_eps=reader.number("rms_norm_eps", default=NORM_EPS))
    refuse_sliding_window(reader, reader.optional_integer("sliding_window"), fields.max_positions)
    head_dim = reader.integer("head_dim", default=fields.hidden_size // fields.num_heads)
    return GqaMoeConfig(
        fields=fields,
        attention=GqaSizes(
            num_heads=fields.num_heads,
            num_kv_heads=reader.integer("num_key_value_heads", default=fields.num_heads),
            head_dim=head_dim,
            hidden_size=fields.hidden_size,
            norm_eps=fields.norm_eps,
            has_qk_norm=False,
            has_bias=False,
        ),
        rope=read_rope_fields(reader, head_dim, ROPE_THETA),
        quantisation=read_quantisation(config),
        moe=MoeFields(
            layers=tuple(range(fields.num_layers)),
            num_experts=reader.integer("num_local_experts", "num_experts"),
            top_k=reader.integer("num_experts_per_tok"),
            intermediate_size=reader.integer("intermediate_size"),
        ),
        dense_size=0,
        renormalise=True,
        renames=RENAMES,
    )
