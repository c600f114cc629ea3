"""Multi-head latent attention over the cached latent rows, in absorbed and in expanded form (DeepSeek-V2 report, section 2.1)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import torch
from crossdock.ops.packed_linear_cpu import CpuLinear
from crossdock.ops.paged_attention_cpu import paged_attention_cpu

from crossdock_attention.attention.torch.gqa import causal_attention, causal_blocks

if TYPE_CHECKING:
    from crossdock.types.attention import AttentionLayer

    from crossdock_attention.attention.torch.plan import DecodeGroup, PagedDecodes, PrefillSpan


MAX_ABSORBED_ROWS = 64
"""Where the formula has no limit (tiny latents), one fused expanded attention is still faster than two products and a softmax."""


def mla_decode(q: torch.Tensor, layer: AttentionLayer, group: DecodeGroup) -> torch.Tensor:
    """One query row a sequence, absorbed: [b, heads, nope + rope] -> [b, heads, dv]. Cost grows with the latent, never with heads x context x head size."""
    latent = layer.cache[0].flatten(0, 1).index_select(0, group.slots).view(group.size, group.length, -1)
    mask = None if group.mask is None else group.mask[:, 0]
    context = _attend_latent(_latent_queries(q, layer), latent, mask, layer)
    return _values_of(context, layer)


def mla_decode_paged(
    q: torch.Tensor, layer: AttentionLayer, group: PagedDecodes, products: HeadProducts | None
) -> torch.Tensor:
    """The same through the kernel that reads pages in place: the latent part of a cached row is its value."""
    (pool,) = layer.cache
    keys = pool.unsqueeze(2)
    values = keys[..., : layer.kv.kv_lora_rank]
    queries = _latent_queries(q, layer) if products is None else products.latent_queries(q)
    context = paged_attention_cpu(queries, keys, values, group.pages, group.lengths, layer.scale)
    return _values_of(context, layer) if products is None else products.values(context)


@attrs.frozen(eq=False)
class HeadProducts:
    """Both up-projections of a layer, head by head, for products in which a row's bits do not depend on the rows beside it."""

    w_uk: torch.Tensor
    keys: CpuLinear
    values: CpuLinear

    @staticmethod
    def of(layer: AttentionLayer) -> HeadProducts:
        """Only where ``packs`` says so of both matrices."""
        w_uk, w_uv = _projections(layer)
        return HeadProducts(w_uk, CpuLinear(w_uk.transpose(1, 2)), CpuLinear(w_uv.transpose(1, 2)))

    def latent_queries(self, q: torch.Tensor) -> torch.Tensor:
        """[n, heads, nope + rope] -> [n, heads, r + rope]."""
        nope, rank = self.w_uk.shape[1:]
        lifted = q.new_empty(q.shape[0], q.shape[1], rank + q.shape[2] - nope)
        self.keys.write(q[..., :nope], lifted[..., :rank])
        lifted[..., rank:] = q[..., nope:]
        return lifted


def mla_prefill(
    q: torch.Tensor, latent: torch.Tensor, layer: AttentionLayer, span: PrefillSpan, block_rows: int
) -> torch.Tensor:
    """Rows of one sequence: q [n, heads, nope + rope], latent [n, r + rope] -> [n, heads, dv]."""
    if span.slots is not None:
        latent = layer.cache[0].flatten(0, 1).index_select(0, span.slots)
        if q.shape[0] <= absorbed_rows(layer):
            return _absorbed_chunk(q, latent, layer, span.prefix, block_rows)
    return _expanded(q, latent, layer, span.prefix, block_rows)


def absorbed_rows(layer: AttentionLayer) -> int:
    """Most query rows for which the absorbed form of a chunk costs less than expanding its whole context.

    A context token costs a head ``rows * (2 r + rope)`` absorbed and ``r * (nope + dv) + rows * (nope + rope + dv)`` expanded (the causal
    half is the same share of both).
    """
    w_uk, w_uv = _projections(layer)
    rank, nope, value_dim = w_uk.shape[2], w_uk.shape[1], w_uv.shape[2]
    extra = 2 * rank - nope - value_dim
    return rank * (nope + value_dim) // extra if extra > 0 else MAX_ABSORBED_ROWS


def _projections(layer: AttentionLayer) -> tuple[torch.Tensor, torch.Tensor]:
    assert layer.w_uk is not None, "an MLA layer has both up-projections"
    assert layer.w_uv is not None, "an MLA layer has both up-projections"
    return layer.w_uk, layer.w_uv


def _latent_queries(q: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
    """[n, heads, nope + rope] -> [n, heads, r + rope]: the key up-projection is moved to the query."""
    w_uk, _ = _projections(layer)
    nope = w_uk.shape[1]
    lifted = torch.bmm(q[..., :nope].transpose(0, 1), w_uk)
    return torch.cat((lifted.transpose(0, 1), q[..., nope:]), dim=-1)


def _attend_latent(
    queries: torch.Tensor, latent: torch.Tensor, mask: torch.Tensor | None, layer: AttentionLayer
) -> torch.Tensor:
    """queries [b, n, r + rope], latent [b, L, r + rope], mask [b, 1 or n, L] -> [b, n, r]."""
    rank = layer.kv.kv_lora_rank
    bias = queries.new_zeros(1) if mask is None else mask
    scores = torch.baddbmm(bias, queries, latent.transpose(1, 2), alpha=layer.scale)
    weights = scores.softmax(-1, dtype=torch.float32).to(latent.dtype)
    return torch.bmm(weights, latent[..., :rank])


def _values_of(context: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
    """[n, heads, r] -> [n, heads, dv]."""
    _, w_uv = _projections(layer)
    return torch.bmm(context.transpose(0, 1), w_uv).transpose(0, 1)


def _absorbed_chunk(
    q: torch.Tensor, latent: torch.Tensor, layer: AttentionLayer, prefix: int, block_rows: int
) -> torch.Tensor:
    queries = _latent_queries(q, layer).transpose(0, 1)
    context = queries.new_empty(q.shape[0], layer.num_heads, layer.kv.kv_lora_rank)
    for start, stop, seen in causal_blocks(q.shape[0], prefix, block_rows, q.device):
        mask = torch.zeros(seen.shape, dtype=q.dtype, device=q.device).masked_fill_(~seen, float("-inf"))
        keys = latent[: prefix + stop].expand(layer.num_heads, -1, -1)
        context[start:stop] = _attend_latent(queries[:, start:stop], keys, mask[None], layer).transpose(0, 1)
    return _values_of(context, layer)


def _expanded(
    q: torch.Tensor, latent: torch.Tensor, layer: AttentionLayer, prefix: int, block_rows: int
) -> torch.Tensor:
    """Keys and values of every head from the latent rows."""
    w_uk, w_uv = _projections(layer)
    rank = layer.kv.kv_lora_rank
    compressed = latent[:, :rank].expand(layer.num_heads, -1, -1)
    rotated = latent[:, rank:].expand(layer.num_heads, -1, -1)
    keys = torch.cat((torch.bmm(compressed, w_uk.transpose(1, 2)), rotated), dim=-1)
    values = torch.bmm(compressed, w_uv)
    return causal_attention(q, keys.transpose(0, 1), values.transpose(0, 1), layer.scale, prefix, block_rows)
