"""A dispatcher on a slower link: a transfer takes at least as long as its bytes take at a given rate, in a stream that the GPU computes beside.

What a network card does to it: transfers of a rank pass one after the other, and cost no multiprocessor while they wait. A thread of the driver
sleeps for the stream: a kernel that did would keep others, whose blocks fill a multiprocessor, from starting on its own.
"""

from __future__ import annotations

import ctypes
import statistics
from typing import Any

import attrs
import torch
from crossdock.rows import Rows
from crossdock.types.dispatch import Dispatcher, DispatcherCapabilities, DispatchStep, Pending, Received


@attrs.define(eq=False)
class Link:
    """Holds the stream of a link; 0 bytes a microsecond for a link that holds nothing up."""

    device: torch.device
    bytes_per_us: float = 0.0
    _stream: Any = attrs.field(default=None, init=False)
    _late_us: int = attrs.field(default=0, init=False)
    """What a sleep takes longer than asked for, with the call."""
    _launch: Any = attrs.field(default=None, init=False)
    _sleep: Any = attrs.field(default=None, init=False)

    def hold(self, num_bytes: int) -> torch.cuda.Event | None:
        """Starts a transfer of so many bytes behind what the current stream was given, and returns its end."""
        if self.bytes_per_us == 0.0:
            return None
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device)
            self._launch = ctypes.CDLL("libcuda.so.1").cuLaunchHostFunc
            self._sleep = ctypes.cast(ctypes.CDLL(None).usleep, ctypes.c_void_p)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for_us = max(round(num_bytes / self.bytes_per_us) - self._late_us, 0)
            stream = ctypes.c_void_p(self._stream.cuda_stream)
            failed = self._launch(stream, self._sleep, ctypes.c_void_p(for_us))
            assert failed == 0, f"cuLaunchHostFunc returned {failed}"
            passed = torch.cuda.Event()
            passed.record()
        return passed

    def open(self, bytes_per_us: float) -> None:
        """Holds transfers to that rate from now on."""
        self.bytes_per_us, self._late_us = bytes_per_us, 0
        asked_us = 1000.0
        took_us = 1e6 * statistics.median(self.seconds(round(asked_us * bytes_per_us), times=9))
        self._late_us = round(took_us - asked_us)

    def seconds(self, num_bytes: int, times: int = 5) -> list[float]:
        """What transfers of so many bytes take, one at a time beside nothing."""
        found: list[float] = []
        for _ in range(times):
            torch.cuda.synchronize()
            begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begun.record()
            passed = self.hold(num_bytes)
            if passed is not None:
                torch.cuda.current_stream().wait_event(passed)
            ended.record()
            ended.synchronize()
            found.append(begun.elapsed_time(ended) / 1e3)
        return found


@attrs.frozen(eq=False)
class HeldDispatcher:
    """Passes calls on; an end also waits for the link."""

    inner: Dispatcher
    link: Link
    ranks: int
    row_bytes: int

    @property
    def capabilities(self) -> DispatcherCapabilities:
        return self.inner.capabilities

    def dispatch_begin(
        self,
        hidden_states: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        step: DispatchStep,
        slot: int,
    ) -> Pending:
        held = self._hold(hidden_states.shape[0])
        return _with(self.inner.dispatch_begin(hidden_states, topk_ids, topk_weights, step, slot), held)

    def dispatch_end(self, pending: Pending) -> Received:
        return self.inner.dispatch_end(_awaited(pending))

    def combine_begin(self, expert_out: torch.Tensor, received: Received) -> Pending:
        # As many rows come home as this rank has sent.
        held = self._hold(expert_out.shape[0] // self.ranks)
        return _with(self.inner.combine_begin(expert_out, received), held)

    def combine_end(self, pending: Pending) -> Rows:
        return self.inner.combine_end(_awaited(pending))

    def _hold(self, rows: int) -> torch.cuda.Event | None:
        return self.link.hold(rows * (self.ranks - 1) * self.row_bytes)


def _with(pending: Pending, held: torch.cuda.Event | None) -> Pending:
    return Pending(slot=pending.slot, payload=(pending, held))


def _awaited(pending: Pending) -> Pending:
    inner, held = pending.payload
    if held is not None:
        torch.cuda.current_stream().wait_event(held)
    return inner
