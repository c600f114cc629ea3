"""Assembles a decoder from a checkpoint; what differs between families is handed in as two functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import attrs
import torch
from crossdock.boundary_plan import dense_block, moe_block
from crossdock.errors import CheckpointError
from crossdock.moe import MoeBlock
from crossdock.ops.rope_spec import RopeSpec
from crossdock.types.experts import ExpertTensors
from crossdock.types.layout import Owed
from crossdock.types.model import ModelInfo, ModelSpec, MoeParts

from crossdock_models._shared.config_fields import DecoderFields
from crossdock_models._shared.decoder import AttentionBlock, Decoder, DecoderLayer, DecoderParts
from crossdock_models._shared.expert_loading import load_experts
from crossdock_models._shared.feed_forward import DenseFeedForward, FeedForward, MoeFeedForward
from crossdock_models._shared.gated_ffn import GatedFfn, load_gated_ffn
from crossdock_models._shared.rope_rows import StepRotations
from crossdock_models._shared.router import TopkRouter
from crossdock_models._shared.shards import expert_shard, summed_shard
from crossdock_models._shared.vocabulary import Embedding, Head, padded_head_rows, vocab_part
from crossdock_models._shared.weights import WeightReader


@attrs.frozen(kw_only=True, eq=False)
class DecoderRecipe:
    """A family's decoder, as far as it is not the same in all of them."""

    info: ModelInfo
    fields: DecoderFields
    rope: RopeSpec
    dense_size: int
    """Intermediate size of the dense layers; 0 when there are none."""
    shared_size: int
    """Intermediate size of the shared expert; 0 when there is none."""
    load_attention: Callable[[WeightReader, int], AttentionBlock]
    """(reader, layer) -> its attention."""
    load_router: Callable[[WeightReader, str], TopkRouter]
    """(reader, prefix of the MoE) -> its router."""


def build_decoder(spec: ModelSpec, recipe: DecoderRecipe) -> Decoder:
    """Loads this rank's part of every tensor, layer by layer.

    Raises:
        CheckpointError: the checkpoint does not hold what the recipe reads.
    """
    reader = WeightReader(checkpoint=spec.checkpoint, dtype=spec.dtype, device=spec.device)
    loader = _FeedForwardLoader(spec, recipe, reader)
    layers = []
    for layer in range(recipe.fields.num_layers):
        prefix = f"model.layers.{layer}"
        layers.append(
            DecoderLayer(
                attention=recipe.load_attention(reader, layer),
                feed_forward=loader.load(layer, f"{prefix}.mlp"),
                attention_norm=reader.vector(f"{prefix}.input_layernorm.weight"),
                ffn_norm=reader.vector(f"{prefix}.post_attention_layernorm.weight"),
            )
        )
    embedding, head = _load_vocabulary(spec, recipe.fields, reader)
    parts = DecoderParts(
        info=recipe.info,
        norm_eps=recipe.fields.norm_eps,
        embedding=embedding,
        rotations=StepRotations(recipe.rope, spec.device),
        layers=tuple(layers),
        final_norm=reader.vector("model.norm.weight"),
        head=head,
        expert_tensors=tuple(loader.expert_tensors),
        read_expert=loader.read_expert,
    )
    return Decoder(parts, spec.sizes, spec.comms)


def _load_vocabulary(spec: ModelSpec, fields: DecoderFields, reader: WeightReader) -> tuple[Embedding, Head]:
    """Embedding and head; a tied model reads one matrix for both."""
    width, index = spec.sizes.attn_tp_size, spec.place.attn_tp_rank
    part = vocab_part(fields.vocab_size, width, index)
    embedded = reader.matrix("model.embed_tokens", rows=part)
    head = embedded if fields.tie_embeddings else reader.matrix("lm_head", rows=part)
    padded = padded_head_rows(head, fields.vocab_size, width)
    return Embedding(embedded, part, spec.comms), Head(padded, fields.vocab_size, spec.comms)


class _FeedForwardLoader:
    """Loads dense and MoE blocks, and collects the expert tensors of the latter."""

    def __init__(self, spec: ModelSpec, recipe: DecoderRecipe, reader: WeightReader) -> None:
        self._spec = spec
        self._recipe = recipe
        self._reader = reader
        self.expert_tensors: list[ExpertTensors] = []

    def load(self, layer: int, prefix: str) -> FeedForward:
        moe = self._recipe.info.moe
        if moe is None or layer not in moe.layers:
            return self._load_dense(layer, prefix)
        if self._spec.moe is None:
            raise CheckpointError(
                f"layer {layer} of this {self._recipe.info.model_type} checkpoint has routed experts, but no dispatcher and experts were built"
            )
        return self._load_moe(layer, prefix, moe.layers.index(layer), self._spec.moe)

    def _load_dense(self, layer: int, prefix: str) -> FeedForward:
        spec = self._spec
        dispatcher = spec.moe.dispatcher.capabilities if spec.moe else None
        block = dense_block(f"layer {layer} dense", spec.dense_tp_size, spec.sizes, dispatcher)
        part = summed_shard(self._recipe.dense_size, block.owed, spec.sizes, spec.place)
        return DenseFeedForward(block, load_gated_ffn(self._reader, prefix, part), spec.comms)

    def _load_moe(self, layer: int, prefix: str, row: int, parts: MoeParts) -> FeedForward:
        spec = self._spec
        slots = parts.num_physical_experts // spec.sizes.moe_ep_size
        first = slots * spec.place.moe_ep_rank
        tensors = self._load_experts(row, parts.maps.host.physical_to_logical[row, first : first + slots].tolist())
        parts.experts.attach(tensors)
        self.expert_tensors.append(tensors)
        block = MoeBlock(
            layer=layer,
            layer_row=row,
            router=self._recipe.load_router(self._reader, prefix),
            parts=parts,
            sizes=spec.sizes,
            place=spec.place,
        )
        boundary = moe_block(f"layer {layer} moe", parts.dispatcher.capabilities)
        return MoeFeedForward(boundary, block, self._load_shared(prefix, boundary.owed), spec.comms)

    def read_expert(self, row: int, logical_expert: int) -> Mapping[str, torch.Tensor]:
        """One expert of MoE layer ``row``, as a slot holds it."""
        return {name: tensor[0] for name, tensor in self._load_experts(row, [logical_expert]).tensors.items()}

    def _load_experts(self, row: int, logical_experts: list[int]) -> ExpertTensors:
        spec, moe = self._spec, self._recipe.info.moe
        assert moe is not None, "only models with experts come here"
        layer = moe.layers[row]
        return load_experts(
            self._reader,
            layer=layer,
            prefix=f"model.layers.{layer}.mlp.experts",
            moe=moe,
            logical_experts=logical_experts,
            part=expert_shard(moe.intermediate_size, spec.sizes, spec.place, fp8_block=moe.weight_dtype == "fp8_block"),
        )

    def _load_shared(self, prefix: str, owed: Owed) -> GatedFfn | None:
        """The shared expert, split over the ranks whose sum the routed output owes; whole where it owes none."""
        size = self._recipe.shared_size
        if not size:
            return None
        part = summed_shard(size, owed, self._spec.sizes, self._spec.place)
        return load_gated_ffn(self._reader, f"{prefix}.shared_experts", part)
