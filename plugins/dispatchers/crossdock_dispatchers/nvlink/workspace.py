"""Symmetric buffers of one slot: where rows land on the way out and on the way home, and the flags of both ways."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import attrs
import torch


class SymmetricBuffer(Protocol):
    """A tensor that every rank of the domain can address."""

    @property
    def local(self) -> torch.Tensor:
        """This rank's own buffer."""
        ...

    @property
    def addresses(self) -> torch.Tensor:
        """[world] int64 on the device: address of each rank's buffer, in rank order."""
        ...


class SymmetricAllocator(Protocol):
    """Makes symmetric buffers; every rank of the domain calls it in the same order with the same arguments."""

    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> SymmetricBuffer:
        """A zero-filled symmetric buffer."""
        ...


@attrs.frozen(kw_only=True, eq=False)
class SlotBuffers:
    """W = world, C = capacity rows per rank, H = hidden size, K = top-k. Addresses never change.

    A step with a bucket of b <= C rows uses the first W * b rows of each buffer, source s at row s * b.
    """

    rows: SymmetricBuffer
    """[W * C, H] wire dtype."""
    scales: SymmetricBuffer | None
    """[W * C, H / 128] float32 for the fp8 wire."""
    ids: SymmetricBuffer
    """[W * C, K] int64 local expert ids, -1 = none."""
    weights: SymmetricBuffer
    """[W * C, K] float32."""
    homes: SymmetricBuffer
    """[W * C, H] model dtype: expert outputs sent back, holder r at row r * b."""
    put_flags: SymmetricBuffer
    """[W, programs] int32."""
    sum_flags: SymmetricBuffer
    """[W, programs * chunks] int32."""


def allocate_slot(
    allocator: SymmetricAllocator,
    *,
    world: int,
    capacity: int,
    hidden_size: int,
    top_k: int,
    dtype: torch.dtype,
    wire_dtype: torch.dtype,
    scale_block: int | None,
    programs: int,
    chunks: int,
) -> SlotBuffers:
    """All buffers of one slot; collective over the domain."""
    rows = world * capacity
    return SlotBuffers(
        rows=allocator.allocate((rows, hidden_size), wire_dtype),
        scales=None if scale_block is None else allocator.allocate((rows, hidden_size // scale_block), torch.float32),
        ids=allocator.allocate((rows, top_k), torch.int64),
        weights=allocator.allocate((rows, top_k), torch.float32),
        homes=allocator.allocate((rows, hidden_size), dtype),
        put_flags=allocator.allocate((world, programs), torch.int32),
        sum_flags=allocator.allocate((world, programs * chunks), torch.int32),
    )


def slot_bytes(
    *,
    world: int,
    capacity: int,
    hidden_size: int,
    top_k: int,
    itemsize: int,
    wire_itemsize: int,
    scale_block: int | None,
) -> int:
    """Device memory of one slot without its flags, for the memory plan."""
    scales = 0 if scale_block is None else 4 * hidden_size // scale_block
    return world * capacity * (hidden_size * (itemsize + wire_itemsize) + scales + top_k * 12)
