"""The config of decoders with grouped-query attention and routed experts; torch is not imported."""

from __future__ import annotations

import attrs
from crossdock.ops.rope_spec import RopeSpec
from crossdock.types.model import ModelInfo
from crossdock.types.parallel import ParallelSizes, RankPlace

from crossdock_models._shared.config_fields import DecoderFields
from crossdock_models._shared.gqa_sizes import GqaSizes
from crossdock_models._shared.moe_fields import MoeFields
from crossdock_models._shared.quantisation import Quantisation
from crossdock_models._shared.shards import head_shard
from crossdock_models._shared.tensor_table import TensorTable, ignored_tensors


@attrs.frozen(kw_only=True)
class GqaMoeConfig:
    """Everything that such a model is built from."""

    fields: DecoderFields
    attention: GqaSizes
    rope: RopeSpec
    quantisation: Quantisation
    moe: MoeFields
    dense_size: int
    """Intermediate size of layers without experts."""
    renormalise: bool
    renames: tuple[tuple[str, str], ...] = ()

    def info(self, sizes: ParallelSizes, place: RankPlace) -> ModelInfo:
        """Facts of the checkpoint on one rank.

        Raises:
            CheckpointError: the widths do not divide the model.
        """
        fields = self.fields
        return ModelInfo(
            model_type=fields.model_type,
            num_layers=fields.num_layers,
            hidden_size=fields.hidden_size,
            vocab_size=fields.vocab_size,
            max_position_embeddings=fields.max_positions,
            kv=self.attention.kv_spec(sizes, place),
            num_heads=head_shard(fields.num_heads, sizes, place).size,
            moe=self.moe.spec(fields.hidden_size, self.quantisation, sizes, place),
            eos_token_ids=fields.eos_token_ids,
            tensors=self._tensors().tensors,
            renames=self.renames,
            ignored_tensors=ignored_tensors(fields),
        )

    def _tensors(self) -> TensorTable:
        table = TensorTable(self.quantisation)
        table.frame(self.fields)
        for layer in range(self.fields.num_layers):
            prefix = f"model.layers.{layer}"
            self.attention.add_tensors(table, f"{prefix}.self_attn")
            if layer in self.moe.layers:
                hidden, inner = self.fields.hidden_size, self.moe.intermediate_size
                table.experts(f"{prefix}.mlp", self.moe.num_experts, hidden, inner)
            else:
                table.gated_ffn(f"{prefix}.mlp", self.fields.hidden_size, self.dense_size)
        return table
