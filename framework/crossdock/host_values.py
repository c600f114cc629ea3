"""Numbers between the host and a device without waiting: from Python to a tensor, and back once they are there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch


def ints(x: torch.Tensor) -> list[int]:
    """A one-dimensional integer tensor as a list; waits for the device."""
    return cast("list[int]", cast("Any", x).tolist())


def int_rows(x: torch.Tensor) -> list[list[int]]:
    """A two-dimensional integer tensor as a list of rows; waits for the device."""
    return cast("list[list[int]]", cast("Any", x).tolist())


def floats(x: torch.Tensor) -> list[float]:
    """A one-dimensional floating-point tensor as a list; waits for the device."""
    return cast("list[float]", cast("Any", x).tolist())


def float_rows(x: torch.Tensor) -> list[list[float]]:
    """A two-dimensional floating-point tensor as a list of rows; waits for the device."""
    return cast("list[list[float]]", cast("Any", x).tolist())


def on_device(
    values: Sequence[float] | Sequence[Sequence[float]] | npt.NDArray[np.generic],
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    """``values`` as a tensor. A copy from memory that is not pinned would wait for everything in the stream."""
    host = torch.as_tensor(values, dtype=dtype)
    if device.type == "cpu" or not host.numel():
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)


class HostCopy:
    """Tensors on their way to the host, in the order of the stream; ``wait`` waits for this copy only, not for what was launched after it."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if all(tensor.device.type == "cpu" for tensor in tensors):
            self._tensors = tensors
            return
        self._tensors = tuple(torch.empty(x.shape, dtype=x.dtype, pin_memory=True) for x in tensors)
        for host, tensor in zip(self._tensors, tensors, strict=True):
            host.copy_(tensor, non_blocking=True)
        self._event = torch.cuda.Event()
        self._event.record()

    def wait(self) -> tuple[torch.Tensor, ...]:
        """The tensors on the host."""
        if self._event is not None:
            self._event.synchronize()
        return self._tensors
