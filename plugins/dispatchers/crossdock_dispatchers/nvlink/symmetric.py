"""Symmetric buffers from torch: peer addresses in one NVLink domain, without multicast."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import attrs
import torch
import torch.distributed._symmetric_memory as symmetric_memory
from crossdock.errors import SelectionRefused


@attrs.frozen(kw_only=True, eq=False)
class TorchSymmetricBuffer:
    """A buffer of ``torch.distributed._symmetric_memory`` and the addresses of its peers."""

    local: torch.Tensor
    addresses: torch.Tensor
    handle: Any
    """Keeps the peers' mappings alive."""


class TorchSymmetricAllocator:
    """Allocates and rendezvouses over one process group; collective."""

    def __init__(self, group: Any, device: torch.device) -> None:
        self._group = group
        self._device = device

    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> TorchSymmetricBuffer:
        """A zero-filled buffer.

        Errors: ``SelectionRefused`` (``no_peer_memory``) when the ranks cannot map one another's memory.
        """
        # Bytes rather than dtype: the allocator does not know every float8 type on every release.
        num_bytes = math.prod(shape) * dtype.itemsize
        try:
            flat = symmetric_memory.empty(num_bytes, dtype=torch.uint8, device=self._device)
            handle = symmetric_memory.rendezvous(flat, self._group)
        except RuntimeError as error:
            raise SelectionRefused(
                ["no_peer_memory"],
                [
                    f"dispatcher nvlink: the ranks cannot map one another's memory ({error}); "
                    "choose dispatcher alltoallv, or place the ranks in one NVLink domain"
                ],
            ) from error
        flat.zero_()
        addresses = torch.tensor(handle.buffer_ptrs, dtype=torch.int64, device=self._device)
        torch.cuda.synchronize(self._device)
        return TorchSymmetricBuffer(local=flat.view(dtype).view(*shape), addresses=addresses, handle=handle)


def world_allocator(device: torch.device) -> TorchSymmetricAllocator:
    """An allocator over all ranks of the job."""
    return TorchSymmetricAllocator(torch.distributed.group.WORLD, device)
