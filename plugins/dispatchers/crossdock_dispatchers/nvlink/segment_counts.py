"""How many places the arrived rows need among experts that take them in segments, told to the host beside the computing stream.

Experts that need the number and are not told ask the device, and wait for everything that was launched before the question: with two
micro-batches that is the other one's attention, and the device rests until their next launch. Counted where the rows arrive, the host knows while
the other micro-batch computes.
"""

from __future__ import annotations

import torch


class SegmentCounts:
    """One number a slot; of transfers that run in a stream of their own.

    Args:
        num_experts: of this rank.
        alignment: rows of a segment, of which an expert has as many as its rows need.
        slots: transfers that may be under way.
        device: of the rows.
    """

    def __init__(self, num_experts: int, alignment: int, slots: int, device: torch.device) -> None:
        self._num_experts, self._alignment = num_experts, alignment
        self._told = [torch.zeros(1, dtype=torch.int64, pin_memory=device.type == "cuda") for _ in range(slots)]
        self._events = [torch.cuda.Event() for _ in range(slots)]

    def issue(self, local_ids: torch.Tensor, slot: int) -> None:
        """Counts ``local_ids`` [R, K] int64 (-1 none) in the current stream, behind their arrival."""
        self._told[slot].copy_(segment_rows(local_ids, self._num_experts, self._alignment), non_blocking=True)
        self._events[slot].record()

    def wait(self, slot: int) -> int:
        """Rows of all segments of the transfer that was issued last; the host waits for its arrival."""
        self._events[slot].synchronize()
        return int(self._told[slot])


def segment_rows(local_ids: torch.Tensor, num_experts: int, alignment: int) -> torch.Tensor:
    """[1] int64 on the device of ``local_ids`` [R, K] int64 (-1 none): rows of every expert, each rounded up to ``alignment``."""
    choices = local_ids.reshape(-1) + 1
    counts = torch.zeros(num_experts + 1, dtype=torch.int32, device=local_ids.device)
    counts.scatter_add_(0, choices, torch.ones(1, dtype=torch.int32, device=local_ids.device).expand(choices.shape))
    return ((counts[1:] + (alignment - 1)) // alignment).sum(dim=0, keepdim=True) * alignment
