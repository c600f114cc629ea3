"""Launches of kernels before the one in front of them has ended, so that a chain of small ones costs less than the sum of its launches."""

from __future__ import annotations

import functools

import torch


def early_launch(tensor: torch.Tensor) -> dict[str, bool]:
    """Launch options for a kernel with an ``is_early`` constant that calls ``wait_for_inputs`` before it reads or writes anything else.

    Programmatic dependent launch, from compute capability 9 on. Kernels of others in the same stream are not affected: they start when the one
    before them has ended.
    """
    if tensor.is_cuda and has_early_launch(tensor.get_device()):
        return {"is_early": True, "launch_pdl": True}
    return {"is_early": False}


@functools.cache
def has_early_launch(device_index: int) -> bool:
    """Whether the device can."""
    return torch.cuda.get_device_capability(device_index)[0] >= 9
