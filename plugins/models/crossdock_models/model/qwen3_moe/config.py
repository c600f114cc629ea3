"""The config of Qwen3-MoE checkpoints; torch is not imported."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
from crossdock.ops.rope_spec import RopeSpec
from crossdock.types.model import ModelInfo, MoeSpec
from crossdock.types.parallel import ParallelSizes, RankPlace

from crossdock_models._shared.config_fields import (
    ConfigReader,
    DecoderFields,
    read_decoder_fields,
    refuse_sliding_window,
)
from crossdock_models._shared.gqa_sizes import GqaSizes
from crossdock_models._shared.quantisation import Quantisation, read_quantisation
from crossdock_models._shared.rope_fields import read_rope_fields
from crossdock_models._shared.shards import expert_shard, head_shard
from crossdock_models._shared.tensor_table import TensorTable, ignored_tensors


@attrs.frozen(kw_only=True)
class Qwen3MoeConfig:
    """Everything that the model is built from."""

    fields: DecoderFields
    attention: GqaSizes
    rope: RopeSpec
    quantisation: Quantisation
    moe_layers: tuple[int, ...]
    num_experts: int
    top_k: int
    moe_size: int
    dense_size: int
    renormalise: bool

    def info(self, sizes: ParallelSizes, place: RankPlace) -> ModelInfo:
        """Facts of the checkpoint on one rank."""
        fields = self.fields
        moe = None
        if self.moe_layers:
            first = f"model.layers.{self.moe_layers[0]}.mlp.experts.0.gate_proj.weight"
            is_fp8 = self.quantisation.covers(first)
            expert_shard(self.moe_size, sizes, place, fp8_block=is_fp8)
            moe = MoeSpec(
                layers=self.moe_layers,
                num_logical_experts=self.num_experts,
                top_k=self.top_k,
                hidden_size=fields.hidden_size,
                intermediate_size=self.moe_size,
                weight_dtype="fp8_block" if is_fp8 else "native",
            )
        return ModelInfo(
            model_type=fields.model_type,
            num_layers=fields.num_layers,
            hidden_size=fields.hidden_size,
            vocab_size=fields.vocab_size,
            max_position_embeddings=fields.max_positions,
            kv=self.attention.kv_spec(sizes, place),
            num_heads=head_shard(fields.num_heads, sizes, place).size,
            moe=moe,
            eos_token_ids=fields.eos_token_ids,
            tensors=self._tensors().tensors,
            ignored_tensors=ignored_tensors(fields),
        )

    def _tensors(self) -> TensorTable:
        table = TensorTable(self.quantisation)
        table.frame(self.fields)
        for layer in range(self.fields.num_layers):
            prefix = f"model.layers.{layer}"
            self.attention.add_tensors(table, f"{prefix}.self_attn")
            if layer in self.moe_layers:
                table.experts(f"{prefix}.mlp", self.num_experts, self.fields.hidden_size, self.moe_size)
            else:
                table.gated_ffn(f"{prefix}.mlp", self.fields.hidden_size, self.dense_size)
        return table


def read_qwen3_moe(config: Mapping[str, Any]) -> Qwen3MoeConfig:
    """Reads ``config.json``.

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
    layers = tuple(
        layer
        for layer in range(fields.num_layers)
        if layer not in dense_layers and num_experts and (layer + 1) % step == 0
    )
    return Qwen3MoeConfig(
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
        moe_layers=layers,
        num_experts=num_experts,
        top_k=reader.integer("num_experts_per_tok"),
        moe_size=reader.integer("moe_intermediate_size"),
        dense_size=reader.integer("intermediate_size", default=0),
        renormalise=reader.flag("norm_topk_prob", default=False),
    )
