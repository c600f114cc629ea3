"""Sizes of grouped-query attention; torch is not imported."""

from __future__ import annotations

import attrs
from crossdock.types.attention import KvSpec
from crossdock.types.parallel import ParallelSizes, RankPlace

from crossdock_models._shared.shards import kv_head_shard
from crossdock_models._shared.tensor_table import TensorTable


@attrs.frozen(kw_only=True)
class GqaSizes:
    """Sizes of the whole model's attention."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    norm_eps: float
    has_qk_norm: bool
    has_bias: bool

    def kv_spec(self, sizes: ParallelSizes, place: RankPlace) -> KvSpec:
        """What a rank caches for each token."""
        heads = kv_head_shard(self.num_kv_heads, sizes, place).size
        return KvSpec(kind="gqa", num_kv_heads=heads, head_dim=self.head_dim, v_head_dim=self.head_dim)

    def add_tensors(self, table: TensorTable, prefix: str) -> None:
        """Checkpoint tensors of one layer's attention."""
        q_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        for projection, rows in (("q_proj", q_size), ("k_proj", kv_size), ("v_proj", kv_size)):
            table.matrix(f"{prefix}.{projection}", rows, self.hidden_size)
            if self.has_bias:
                table.vector(f"{prefix}.{projection}.bias", rows)
        table.matrix(f"{prefix}.o_proj", self.hidden_size, q_size)
        if self.has_bias:
            table.vector(f"{prefix}.o_proj.bias", self.hidden_size)
        if self.has_qk_norm:
            table.vector(f"{prefix}.q_norm.weight", self.head_dim)
            table.vector(f"{prefix}.k_norm.weight", self.head_dim)
