"""Variants of every supported family: what the models' tests run against transformers on a CPU, and against that result on GPUs."""

from __future__ import annotations

from typing import Any

import attrs


@attrs.frozen(kw_only=True)
class ModelVariant:
    """A family of ``tiny_models`` with some of its fields replaced."""

    family: str
    fields: dict[str, Any] = attrs.field(factory=dict[str, Any])


def _v2(**fields: Any) -> ModelVariant:
    return ModelVariant(family="deepseek_v2", fields=fields)


def _v3(**fields: Any) -> ModelVariant:
    return ModelVariant(family="deepseek_v3", fields=fields)


def _qwen3(**fields: Any) -> ModelVariant:
    return ModelVariant(family="qwen3_moe", fields=fields)


def _mixtral(**fields: Any) -> ModelVariant:
    return ModelVariant(family="mixtral", fields=fields)


def _yarn(**extra: float) -> dict[str, Any]:
    fields = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
    return {"rope_parameters": {**fields, **extra}}


VARIANTS: dict[str, ModelVariant] = {
    "v3": _v3(),
    "v3 without groups": _v3(n_group=1, topk_group=1),
    "v3 without q_lora, with biases": _v3(q_lora_rank=None, attention_bias=True),
    "v3 rope in halves, biases": _v3(rope_interleave=False, attention_bias=True),
    "v3 no dense layer, tied": _v3(first_k_dense_replace=0, tie_word_embeddings=True),
    "v3 two dense layers, no scaling": _v3(first_k_dense_replace=2, routed_scaling_factor=1.0),
    "v3 all dense": _v3(first_k_dense_replace=3),
    "v3 no renormalisation": _v3(norm_topk_prob=False, n_shared_experts=2),
    "v3 yarn, equal mscales": _v3(**_yarn(mscale=1.0, mscale_all_dim=1.0)),
    "v3 yarn, different mscales": _v3(**_yarn(mscale=0.7, mscale_all_dim=1.3)),
    "v3 kernel sizes": _v3(kv_lora_rank=32, qk_rope_head_dim=32, hidden_size=64, moe_intermediate_size=32),
    "v2": _v2(),
    "v2 grouped, scaled": _v2(topk_method="group_limited_greedy", n_group=4, topk_group=2, routed_scaling_factor=16.0),
    "v2 lite, yarn": _v2(q_lora_rank=None, **_yarn(mscale=0.707, mscale_all_dim=0.707)),
    "v2 yarn without mscales": _v2(**_yarn()),
    "qwen3": _qwen3(),
    "qwen3 one key head": _qwen3(num_key_value_heads=1, num_attention_heads=8),
    "qwen3 as many key heads": _qwen3(num_key_value_heads=4),
    "qwen3 kernel sizes": _qwen3(head_dim=32, hidden_size=64, moe_intermediate_size=32),
    "qwen3 tied, no renormalisation": _qwen3(tie_word_embeddings=True, norm_topk_prob=False),
    "qwen3 dense by list, biases": _qwen3(mlp_only_layers=[1], attention_bias=True),
    "qwen3 dense by step": _qwen3(decoder_sparse_step=2),
    "qwen3 all dense": _qwen3(mlp_only_layers=[0, 1, 2]),
    "qwen3 yarn": _qwen3(**_yarn()),
    "qwen3 linear rope": _qwen3(rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}),
    "mixtral": _mixtral(),
    "mixtral one key head": _mixtral(num_key_value_heads=1),
    "mixtral tied, wide window": _mixtral(tie_word_embeddings=True, sliding_window=512),
    "mixtral kernel sizes": _mixtral(head_dim=32, hidden_size=64, intermediate_size=32, num_attention_heads=8),
}


def variants_of(*families: str) -> list[str]:
    """Names of the variants of some families."""
    return [name for name, variant in VARIANTS.items() if variant.family in families]
