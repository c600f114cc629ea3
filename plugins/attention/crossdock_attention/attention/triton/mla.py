"""Multi-head latent attention around the kernels: queries into the latent space, values and keys out of it (DeepSeek-V2 report, 2.1)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from crossdock.types.attention import AttentionLayer

    from crossdock_attention.attention.triton.plan import PrefillRows


def _projections(layer: AttentionLayer) -> tuple[torch.Tensor, torch.Tensor]:
    assert layer.w_uk is not None, "an MLA layer has both up-projections"
    assert layer.w_uv is not None, "an MLA layer has both up-projections"
    return layer.w_uk, layer.w_uv


def latent_queries(q: torch.Tensor, layer: AttentionLayer) -> tuple[torch.Tensor, torch.Tensor]:
    """[n, heads, nope + rope] -> [n, heads, r], for which the key up-projection is moved to the query, and [n, heads, rope], a view."""
    w_uk, _ = _projections(layer)
    nope = w_uk.shape[1]
    return torch.bmm(q[..., :nope].transpose(0, 1), w_uk).transpose(0, 1), q[..., nope:]


def values_of(context: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
    """[n, heads, r] -> [n, heads, dv] contiguous."""
    _, w_uv = _projections(layer)
    values = context.new_empty(context.shape[0], w_uv.shape[0], w_uv.shape[2])
    torch.bmm(context.transpose(0, 1), w_uv, out=values.transpose(0, 1))
    return values


def expand_contexts(
    latent_rows: torch.Tensor, layer: AttentionLayer, rows: PrefillRows, page_table: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Keys of all contexts, [L, heads, nope], and [L, 1, rope] for all heads; values [L, heads, dv].

    Rows of this step are taken from ``latent_rows`` [N, r + rope], older ones from the cache; contexts are packed as ``rows.kv_starts`` says.
    Without older ones they stay where they are, as ``rows.first_rows`` says.
    """
    w_uk, w_uv = _projections(layer)
    heads, nope, rank = w_uk.shape
    latent = latent_rows if rows.is_fresh else _packed_contexts(latent_rows, layer.cache[0], rows, page_table)
    keys = (latent[:, :rank] @ w_uk.reshape(heads * nope, rank).T).view(-1, heads, nope)
    values = (latent[:, :rank] @ w_uv.transpose(0, 1).reshape(rank, -1)).view(latent.shape[0], heads, -1)
    return keys, latent[:, None, rank:], values


def _packed_contexts(
    latent_rows: torch.Tensor, pool: torch.Tensor, rows: PrefillRows, page_table: torch.Tensor
) -> torch.Tensor:
    """[L, r + rope]: every sequence's cached rows and this step's, back to back."""
    parts: list[torch.Tensor] = []
    for sequence, first, count, prefix in rows.contexts:
        if prefix:
            pages = page_table[sequence, : -(-prefix // pool.shape[1])].long()
            parts.append(pool[pages].flatten(0, 1)[:prefix])
        parts.append(latent_rows[first : first + count])
    return torch.cat(parts)
