"""Grouped-query attention over gathered keys and values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from crossdock.ops.paged_attention_cpu import paged_attention_cpu
from crossdock.ops.prefill_attention_cpu import prefill_attention_cpu, takes
from torch.nn import functional

if TYPE_CHECKING:
    from crossdock.types.attention import AttentionLayer

    from crossdock_attention.attention.torch.plan import DecodeGroup, PagedDecodes, PrefillSpan


def gqa_decode(q: torch.Tensor, layer: AttentionLayer, group: DecodeGroup) -> torch.Tensor:
    """One query row a sequence: [b, heads, d] -> [b, heads, dv].

    The query heads that share a key head are folded into rows of one attention: exact, and 3.6 times faster than ``enable_gqa`` in bf16.
    """
    key_pool, value_pool = layer.cache
    shape = (group.size, group.length, layer.kv.num_kv_heads, -1)
    keys = key_pool.flatten(0, 1).index_select(0, group.slots).view(shape).transpose(1, 2)
    values = value_pool.flatten(0, 1).index_select(0, group.slots).view(shape).transpose(1, 2)
    folded = q.reshape(group.size, layer.kv.num_kv_heads, -1, q.shape[-1])
    out = functional.scaled_dot_product_attention(folded, keys, values, attn_mask=group.mask, scale=layer.scale)
    return out.reshape(group.size, layer.num_heads, -1)


def gqa_decode_paged(q: torch.Tensor, layer: AttentionLayer, group: PagedDecodes) -> torch.Tensor:
    """The same through the kernel that reads pages in place."""
    keys, values = layer.cache
    return paged_attention_cpu(q, keys, values, group.pages, group.lengths, layer.scale)


def gqa_prefill(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: AttentionLayer, span: PrefillSpan, block_rows: int
) -> torch.Tensor:
    """Rows of one sequence: q [n, heads, d], k and v [n, kv_heads, d] -> [n, heads, dv]."""
    if span.slots is not None:
        key_pool, value_pool = layer.cache
        k = key_pool.flatten(0, 1).index_select(0, span.slots)
        v = value_pool.flatten(0, 1).index_select(0, span.slots)
    return causal_attention(q, k, v, layer.scale, span.prefix, block_rows)


def causal_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, prefix: int, block_rows: int
) -> torch.Tensor:
    """q [n, heads, d] against k [prefix + n, kv_heads, d] and v: row i sees keys 0 to prefix + i. Returns [n, heads, dv].

    The C kernel takes 0.4 to 0.7 times as long as torch's fused attention (1 thread, Zen 4, 128 to 1024 rows).
    """
    if takes(q, k, v):
        return prefill_attention_cpu(q, k, v, scale)
    value_dim, spare = v.shape[2], k.shape[2] - v.shape[2]
    if spare > 0:
        # The fused kernel wants values of the keys' size.
        v = functional.pad(v, (0, spare))
    q, k, v = q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1)
    if prefix == 0:
        out = functional.scaled_dot_product_attention(
            q[None], k[None], v[None], is_causal=True, scale=scale, enable_gqa=True
        )[0]
    else:
        out = q.new_empty(q.shape[0], q.shape[1], v.shape[2])
        for start, stop, mask in causal_blocks(q.shape[1], prefix, block_rows, q.device):
            keys, values = k[None, :, : prefix + stop], v[None, :, : prefix + stop]
            rows = q[None, :, start:stop]
            out[:, start:stop] = functional.scaled_dot_product_attention(
                rows, keys, values, attn_mask=mask, scale=scale, enable_gqa=True
            )[0]
    return out[..., :value_dim].transpose(0, 1)


def causal_blocks(
    rows: int, prefix: int, block_rows: int, device: torch.device
) -> Iterator[tuple[int, int, torch.Tensor]]:
    """Blocks of query rows with the mask [rows of the block, prefix + end of the block] of what each may see."""
    for start in range(0, rows, block_rows):
        stop = min(start + block_rows, rows)
        seen = torch.ones(stop - start, prefix + stop, dtype=torch.bool, device=device)
        yield start, stop, seen.tril(prefix + start)
