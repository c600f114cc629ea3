"""Collects the tensors that a model reads, as ``ModelInfo.tensors`` wants them; torch is not imported."""

from __future__ import annotations

import attrs
from crossdock.types.model import TensorSpec

from crossdock_models._shared.config_fields import DecoderFields
from crossdock_models._shared.quantisation import Quantisation


@attrs.define
class TensorTable:
    """Names and shapes in checkpoint form."""

    quantisation: Quantisation
    tensors: dict[str, TensorSpec] = attrs.field(factory=dict)

    def matrix(self, prefix: str, rows: int, cols: int) -> None:
        name = f"{prefix}.weight"
        self.tensors[name] = TensorSpec(shape=(rows, cols), fp8_block=self.quantisation.covers(name))

    def vector(self, name: str, size: int) -> None:
        self.tensors[name] = TensorSpec(shape=(size,))

    def gated_ffn(self, prefix: str, hidden_size: int, intermediate_size: int) -> None:
        """Gate, up and down projections of one feed-forward block or expert."""
        self.matrix(f"{prefix}.gate_proj", intermediate_size, hidden_size)
        self.matrix(f"{prefix}.up_proj", intermediate_size, hidden_size)
        self.matrix(f"{prefix}.down_proj", hidden_size, intermediate_size)

    def experts(self, prefix: str, num_experts: int, hidden_size: int, intermediate_size: int) -> None:
        """Router and routed experts of a layer."""
        self.matrix(f"{prefix}.gate", num_experts, hidden_size)
        for expert in range(num_experts):
            self.gated_ffn(f"{prefix}.experts.{expert}", hidden_size, intermediate_size)

    def frame(self, fields: DecoderFields) -> None:
        """Embedding, norms around every block, final norm and head."""
        self.matrix("model.embed_tokens", fields.vocab_size, fields.hidden_size)
        self.vector("model.norm.weight", fields.hidden_size)
        for layer in range(fields.num_layers):
            self.vector(f"model.layers.{layer}.input_layernorm.weight", fields.hidden_size)
            self.vector(f"model.layers.{layer}.post_attention_layernorm.weight", fields.hidden_size)
        if not fields.tie_embeddings:
            self.matrix("lm_head", fields.vocab_size, fields.hidden_size)


def ignored_tensors(fields: DecoderFields) -> tuple[str, ...]:
    """Patterns of tensors that checkpoints of any family may hold and that are not read: rotary buffers, and the head of a tied model."""
    tied = ("lm_head.weight",) if fields.tie_embeddings else ()
    return (*tied, "model.layers.*.self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq")
