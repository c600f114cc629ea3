"""The config of DeepSeek-V2 and V3 checkpoints; torch is not imported."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
from crossdock.ops.rope_spec import RopeSpec
from crossdock.types.attention import KvSpec
from crossdock.types.model import ModelInfo
from crossdock.types.parallel import ParallelSizes, RankPlace

from crossdock_models._shared.config_fields import ConfigReader, DecoderFields, read_decoder_fields
from crossdock_models._shared.moe_fields import MoeFields
from crossdock_models._shared.quantisation import Quantisation, read_quantisation
from crossdock_models._shared.rope_fields import read_rope_fields
from crossdock_models._shared.shards import head_shard
from crossdock_models._shared.tensor_table import TensorTable, ignored_tensors

FAMILIES = ("deepseek_v2", "deepseek_v3")


@attrs.frozen(kw_only=True)
class MlaSizes:
    """Sizes of multi-head latent attention, of the whole model."""

    num_heads: int
    hidden_size: int
    q_lora_rank: int | None
    """None: queries come straight from the hidden states."""
    kv_lora_rank: int
    nope_dim: int
    rope_dim: int
    v_head_dim: int
    has_bias: bool
    rope_is_paired: bool
    """Rotated pairs are ``(2i, 2i + 1)``; else ``(i, i + rope_dim / 2)``."""

    @property
    def qk_dim(self) -> int:
        return self.nope_dim + self.rope_dim

    @property
    def latent_dim(self) -> int:
        return self.kv_lora_rank + self.rope_dim

    def add_tensors(self, table: TensorTable, prefix: str) -> None:
        """Checkpoint tensors of one layer's attention."""
        q_size = self.num_heads * self.qk_dim
        if self.q_lora_rank is None:
            table.matrix(f"{prefix}.q_proj", q_size, self.hidden_size)
        else:
            table.matrix(f"{prefix}.q_a_proj", self.q_lora_rank, self.hidden_size)
            table.vector(f"{prefix}.q_a_layernorm.weight", self.q_lora_rank)
            table.matrix(f"{prefix}.q_b_proj", q_size, self.q_lora_rank)
        table.matrix(f"{prefix}.kv_a_proj_with_mqa", self.latent_dim, self.hidden_size)
        table.vector(f"{prefix}.kv_a_layernorm.weight", self.kv_lora_rank)
        table.matrix(f"{prefix}.kv_b_proj", self.num_heads * (self.nope_dim + self.v_head_dim), self.kv_lora_rank)
        table.matrix(f"{prefix}.o_proj", self.hidden_size, self.num_heads * self.v_head_dim)
        if self.has_bias:
            if self.q_lora_rank is not None:
                table.vector(f"{prefix}.q_a_proj.bias", self.q_lora_rank)
            table.vector(f"{prefix}.kv_a_proj_with_mqa.bias", self.latent_dim)
            table.vector(f"{prefix}.o_proj.bias", self.hidden_size)


@attrs.frozen(kw_only=True)
class DeepseekRouting:
    """How tokens choose experts, of those groups that are kept."""

    scoring: str
    group_score: str
    kept_groups: int
    renormalise: bool
    routed_scaling: float
    has_correction_bias: bool


@attrs.frozen(kw_only=True)
class DeepseekConfig:
    """Everything that the model is built from."""

    fields: DecoderFields
    attention: MlaSizes
    rope: RopeSpec
    quantisation: Quantisation
    moe: MoeFields
    routing: DeepseekRouting
    dense_size: int
    shared_size: int
    """All shared experts are stored as one block of this size; 0 when there is none."""
    num_mtp_layers: int
    """Layers for multi-token prediction behind the last one; in the checkpoint, not read."""

    def info(self, sizes: ParallelSizes, place: RankPlace) -> ModelInfo:
        """Facts of the checkpoint on one rank.

        Raises:
            CheckpointError: the widths do not divide the model.
        """
        fields, mla = self.fields, self.attention
        mtp = tuple(f"model.layers.{fields.num_layers + i}.**" for i in range(self.num_mtp_layers))
        return ModelInfo(
            model_type=fields.model_type,
            num_layers=fields.num_layers,
            hidden_size=fields.hidden_size,
            vocab_size=fields.vocab_size,
            max_position_embeddings=fields.max_positions,
            kv=KvSpec(kind="mla", kv_lora_rank=mla.kv_lora_rank, rope_dim=mla.rope_dim),
            num_heads=head_shard(fields.num_heads, sizes, place).size,
            moe=self.moe.spec(fields.hidden_size, self.quantisation, sizes, place),
            eos_token_ids=fields.eos_token_ids,
            tensors=self._tensors().tensors,
            ignored_tensors=(*ignored_tensors(fields), *mtp),
        )

    def _tensors(self) -> TensorTable:
        table = TensorTable(self.quantisation)
        table.frame(self.fields)
        hidden = self.fields.hidden_size
        for layer in range(self.fields.num_layers):
            prefix = f"model.layers.{layer}"
            self.attention.add_tensors(table, f"{prefix}.self_attn")
            if layer not in self.moe.layers:
                table.gated_ffn(f"{prefix}.mlp", hidden, self.dense_size)
                continue
            table.experts(f"{prefix}.mlp", self.moe.num_experts, hidden, self.moe.intermediate_size)
            if self.routing.has_correction_bias:
                table.vector(f"{prefix}.mlp.gate.e_score_correction_bias", self.moe.num_experts)
            if self.shared_size:
                table.gated_ffn(f"{prefix}.mlp.shared_experts", hidden, self.shared_size)
        return table


def read_deepseek(config: Mapping[str, Any]) -> DeepseekConfig:
    """Reads ``config.json`` of either family.

    Raises:
        CheckpointError: a field is missing or out of range.
    """
    reader = ConfigReader(config)
    fields = read_decoder_fields(reader)
    if reader.flag("mlp_bias", default=False):
        raise reader.wrong("mlp_bias", "is true; feed-forward blocks with biases are not implemented")
    num_experts = reader.integer("n_routed_experts", "num_local_experts", "num_experts", default=0)
    first, step = reader.integer("first_k_dense_replace", default=0), reader.integer("moe_layer_freq", default=1)
    layers = tuple(layer for layer in range(first, fields.num_layers) if layer % step == 0) if num_experts else ()
    moe_size = reader.integer("moe_intermediate_size", default=0)
    num_groups, routing = _read_routing(reader)
    attention = _read_mla(reader, fields)
    return DeepseekConfig(
        fields=fields,
        attention=attention,
        rope=read_rope_fields(reader, attention.rope_dim),
        quantisation=read_quantisation(config),
        moe=MoeFields(
            layers=layers,
            num_experts=num_experts,
            top_k=reader.integer("num_experts_per_tok", default=0),
            intermediate_size=moe_size,
            num_groups=num_groups,
        ),
        routing=routing,
        dense_size=reader.integer("intermediate_size"),
        shared_size=moe_size * reader.integer("n_shared_experts", default=0),
        num_mtp_layers=reader.integer("num_nextn_predict_layers", "num_mtp_layers", default=1),
    )


def _read_mla(reader: ConfigReader, fields: DecoderFields) -> MlaSizes:
    is_v3 = fields.model_type == "deepseek_v3"
    return MlaSizes(
        num_heads=fields.num_heads,
        hidden_size=fields.hidden_size,
        q_lora_rank=reader.optional_integer("q_lora_rank"),
        kv_lora_rank=reader.integer("kv_lora_rank"),
        nope_dim=reader.integer("qk_nope_head_dim"),
        rope_dim=reader.integer("qk_rope_head_dim"),
        v_head_dim=reader.integer("v_head_dim"),
        has_bias=reader.flag("attention_bias", default=False),
        rope_is_paired=reader.flag("rope_interleave", default=True) if is_v3 else True,
    )


def _read_routing(reader: ConfigReader) -> tuple[int, DeepseekRouting]:
    """Groups of experts, and the rule.

    V3 (``noaux_tc``): sigmoid, correction bias for the choice, groups by the sum of their two best. V2: softmax, no bias, groups by their
    maximum only when ``topk_method`` says so, and weights that are scaled but never renormalised: transformers' class, our oracle, ignores
    ``norm_topk_prob``, and every published checkpoint has it false.
    """
    is_v3 = reader.text("model_type") == "deepseek_v3"
    method = reader.text("topk_method", default="noaux_tc" if is_v3 else "greedy")
    known = ("noaux_tc",) if is_v3 else ("greedy", "group_limited_greedy")
    if method not in known:
        raise reader.wrong("topk_method", f"is {method!r}; known: {', '.join(known)}")
    has_groups = method != "greedy"
    num_groups = reader.integer("n_group", default=1) if has_groups else 1
    routing = DeepseekRouting(
        scoring=reader.text("scoring_func", default="sigmoid" if is_v3 else "softmax"),
        group_score="sum_of_two_best" if is_v3 else "max",
        kept_groups=reader.integer("topk_group", default=num_groups) if has_groups else 1,
        renormalise=is_v3 and reader.flag("norm_topk_prob", default=True),
        routed_scaling=reader.number("routed_scaling_factor", default=1.0),
        has_correction_bias=is_v3,
    )
    if routing.scoring not in ("softmax", "sigmoid"):
        raise reader.wrong("scoring_func", f"is {routing.scoring!r}; known: softmax, sigmoid")
    if not 1 <= routing.kept_groups <= num_groups:
        raise reader.wrong("topk_group", f"is {routing.kept_groups}; must be 1 to n_group = {num_groups}")
    return num_groups, routing
