"""Grouped-query attention of a layer on one rank, with or without a norm on queries and keys."""

from __future__ import annotations

import functools

import attrs
import torch
from crossdock.ops.norm_rotate import norm_rotate
from crossdock.rows import Rows
from crossdock.types.attention import Attention, AttentionLayer
from crossdock.types.comm import Comms
from crossdock.types.layout import ATTN_ROWS, SumAxis
from crossdock.types.model import ForwardContext, ModelSpec

from crossdock_models._shared.gqa_sizes import GqaSizes
from crossdock_models._shared.linears import Linear, LinearPart, load_linear
from crossdock_models._shared.rope_rows import pair_heads
from crossdock_models._shared.shards import Shard, head_shard, kv_head_shard
from crossdock_models._shared.weights import WeightReader


class GqaAttention:
    """Projections, norms and rotation around an attention backend. Queries, keys and values come from one product."""

    def __init__(
        self,
        *,
        qkv: Linear,
        out: Linear,
        qk_norm: torch.Tensor | None,
        norm_eps: float,
        layer: AttentionLayer,
        attention: Attention,
        comms: Comms,
    ) -> None:
        """``qk_norm`` [heads + kv_heads, head_dim]: norm weights of every query and key head, in pair order."""
        self._qkv = qkv
        self._out = out
        self._qk_norm = qk_norm
        self._norm_eps = norm_eps
        self._layer = layer
        self._attention = attention
        self._comms = comms
        self._rotated_heads = layer.num_heads + layer.kv.num_kv_heads

    def bind(self, cache: tuple[torch.Tensor, ...]) -> None:
        self._layer = attrs.evolve(self._layer, cache=cache)

    def prepare(self, ctx: ForwardContext, hidden: Rows, rotation: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotated queries and keys [N, heads + kv_heads, d], and values [N, kv_heads, d]."""
        heads = self._qkv(hidden.value).unflatten(1, (-1, self._layer.kv.head_dim))
        rotated, values = heads[:, : self._rotated_heads], heads[:, self._rotated_heads :]
        return norm_rotate(rotated, self._qk_norm, self._norm_eps, rotation), values

    def core(self, ctx: ForwardContext, prepared: tuple[torch.Tensor, torch.Tensor]) -> Rows:
        """Attention and output projection: the replica's rows, owing the sum over attention TP."""
        rotated, values = prepared
        queries, keys = rotated[:, : self._layer.num_heads], rotated[:, self._layer.num_heads :]
        out = self._attention.forward(queries, keys, values, self._layer, ctx.attn_metadata)
        return Rows(self._out(out.flatten(1)), ATTN_ROWS, frozenset({SumAxis.ATTN_TP}), self._comms)


def load_gqa(reader: WeightReader, model: GqaSizes, spec: ModelSpec, layer: int) -> GqaAttention:
    """Reads this rank's heads of a layer's ``{q,k,v,o}_proj`` and, where the model has them, ``{q,k}_norm`` and biases."""
    prefix, dim = f"model.layers.{layer}.self_attn", model.head_dim
    heads = head_shard(model.num_heads, spec.sizes, spec.place)
    kv_heads = kv_head_shard(model.num_kv_heads, spec.sizes, spec.place)
    q_rows, kv_rows = heads.times(dim), kv_heads.times(dim)
    in_pairs = functools.partial(pair_heads, head_dim=dim)
    qkv = [
        LinearPart(prefix=f"{prefix}.q_proj", rows=q_rows, reorder=in_pairs),
        LinearPart(prefix=f"{prefix}.k_proj", rows=kv_rows, reorder=in_pairs),
        LinearPart(prefix=f"{prefix}.v_proj", rows=kv_rows),
    ]
    qkv_bias = out_bias = None
    if model.has_bias:
        qkv_bias = _qkv_bias(reader, prefix, q_rows, kv_rows, dim)
        # A bias of a summed output enters once, on the group's first rank.
        out_bias = reader.vector(f"{prefix}.o_proj.bias") if spec.comms.attn_tp.rank == 0 else None
    return GqaAttention(
        qkv=load_linear(reader, qkv, qkv_bias),
        out=load_linear(reader, [LinearPart(prefix=f"{prefix}.o_proj", cols=q_rows)], out_bias),
        qk_norm=_qk_norm(reader, prefix, heads.size, kv_heads.size, dim) if model.has_qk_norm else None,
        norm_eps=model.norm_eps,
        layer=AttentionLayer(
            layer=layer,
            kv=model.kv_spec(spec.sizes, spec.place),
            num_heads=heads.size,
            scale=dim**-0.5,
            cache=(),
        ),
        attention=spec.attention,
        comms=spec.comms,
    )


def _qkv_bias(reader: WeightReader, prefix: str, q_rows: Shard, kv_rows: Shard, head_dim: int) -> torch.Tensor:
    return torch.cat(
        [
            pair_heads(reader.vector(f"{prefix}.q_proj.bias", q_rows), head_dim),
            pair_heads(reader.vector(f"{prefix}.k_proj.bias", kv_rows), head_dim),
            reader.vector(f"{prefix}.v_proj.bias", kv_rows),
        ]
    )


def _qk_norm(reader: WeightReader, prefix: str, heads: int, kv_heads: int, head_dim: int) -> torch.Tensor:
    """[heads + kv_heads, head_dim]: the two norm weights, once for each head."""
    q_norm = pair_heads(reader.vector(f"{prefix}.q_norm.weight"), head_dim)
    k_norm = pair_heads(reader.vector(f"{prefix}.k_norm.weight"), head_dim)
    return torch.cat((q_norm.expand(heads, -1), k_norm.expand(kv_heads, -1)))
