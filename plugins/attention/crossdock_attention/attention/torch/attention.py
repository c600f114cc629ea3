"""The ``torch`` attention backend: writes the step's rows to the cache, then attends group by group."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, cast

import torch
from crossdock.errors import MisuseError
from crossdock.ops.packed_linear_cpu import packs
from crossdock.ops.paged_attention_cpu import MOST_THREADS, serves
from crossdock.types.attention import AttnMetadata

from crossdock_attention.attention.torch.capabilities import TORCH_ATTENTION_CAPABILITIES
from crossdock_attention.attention.torch.gqa import gqa_decode, gqa_decode_paged, gqa_prefill
from crossdock_attention.attention.torch.mla import HeadProducts, mla_decode, mla_decode_paged, mla_prefill
from crossdock_attention.attention.torch.plan import (
    DecodeGroup,
    PagedDecodes,
    PlanRules,
    PrefillSpan,
    TorchPlan,
    make_plan,
)

if TYPE_CHECKING:
    from crossdock.types.attention import AttentionCapabilities, AttentionLayer, AttentionSpec
    from crossdock.types.batch import ForwardBatch

    from crossdock_attention.attention.torch.options import TorchAttentionOptions


class TorchAttention:
    """Attention in torch operators. Holds no state of a batch; fresh prefill rows are attended without reading the cache back."""

    def __init__(self, options: TorchAttentionOptions, spec: AttentionSpec) -> None:
        self._options = options
        kv = spec.kv
        rows_alone = options.rows == "alone" or spec.row_invariant
        self._products: dict[int, HeadProducts] = {}
        """By layer, where rows share calls."""
        self._has_products = (
            rows_alone and kv.kind == "mla" and packs(torch.empty(1, dtype=spec.dtype, device=spec.device))
        )
        key_dim, value_dim = (
            (kv.head_dim, kv.v_head_dim) if kv.kind == "gqa" else (kv.kv_lora_rank + kv.rope_dim, kv.kv_lora_rank)
        )
        self._rules = PlanRules(
            page_tokens=spec.page_tokens,
            dtype=spec.dtype,
            padding_share=options.padding_share,
            rows_alone=rows_alone,
            rows_share_calls=kv.kind == "gqa" or self._has_products,
            reads_pages=options.decode == "auto"
            and serves(
                spec.dtype,
                spec.device,
                key_dim=key_dim,
                value_dim=value_dim,
                page_tokens=spec.page_tokens,
                most_threads=sys.maxsize if rows_alone else MOST_THREADS,
            ),
        )

    @property
    def capabilities(self) -> AttentionCapabilities:
        return TORCH_ATTENTION_CAPABILITIES

    def plan(self, batch: ForwardBatch, buffers: Any | None = None) -> AttnMetadata:
        """Groups the batch by length. ``buffers`` is not used: this backend cannot be captured.

        Raises:
            MisuseError: a sequence is longer than its row of the page table, or a page id is negative.
        """
        return AttnMetadata(batch=batch, data=make_plan(batch, self._rules))

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor | None,
        layer: AttentionLayer,
        metadata: AttnMetadata,
    ) -> torch.Tensor:
        """As the protocol says.

        Raises:
            MisuseError: the batch points outside the cache pools.
        """
        plan = cast("TorchPlan", metadata.data)
        _write(layer, metadata.batch.kv_slots, k, v, plan.max_slot)
        if plan.is_one_group and plan.live_rows == q.shape[0]:
            return self._decode(q, layer, plan.decodes[0])
        value_dim = layer.kv.v_head_dim if layer.w_uv is None else layer.w_uv.shape[2]
        out = q.new_zeros(q.shape[0], layer.num_heads, value_dim)
        for group in plan.decodes:
            rows = group.rows
            if rows is None:
                out[: group.size] = self._decode(q[: group.size], layer, group)
            else:
                out.index_copy_(0, rows, self._decode(q.index_select(0, rows), layer, group))
        for span in plan.spans:
            out[span.start : span.stop] = self._prefill(q, k, v, layer, span)
        return out

    def _decode(self, q: torch.Tensor, layer: AttentionLayer, group: DecodeGroup | PagedDecodes) -> torch.Tensor:
        is_gqa = layer.kv.kind == "gqa"
        if isinstance(group, PagedDecodes):
            if is_gqa:
                return gqa_decode_paged(q, layer, group)
            return mla_decode_paged(q, layer, group, self._head_products(layer))
        return gqa_decode(q, layer, group) if is_gqa else mla_decode(q, layer, group)

    def _head_products(self, layer: AttentionLayer) -> HeadProducts | None:
        if not self._has_products:
            return None
        known = self._products.get(layer.layer)
        if known is None or known.w_uk is not layer.w_uk:
            known = self._products[layer.layer] = HeadProducts.of(layer)
        return known

    def _prefill(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor | None, layer: AttentionLayer, span: PrefillSpan
    ) -> torch.Tensor:
        rows = slice(span.start, span.stop)
        if v is not None:
            return gqa_prefill(q[rows], k[rows], v[rows], layer, span, self._options.block_rows)
        return mla_prefill(q[rows], k[rows], layer, span, self._options.block_rows)


def _write(
    layer: AttentionLayer, kv_slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor | None, max_slot: int
) -> None:
    """This step's rows into the pools. Padded rows overwrite one another in scratch page 0, which nobody reads."""
    num_slots = layer.cache[0].shape[0] * layer.cache[0].shape[1]
    if max_slot >= num_slots:
        raise MisuseError(
            f"layer {layer.layer}: the batch uses cache slot {max_slot}, the pool has {num_slots} ({layer.cache[0].shape[0]} pages)"
        )
    for pool, rows in zip(layer.cache, (k, v), strict=False):
        if rows is not None:
            pool.flatten(0, 1).index_copy_(0, kv_slots, rows)
