"""The tensors behind the KV cache of one rank: their memory plan, allocation, and the export and import of blocks."""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Sequence
from typing import Protocol

import attrs
import torch

from crossdock.errors import ConfigValueError, MisuseError
from crossdock.types.attention import KvSpec


@attrs.frozen(kw_only=True)
class KvPlan:
    """Sizes of one rank's KV cache."""

    num_pages: int
    """Scratch page included."""
    page_tokens: int
    num_layers: int
    bytes_per_token: int
    """One token over all layers."""

    @property
    def total_bytes(self) -> int:
        return self.num_pages * self.page_tokens * self.bytes_per_token

    @property
    def usable_tokens(self) -> int:
        return (self.num_pages - 1) * self.page_tokens


def elements_per_token(kv: KvSpec) -> int:
    """Elements that one layer stores for one token on this rank."""
    if kv.kind == "mla":
        return kv.kv_lora_rank + kv.rope_dim
    return kv.num_kv_heads * (kv.head_dim + kv.v_head_dim)


def plan_kv_cache(kv: KvSpec, *, num_layers: int, tokens: int, page_tokens: int, itemsize: int) -> KvPlan:
    """Pages for ``tokens`` tokens and the scratch page.

    Raises:
        ConfigValueError: not even one page fits into ``tokens``.
    """
    pages = tokens // page_tokens
    if pages < 1:
        raise ConfigValueError(
            [f"scheduler.kv_tokens: must be at least one page of {page_tokens} tokens, found {tokens}"]
        )
    return KvPlan(
        num_pages=pages + 1,
        page_tokens=page_tokens,
        num_layers=num_layers,
        bytes_per_token=num_layers * elements_per_token(kv) * itemsize,
    )


def pool_shapes(kv: KvSpec, plan: KvPlan) -> tuple[tuple[int, ...], ...]:
    """Shapes of one layer's pools: (k, v), or (latent,) for MLA."""
    head = (plan.num_pages, plan.page_tokens)
    if kv.kind == "mla":
        return ((*head, kv.kv_lora_rank + kv.rope_dim),)
    return ((*head, kv.num_kv_heads, kv.head_dim), (*head, kv.num_kv_heads, kv.v_head_dim))


@attrs.frozen(kw_only=True, eq=False)
class KvBlocks:
    """Content of some pages, outside of any pool: one tensor [pages, page_tokens, ...] for each pool of each layer."""

    layers: tuple[tuple[torch.Tensor, ...], ...]


class BlockTransfer(Protocol):
    """Moves cached blocks between replicas or processes; the seam on which prefill and decode can be separated."""

    def export_blocks(self, pages: Sequence[int]) -> KvBlocks:
        """A copy of the content of ``pages``."""
        ...

    def import_blocks(self, blocks: KvBlocks, pages: Sequence[int]) -> None:
        """Writes ``blocks`` into ``pages``, which the caller holds (``BlockPool.adopt``)."""
        ...


class KvStorage:
    """All pools of a rank; the same tensors for the life of the process."""

    def __init__(self, kv: KvSpec, plan: KvPlan, *, dtype: torch.dtype, device: torch.device) -> None:
        self.plan = plan
        self.caches: tuple[tuple[torch.Tensor, ...], ...] = tuple(
            tuple(_zeros(shape, dtype, device) for shape in pool_shapes(kv, plan)) for _ in range(plan.num_layers)
        )

    def export_blocks(self, pages: Sequence[int]) -> KvBlocks:
        index = torch.tensor(list(pages), dtype=torch.int64, device=self.caches[0][0].device)
        return KvBlocks(layers=tuple(tuple(pool[index] for pool in layer) for layer in self.caches))

    def import_blocks(self, blocks: KvBlocks, pages: Sequence[int]) -> None:
        if len(blocks.layers) != len(self.caches):
            raise MisuseError(f"blocks of {len(blocks.layers)} layers cannot go into a cache of {len(self.caches)}")
        index = torch.tensor(list(pages), dtype=torch.int64, device=self.caches[0][0].device)
        for pools, contents in zip(self.caches, blocks.layers, strict=True):
            for pool, content in zip(pools, contents, strict=True):
                if content.shape != (len(pages), *pool.shape[1:]):
                    raise MisuseError(
                        f"blocks of shape {tuple(content.shape)} cannot go into {len(pages)} pages of {tuple(pool.shape[1:])}"
                    )
                pool[index] = content.to(pool)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros. On the CPU they take no memory before they are written: ``torch.zeros`` would write, and so hold, the whole pool at once."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize)
    with contextlib.suppress(AttributeError, OSError):
        memory.madvise(
            mmap.MADV_HUGEPAGE
        )  # reading long contexts from large pages is faster; not every kernel has them
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(shape)
