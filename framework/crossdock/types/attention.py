"""Attention over the paged KV cache, GQA and MLA (DESIGN section 8)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import attrs

from crossdock.types.batch import ForwardBatch

if TYPE_CHECKING:
    import torch


@attrs.frozen(kw_only=True)
class KvSpec:
    """What one layer stores per token on this rank.

    GQA: two pools ``k`` and ``v``, [pages, page_tokens, num_kv_heads, head_dim | v_head_dim].
    MLA: one pool ``latent``, [pages, page_tokens, kv_lora_rank + rope_dim] (normed latent, then the rotated rope part).
    """

    kind: str
    """``gqa`` or ``mla``."""
    num_kv_heads: int = 0
    head_dim: int = 0
    v_head_dim: int = 0
    kv_lora_rank: int = 0
    rope_dim: int = 0


@attrs.frozen(kw_only=True, eq=False)
class AttentionLayer:
    """One layer's attention on this rank: sizes, cache, and for MLA the up-projections."""

    layer: int
    kv: KvSpec
    num_heads: int
    """Query heads of this rank."""
    scale: float
    cache: tuple[torch.Tensor, ...]
    """(k, v) or (latent,), bound once the pool exists; same storage for the life of the process."""
    w_uk: torch.Tensor | None = None
    """MLA: [num_heads, nope_dim, kv_lora_rank]."""
    w_uv: torch.Tensor | None = None
    """MLA: [num_heads, kv_lora_rank, v_head_dim]."""


@attrs.frozen(kw_only=True, eq=False)
class AttnMetadata:
    """A planned batch; a value, so that children, mixed batches and graph buckets are just more of them."""

    batch: ForwardBatch
    data: Any
    """Belongs to the backend."""


@attrs.frozen(kw_only=True)
class AttentionCapabilities:
    """Cache forms, devices and dtypes that a backend takes."""

    kinds: frozenset[str] = frozenset({"gqa", "mla"})
    devices: frozenset[str] = frozenset({"cpu"})
    dtypes: frozenset[str] = frozenset({"float32", "bfloat16"})
    graph_capture: bool = False
    prefill_capture: bool = False
    """So can steps with prompt tokens, each row taken as a sequence of its own (``allocate_buffers`` with ``shares_contexts``)."""
    row_invariant: bool = False
    """On a CPU in float32 it can give a row the same bits whatever rows are beside it, where ``AttentionSpec.row_invariant`` asks for it."""


@attrs.frozen(kw_only=True, eq=False)
class AttentionSpec:
    """What an attention backend is built for."""

    page_tokens: int
    num_heads: int
    kv: KvSpec
    dtype: torch.dtype
    device: torch.device
    row_invariant: bool = False
    """A row's bits must not depend on the rows beside it."""


class Attention(Protocol):
    """An attention backend. Stateless between calls: everything of a batch is in its metadata."""

    @property
    def capabilities(self) -> AttentionCapabilities: ...

    def plan(self, batch: ForwardBatch, buffers: Any | None = None) -> AttnMetadata:
        """Once per batch, before the first layer. ``buffers``: static storage of one (bucket, child)."""
        ...

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor | None,
        layer: AttentionLayer,
        metadata: AttnMetadata,
    ) -> torch.Tensor:
        """Writes this step's k/v rows to the cache at ``batch.kv_slots``, then attends causally.

        GQA: q [N, heads, head_dim], k [N, kv_heads, head_dim], v [N, kv_heads, v_head_dim] -> [N, heads, v_head_dim].
        MLA: q [N, heads, nope + rope] (rotated), k [N, kv_lora_rank + rope] latent row, v None -> [N, heads, v_head_dim]; the backend
        chooses absorbed or expanded form per sequence with ``layer.w_uk`` and ``layer.w_uv``. Padded rows of the result are zero.
        """
        ...


class DecodeTables(Protocol):
    """What of a decode step changes from one replay to the next; a backend may keep more beside it."""

    @property
    def page_table(self) -> torch.Tensor:
        """[bucket, page_columns] int32."""
        ...

    @property
    def seq_lens(self) -> torch.Tensor:
        """[bucket] int32, 0 for a row without a sequence."""
        ...


class CapturableAttention(Attention, Protocol):
    """A backend whose steps can be captured in a device graph (``graph_capture``, ``prefill_capture``)."""

    def allocate_buffers(self, bucket: int, page_columns: int, *, shares_contexts: bool = False) -> DecodeTables:
        """Static storage for ``plan`` of one bucket, one row a sequence.

        With ``shares_contexts``, which ``prefill_capture`` allows, rows may belong to the same sequence: row i with ``seq_lens[i]`` tokens
        sees rows that the step itself writes to the cache. ``plan`` is called once, before capture. Every replay fills the two tables first, on the device: whatever else a step needs must
        be computed from them inside ``forward``.
        """
        ...
