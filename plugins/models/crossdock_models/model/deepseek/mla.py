"""Multi-head latent attention of a layer on one rank: projections around an attention backend that caches the latent."""

from __future__ import annotations

import functools

import attrs
import torch
from crossdock.ops.latent_rotate import latent_rotate
from crossdock.ops.rms_norm import rms_norm
from crossdock.rows import Rows
from crossdock.types.attention import Attention, AttentionLayer, KvSpec
from crossdock.types.comm import Comms
from crossdock.types.layout import ATTN_ROWS, SumAxis
from crossdock.types.model import ForwardContext, ModelSpec

from crossdock_models._shared.linears import Linear, LinearPart, load_linear
from crossdock_models._shared.rope_rows import pair_heads
from crossdock_models._shared.shards import Shard, head_shard
from crossdock_models._shared.weights import WeightReader
from crossdock_models.model.deepseek.config import MlaSizes

LORA_NORM_EPS = 1e-6
"""Of the norms on the compressed queries and keys; not the config's ``rms_norm_eps``."""


@attrs.frozen(kw_only=True, eq=False)
class MlaWeights:
    """A layer's projections. ``down`` makes everything that comes straight from the hidden states in one product."""

    down: Linear
    """[first + r + rope, H]: compressed queries, or the queries themselves, then the latent row."""
    q_norm: torch.Tensor | None
    q_up: Linear | None
    """[heads * (nope + rope), q_lora]; None where ``down`` gives the queries."""
    kv_norm: torch.Tensor
    out: Linear


class MlaAttention:
    """Rotates, norms and projects; the backend attends in absorbed or expanded form."""

    def __init__(
        self, weights: MlaWeights, sizes: MlaSizes, layer: AttentionLayer, attention: Attention, comms: Comms
    ) -> None:
        self._weights = weights
        self._sizes = sizes
        self._layer = layer
        self._attention = attention
        self._comms = comms

    def bind(self, cache: tuple[torch.Tensor, ...]) -> None:
        self._layer = attrs.evolve(self._layer, cache=cache)

    def prepare(self, ctx: ForwardContext, hidden: Rows, rotation: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries [N, heads, nope + rope] with the rotated part last, and latent rows [N, r + rope]."""
        weights, sizes = self._weights, self._sizes
        projected = weights.down(hidden.value)
        queries, latent = projected[:, : -sizes.latent_dim], projected[:, -sizes.latent_dim :]
        if weights.q_up is not None:
            queries = weights.q_up(rms_norm(queries, weights.q_norm, LORA_NORM_EPS))
        queries = queries.unflatten(1, (self._layer.num_heads, sizes.qk_dim))
        # Both are fresh results of a product, so they may be changed where they are.
        latent_rotate(queries, latent, weights.kv_norm, LORA_NORM_EPS, rotation)
        return queries, latent

    def core(self, ctx: ForwardContext, prepared: tuple[torch.Tensor, torch.Tensor]) -> Rows:
        """Attention and output projection: the replica's rows, owing the sum over attention TP."""
        queries, latent = prepared
        out = self._attention.forward(queries, latent, None, self._layer, ctx.attn_metadata)
        return Rows(self._weights.out(out.flatten(1)), ATTN_ROWS, frozenset({SumAxis.ATTN_TP}), self._comms)


def load_mla(reader: WeightReader, sizes: MlaSizes, softmax_factor: float, spec: ModelSpec, layer: int) -> MlaAttention:
    """Reads a layer's attention: this rank's heads, and the shared latent projection whole."""
    prefix = f"model.layers.{layer}.self_attn"
    heads = head_shard(sizes.num_heads, spec.sizes, spec.place)
    kv_up = reader.matrix(f"{prefix}.kv_b_proj", rows=heads.times(sizes.nope_dim + sizes.v_head_dim))
    kv_up = kv_up.unflatten(0, (heads.size, -1))
    w_uk, w_uv = kv_up[:, : sizes.nope_dim], kv_up[:, sizes.nope_dim :]
    attention_layer = AttentionLayer(
        layer=layer,
        kv=KvSpec(kind="mla", kv_lora_rank=sizes.kv_lora_rank, rope_dim=sizes.rope_dim),
        num_heads=heads.size,
        scale=sizes.qk_dim**-0.5 * softmax_factor,
        cache=(),
        w_uk=w_uk.contiguous(),
        w_uv=w_uv.transpose(1, 2).contiguous(),
    )
    weights = _load_weights(reader, prefix, sizes, heads, is_first_rank=spec.comms.attn_tp.rank == 0)
    return MlaAttention(weights, sizes, attention_layer, spec.attention, spec.comms)


def _load_weights(
    reader: WeightReader, prefix: str, sizes: MlaSizes, heads: Shard, *, is_first_rank: bool
) -> MlaWeights:
    """A bias of the summed output enters once, on the group's first rank."""
    q_rows = heads.times(sizes.qk_dim)
    in_pairs = None if sizes.rope_is_paired else functools.partial(_paired_queries, sizes=sizes)
    latent_in_pairs = None if sizes.rope_is_paired else functools.partial(_paired_latent, sizes=sizes)
    q_up = q_norm = down_bias = out_bias = None
    if sizes.q_lora_rank is None:
        first = LinearPart(prefix=f"{prefix}.q_proj", rows=q_rows, reorder=in_pairs)
    else:
        first = LinearPart(prefix=f"{prefix}.q_a_proj")
        q_norm = reader.vector(f"{prefix}.q_a_layernorm.weight")
        q_up = load_linear(reader, [LinearPart(prefix=f"{prefix}.q_b_proj", rows=q_rows, reorder=in_pairs)])
    latent = LinearPart(prefix=f"{prefix}.kv_a_proj_with_mqa", reorder=latent_in_pairs)
    if sizes.has_bias:
        latent_bias = _paired_latent(reader.vector(f"{prefix}.kv_a_proj_with_mqa.bias"), sizes)
        # transformers gives the direct query projection no bias
        first_bias = latent_bias.new_zeros(q_rows.size)
        if sizes.q_lora_rank is not None:
            first_bias = reader.vector(f"{prefix}.q_a_proj.bias")
        down_bias = torch.cat((first_bias, latent_bias))
        out_bias = reader.vector(f"{prefix}.o_proj.bias") if is_first_rank else None
    out = LinearPart(prefix=f"{prefix}.o_proj", cols=heads.times(sizes.v_head_dim))
    return MlaWeights(
        down=load_linear(reader, [first, latent], down_bias),
        q_norm=q_norm,
        q_up=q_up,
        kv_norm=reader.vector(f"{prefix}.kv_a_layernorm.weight"),
        out=load_linear(reader, [out], out_bias),
    )


def _paired_queries(weight: torch.Tensor, sizes: MlaSizes) -> torch.Tensor:
    """Query rows with the rotated part of each head in pair order."""
    if sizes.rope_is_paired:
        return weight
    plain, turned = weight.unflatten(0, (-1, sizes.qk_dim)).split([sizes.nope_dim, sizes.rope_dim], dim=1)
    turned = pair_heads(turned.flatten(0, 1), sizes.rope_dim).view_as(turned)
    return torch.cat((plain, turned), dim=1).flatten(0, 1)


def _paired_latent(rows: torch.Tensor, sizes: MlaSizes) -> torch.Tensor:
    """Latent rows (or their bias) with the rotated part in pair order."""
    if sizes.rope_is_paired:
        return rows
    return torch.cat((rows[: sizes.kv_lora_rank], pair_heads(rows[sizes.kv_lora_rank :], sizes.rope_dim)))
