"""Times of a call on a device, and their spread as peers report it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

PERCENTILES = (10, 25, 50, 75, 90, 99)


class DeviceClock:
    """Seconds between two marks: events of the current stream on a GPU, wall time on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> Any:
        """Now, in the order of the stream."""
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: Any, end: Any) -> float:
        """Between two marks; waits for the device."""
        if self._device.type != "cuda":
            return float(end - start)
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3


def repeated(call: Callable[[], Sequence[float]], num_iters: int, num_iters_warmup: int) -> list[Sequence[float]]:
    """What ``call`` measured, each time after the warm-up."""
    for _ in range(num_iters_warmup):
        call()
    return [call() for _ in range(num_iters)]


def spread_us(name: str, seconds: Sequence[float]) -> dict[str, float]:
    """``mean_<name>_us``, ``median_<name>_us``, ``min_<name>_us`` and ``p99_<name>_us``."""
    values = np.asarray(seconds) * 1e6
    return {
        f"mean_{name}_us": round(float(values.mean()), 2),
        f"median_{name}_us": round(float(np.median(values)), 2),
        f"min_{name}_us": round(float(values.min()), 2),
        f"p99_{name}_us": round(float(np.percentile(values, 99)), 2),
    }


def percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """Percentile -> seconds, keys as text."""
    return {str(share): float(np.percentile(seconds, share)) for share in PERCENTILES}
