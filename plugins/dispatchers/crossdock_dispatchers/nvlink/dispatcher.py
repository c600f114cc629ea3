"""Rows go straight into the memory of the ranks that hold their experts; outputs come home the same way.

One code path serves prefill and decode: the bucket (rows a rank brings at most this step) and the number of programs are all that
differ, so "low latency" is a small bucket. Row t of source s lands at row ``s * bucket + t`` everywhere, hence no layout pass, no
exchange of counts and no host synchronisation: both ways can be captured in a graph.
Why buffers may be reused at once: a peer's next put can start only after it summed this step's outputs, for which it waited for our
``combine``, which we launch after our experts have read the rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import attrs
import torch
from crossdock.errors import CapacityTooSmall
from crossdock.ops.fp8_block_torch import BLOCK
from crossdock.rows import Rows
from crossdock.types.dispatch import Pending, Received, ReceiveLayout, ScaleForm

from crossdock_dispatchers.nvlink.capabilities import nvlink_capabilities
from crossdock_dispatchers.nvlink.kernels.put_rows import put_rows, wait_rows
from crossdock_dispatchers.nvlink.kernels.sum_rows import sum_rows, useful_chunks, wait_outputs
from crossdock_dispatchers.nvlink.segment_counts import SegmentCounts
from crossdock_dispatchers.nvlink.workspace import SlotBuffers, SymmetricAllocator, allocate_slot

if TYPE_CHECKING:
    from crossdock.types.dispatch import DispatcherCapabilities, DispatcherSpec, DispatchStep

    from crossdock_dispatchers.nvlink.options import NvlinkOptions


@attrs.frozen(kw_only=True, eq=False)
class _Flight:
    """What the way back needs, and for a split call the event after which the transfer was issued."""

    bucket: int
    programs: int
    chunks: int
    """Pieces in which outputs come home; one where they are summed by another launch."""
    topk_ids: torch.Tensor
    inputs: tuple[torch.Tensor, ...] = ()
    """Kept alive until the transfer stream has read them."""
    issued: torch.cuda.Event | None = None
    is_counted: bool = False
    """The transfer stream waits for the peers' rows, too, and the host is told how many places they need."""


@attrs.frozen(kw_only=True, eq=False)
class _Homecoming:
    """Outputs under way; ``out`` is final after ``combine_end``."""

    flight: _Flight
    expert_out: torch.Tensor
    out: torch.Tensor
    issued: torch.cuda.Event | None


class NvlinkDispatcher:
    """Triton kernels over symmetric memory, for ranks of one NVLink domain.

    In a step of one micro-batch each way is a single launch on the current stream. In a step of two, ``begin`` issues the transfer on a
    stream of its own with ``overlap_programs`` multiprocessors, and ``end`` waits for the peers' flags; outputs are then summed by all
    multiprocessors. Where the experts take segments the transfer stream waits for those flags, and the host of an eager step is told there how
    many rows the segments have.
    """

    def __init__(self, spec: DispatcherSpec, options: NvlinkOptions, allocator: SymmetricAllocator) -> None:
        if spec.max_rows_per_rank < 1:
            raise CapacityTooSmall("dispatcher nvlink needs a capacity of at least 1 row a rank", needed=1)
        self._spec = spec
        self._capabilities = nvlink_capabilities(spec.sizes, options)
        self._rank = spec.comms.moe_ep.rank
        self._multiprocessors = torch.cuda.get_device_properties(spec.device).multi_processor_count
        self._programs = options.programs or self._multiprocessors
        self._overlap_programs = options.overlap_programs
        self._chunks = options.chunks
        # Before other streams: a transfer that stands behind a long product hides nothing.
        self._stream = torch.cuda.Stream(spec.device, priority=-1) if spec.max_in_flight > 1 else None
        # Beside other work only: else the experts ask just as soon.
        self._counts = (
            SegmentCounts(spec.num_local_experts, spec.expert_alignment, spec.max_in_flight, spec.device)
            if self._stream is not None and spec.expert_alignment > 1
            else None
        )
        quantised = options.wire == "fp8"
        self._slots: list[SlotBuffers] = [
            allocate_slot(
                allocator,
                world=spec.sizes.ranks,
                capacity=spec.max_rows_per_rank,
                hidden_size=spec.hidden_size,
                top_k=spec.top_k,
                dtype=spec.dtype,
                wire_dtype=torch.float8_e4m3fn if quantised else spec.dtype,
                scale_block=BLOCK if quantised else None,
                programs=max(self._programs, self._overlap_programs),
                chunks=self._chunks,
            )
            for _ in range(spec.max_in_flight)
        ]

    @property
    def capabilities(self) -> DispatcherCapabilities:
        return self._capabilities

    def dispatch_begin(
        self,
        hidden_states: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        step: DispatchStep,
        slot: int,
    ) -> Pending:
        bucket = max(1, self._bucket(step))
        stream = self._stream if step.micro_batches > 1 else None
        programs = min(self._programs if stream is None else self._overlap_programs, bucket)
        hidden_states, topk_ids, topk_weights = (x.contiguous() for x in (hidden_states, topk_ids, topk_weights))
        buffers = self._slots[slot]
        counts = self._counts if stream is not None and step.bucket is None else None

        def put() -> None:
            put_rows(
                hidden_states,
                topk_ids,
                topk_weights,
                buffers,
                rank=self._rank,
                bucket=bucket,
                slots_per_rank=self._spec.num_local_experts,
                programs=programs,
                synchronise=True,
                wait=stream is None,
            )
            if counts is not None:
                wait_rows(buffers, rank=self._rank, programs=programs)
                counts.issue(buffers.ids.local[: self._spec.sizes.ranks * bucket], slot)

        issued = _issue(put, stream)
        flight = _Flight(
            bucket=bucket,
            programs=programs,
            chunks=1 if stream is not None else useful_chunks(self._chunks, bucket, programs, self._spec.hidden_size),
            topk_ids=topk_ids,
            inputs=() if stream is None else (hidden_states, topk_weights),
            issued=issued,
            is_counted=counts is not None,
        )
        return Pending(slot=slot, payload=flight)

    def dispatch_end(self, pending: Pending) -> Received:
        flight: _Flight = pending.payload
        buffers = self._slots[pending.slot]
        if flight.issued is not None:
            torch.cuda.current_stream().wait_event(flight.issued)
            if not flight.is_counted:
                wait_rows(buffers, rank=self._rank, programs=flight.programs)
        rows = self._spec.sizes.ranks * flight.bucket
        return Received(
            layout=ReceiveLayout.TOKEN_ROWS,
            rows=buffers.rows.local[:rows],
            scales=None if buffers.scales is None else buffers.scales.local[:rows],
            scale_form=None if buffers.scales is None else ScaleForm.FP32_ROW,
            local_topk_ids=buffers.ids.local[:rows],
            row_weights=buffers.weights.local[:rows],
            aligned_rows=self._counts.wait(pending.slot) if self._counts is not None and flight.is_counted else None,
            slot=pending.slot,
            way_back=flight,
        )

    def combine_begin(self, expert_out: torch.Tensor, received: Received) -> Pending:
        flight: _Flight = received.way_back
        # Own and foreign contributions are read by one load, so they have one dtype: that of the wire home.
        expert_out = expert_out.to(self._spec.dtype).contiguous()
        out = torch.empty(
            flight.topk_ids.shape[0], self._spec.hidden_size, dtype=self._spec.dtype, device=self._spec.device
        )
        is_apart = flight.issued is not None
        issued = _issue(
            lambda: self._sum(flight, expert_out, out, received.slot, reduce=not is_apart),
            self._stream if is_apart else None,
        )
        return Pending(
            slot=received.slot, payload=_Homecoming(flight=flight, expert_out=expert_out, out=out, issued=issued)
        )

    def combine_end(self, pending: Pending) -> Rows:
        home: _Homecoming = pending.payload
        if home.issued is not None:
            torch.cuda.current_stream().wait_event(home.issued)
            self._sum_arrived(home, pending.slot)
        capabilities = self._capabilities
        return Rows(home.out, capabilities.output_rows, capabilities.output_owed, self._spec.comms)

    def _bucket(self, step: DispatchStep) -> int:
        """Rows a rank brings at most, equal on all ranks: the graph bucket, the largest known count, or the capacity."""
        if step.bucket is not None:
            return step.bucket
        return max(step.source_counts) if step.source_counts is not None else self._spec.max_rows_per_rank

    def _sum(self, flight: _Flight, expert_out: torch.Tensor, out: torch.Tensor, slot: int, *, reduce: bool) -> None:
        """Sends outputs home, and with ``reduce`` sums them as they come."""
        sum_rows(
            expert_out,
            flight.topk_ids,
            self._slots[slot],
            out,
            rank=self._rank,
            bucket=flight.bucket,
            slots_per_rank=self._spec.num_local_experts,
            programs=flight.programs,
            chunks=flight.chunks,
            reduce=reduce,
        )

    def _sum_arrived(self, home: _Homecoming, slot: int) -> None:
        """Sums outputs that others sent, once all of them are there."""
        flight, buffers = home.flight, self._slots[slot]
        wait_outputs(buffers, rank=self._rank, flags=flight.programs)
        sum_rows(
            home.expert_out,
            flight.topk_ids,
            buffers,
            home.out,
            rank=self._rank,
            bucket=flight.bucket,
            slots_per_rank=self._spec.num_local_experts,
            programs=min(self._multiprocessors, flight.bucket),
            chunks=1,
            put=False,
            synchronise=False,
        )


def _issue(launch: Callable[[], None], stream: torch.cuda.Stream | None) -> torch.cuda.Event | None:
    """Runs the launch here, or on the transfer stream after what this stream has issued so far."""
    if stream is None:
        launch()
        return None
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        launch()
        issued = torch.cuda.Event()
        issued.record()
    return issued
