"""The ``triton`` attention backend: cached rows are read where they lie, by page; decode can be captured in a graph."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from crossdock.types.attention import AttnMetadata

from crossdock_attention.attention.triton.capabilities import TRITON_ATTENTION_CAPABILITIES
from crossdock_attention.attention.triton.kernels.paged_decode import (
    DecodeHeads,
    NewRows,
    choose_splits,
    paged_decode,
)
from crossdock_attention.attention.triton.kernels.prefill import prefill
from crossdock_attention.attention.triton.kernels.store_rows import store_rows
from crossdock_attention.attention.triton.mla import expand_contexts, latent_queries, values_of
from crossdock_attention.attention.triton.plan import (
    DecodeBuffers,
    DecodeRows,
    PrefillRows,
    TritonPlan,
    fill_buffers,
    make_plan,
)

if TYPE_CHECKING:
    from crossdock.types.attention import AttentionCapabilities, AttentionLayer, AttentionSpec
    from crossdock.types.batch import ForwardBatch


class TritonAttention:
    """GQA and MLA over the paged cache; holds no state of a batch."""

    def __init__(self, spec: AttentionSpec) -> None:
        self._spec = spec
        self._heads = DecodeHeads(
            num_heads=spec.num_heads,
            key_heads=spec.kv.num_kv_heads,
            is_latent=spec.kv.kind == "mla",
            element_bytes=spec.dtype.itemsize,
        )

    @property
    def capabilities(self) -> AttentionCapabilities:
        return TRITON_ATTENTION_CAPABILITIES

    def plan(self, batch: ForwardBatch, buffers: Any | None = None) -> AttnMetadata:
        """With ``buffers`` (see ``allocate_buffers``) the plan of a captured step, else of an eager batch."""
        if buffers is not None:
            return AttnMetadata(batch=batch, data=fill_buffers(batch, cast("DecodeBuffers", buffers)))
        return AttnMetadata(batch=batch, data=make_plan(batch, self._spec.page_tokens, self._heads))

    def allocate_buffers(self, bucket: int, page_columns: int, *, shares_contexts: bool = False) -> DecodeBuffers:
        """Static storage of one bucket; the splits are fixed by its size and the longest context it can hold."""
        tile = self._heads.tile(bucket)
        groups = self._heads.groups(tile)
        return DecodeBuffers(
            page_table=torch.zeros(bucket, page_columns, dtype=torch.int32, device=self._spec.device),
            seq_lens=torch.zeros(bucket, dtype=torch.int32, device=self._spec.device),
            tile=tile,
            splits=choose_splits(bucket, groups, page_columns * self._spec.page_tokens, tile),
            arrivals=torch.zeros(bucket * groups, dtype=torch.int32, device=self._spec.device),
            shares_contexts=shares_contexts,
        )

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor | None,
        layer: AttentionLayer,
        metadata: AttnMetadata,
    ) -> torch.Tensor:
        """As the protocol says."""
        plan = cast("TritonPlan", metadata.data)
        slots = metadata.batch.kv_slots
        singles = plan.single_rows
        if singles is not None and not singles.shares_contexts:
            keys = k if v is not None else k.unsqueeze(1)
            return self._decode(q, layer, singles, NewRows(k=keys, v=v, slots=slots))
        store_rows(slots, (k,) if v is None else (k, v), layer.cache)
        if singles is not None:
            return self._decode(q, layer, singles, None)
        value_dim = layer.kv.v_head_dim if layer.w_uv is None else layer.w_uv.shape[2]
        # Padded rows of the result are zero; without any, every row is written below.
        empty = q.new_empty if plan.live_rows == q.shape[0] else q.new_zeros
        out = empty(q.shape[0], layer.num_heads, value_dim)
        if plan.decode is not None and plan.decode.rows is not None:
            rows = plan.decode.rows
            out.index_copy_(0, rows, self._decode(q.index_select(0, rows), layer, plan.decode, None))
        if plan.prefill is not None:
            self._prefill(q, (k, v), out, layer, plan.prefill, metadata.batch)
        return out

    def _decode(self, q: torch.Tensor, layer: AttentionLayer, rows: DecodeRows, new: NewRows | None) -> torch.Tensor:
        """``new``: the step's own keys and values, where they are not in the cache yet."""
        is_latent = layer.kv.kind == "mla"
        keys, values = (layer.cache[0].unsqueeze(2), None) if is_latent else layer.cache
        queries, rest = latent_queries(q, layer) if is_latent else (q, None)
        context = paged_decode(
            queries,
            keys,
            values,
            rows.page_table,
            rows.seq_lens,
            layer.scale,
            rows.splits,
            q_rest=rest,
            new=new,
            arrivals=rows.arrivals,
            tile=rows.tile,
        )
        return values_of(context, layer) if is_latent else context

    def _prefill(
        self,
        q: torch.Tensor,
        new: tuple[torch.Tensor, torch.Tensor | None],
        out: torch.Tensor,
        layer: AttentionLayer,
        rows: PrefillRows,
        batch: ForwardBatch,
    ) -> None:
        k, v = new
        starts = rows.first_rows if rows.is_fresh else rows.kv_starts
        if v is None:
            keys, rest, values = expand_contexts(k, layer, rows, batch.page_table)
            prefill(q, keys, values, out, rows.blocks, layer.scale, kv_starts=starts, k_rest=rest, tile=rows.tile)
        elif rows.is_fresh:
            prefill(q, k, v, out, rows.blocks, layer.scale, kv_starts=starts, tile=rows.tile)
        else:
            prefill(
                q,
                layer.cache[0].flatten(0, 1),
                layer.cache[1].flatten(0, 1),
                out,
                rows.blocks,
                layer.scale,
                page_table=batch.page_table,
                page_tokens=self._spec.page_tokens,
                tile=rows.tile,
            )
