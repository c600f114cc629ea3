"""Two protocols of one library behind one contract.

Normal: a row goes once to each rank that holds one of its experts; the host learns how many arrive. Low latency: rows land in the
places of their experts with a fixed capacity, the host learns nothing, so that it can be captured. Handles travel inside ``Received``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import attrs
import torch
from crossdock.errors import DispatchMisuse
from crossdock.ops.quantise_rows import quantise_rows
from crossdock.rows import Rows
from crossdock.types.dispatch import Pending, Received, ReceiveLayout, ScaleForm, WireDtype
from crossdock.types.step import DispatchMode

from crossdock_dispatchers.deepep.capabilities import deepep_capabilities
from crossdock_dispatchers.deepep.capacity import aligned_capacity, low_latency_capacity, needed_low_latency_rows
from crossdock_dispatchers.deepep.library import BufferPlan, NormalConfigs, make_buffer, normal_configs

if TYPE_CHECKING:
    from crossdock.types.dispatch import DispatcherCapabilities, DispatcherSpec, DispatchStep
    from torch.distributed import ProcessGroup

    from crossdock_dispatchers.deepep.options import DeepEpOptions


@attrs.frozen(kw_only=True, eq=False)
class _Sent:
    """Rows of one dispatch, with at least one row: the library's kernels take no empty tensor."""

    mode: DispatchMode
    num_rows: int
    """Rows that the caller brought; 0 where one dummy row that goes nowhere stands for them."""
    rows: Any
    """[n, H] bf16, or the pair ([n, H] float8_e4m3fn, [n, H / 128] float32)."""
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor
    is_apart: bool
    """Whether work of another micro-batch runs beside the transfer."""
    begun: Any = None
    """Event after which the rows are complete, where they travel apart."""


@attrs.define(eq=False)
class _Wait:
    """Waits for a transfer, once; nothing where the current stream orders it anyway."""

    call: Callable[[], None] | None = None

    def __call__(self) -> None:
        call, self.call = self.call, None
        if call is not None:
            call()


@attrs.frozen(kw_only=True, eq=False)
class _Arriving:
    """A low-latency dispatch under way; what it returns is valid after ``wait``."""

    received: Received
    wait: _Wait


@attrs.frozen(kw_only=True, eq=False)
class _WayBack:
    """What combine needs; the rows themselves may go."""

    mode: DispatchMode
    num_rows: int
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor
    is_apart: bool
    handle: Any

    @staticmethod
    def of(sent: _Sent, handle: Any) -> _WayBack:
        return _WayBack(
            mode=sent.mode,
            num_rows=sent.num_rows,
            topk_ids=sent.topk_ids,
            topk_weights=sent.topk_weights,
            is_apart=sent.is_apart,
            handle=handle,
        )


@attrs.frozen(kw_only=True, eq=False)
class _Returning:
    """Outputs under way."""

    num_rows: int
    rows: Callable[[], torch.Tensor]
    """Gives them once they may be read."""


class DeepEpDispatcher:
    """``deep_ep.Buffer`` with both protocols or one.

    In a step of one micro-batch everything is ordered by the current stream. In a step of two, work on rows that are under way is left to
    the library's stream (normal) or to its receive hooks (low latency) until ``end``. The normal dispatch waits for the device to learn its
    counts, so it starts in ``dispatch_end``: what was launched between begin and end hides it. So does the normal combine, behind the
    dispatch that the other micro-batch needs first.
    """

    def __init__(self, spec: DispatcherSpec, options: DeepEpOptions, library: Any, group: ProcessGroup) -> None:
        needed = needed_low_latency_rows(options, spec.max_rows_per_rank, spec.max_decode_rows_per_rank)
        capacity = 0 if options.mode == "normal" else low_latency_capacity(options, needed)
        self._capacity = aligned_capacity(capacity, spec.sizes.ranks, spec.expert_alignment)
        self._spec = spec
        self._capabilities = deepep_capabilities(spec.sizes, options, capacity or None)
        self._quantised = options.wire == "fp8" or (options.wire == "auto" and spec.wire_dtype is WireDtype.FP8_BLOCK)
        # The library has two low-latency buffers, and each send clears the flags of the send before it, which must have arrived by then,
        # whichever slot it belongs to.
        self._last_send = _Wait()
        self._library = library
        self._buffer = make_buffer(
            library,
            group,
            BufferPlan(
                ranks=spec.sizes.ranks,
                hidden_size=spec.hidden_size,
                num_experts=spec.num_physical_experts,
                num_sms=(options.num_sms, options.overlap_sms),
                normal=DispatchMode.NORMAL in self._capabilities.modes,
                low_latency_rows=self._capacity,
            ),
        )
        # Beside other work fewer multiprocessors are better: the link may be slower than they are, and the others compute.
        self._configs: dict[bool, NormalConfigs] = {}
        if DispatchMode.NORMAL in self._capabilities.modes:
            self._configs = {
                is_apart: normal_configs(library, spec.sizes.ranks, num_sms)
                for is_apart, num_sms in ((True, options.overlap_sms), (False, options.num_sms))
            }

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
        modes = self._capabilities.modes
        mode = step.mode if len(modes) > 1 else next(iter(modes))
        num_rows = hidden_states.shape[0]
        rows, ids, weights = _some_rows(hidden_states, topk_ids, topk_weights)
        is_apart = step.micro_batches > 1
        sent = _Sent(mode=mode, num_rows=num_rows, rows=rows, topk_ids=ids, topk_weights=weights, is_apart=is_apart)
        if mode is DispatchMode.LOW_LATENCY:
            return Pending(slot=slot, payload=self._send_low_latency(sent, slot))
        payload = quantise_rows(rows) if self._quantised else rows
        begun = self._library.Buffer.capture() if is_apart else None
        return Pending(slot=slot, payload=attrs.evolve(sent, rows=payload, begun=begun))

    def dispatch_end(self, pending: Pending) -> Received:
        if isinstance(pending.payload, _Sent):
            return self._send_normal(pending.payload, pending.slot)
        arriving: _Arriving = pending.payload
        arriving.wait()
        return arriving.received

    def combine_begin(self, expert_out: torch.Tensor, received: Received) -> Pending:
        way_back: _WayBack = received.way_back
        expert_out = expert_out.to(torch.bfloat16).contiguous()
        if way_back.mode is DispatchMode.LOW_LATENCY:
            self._last_send()
            arriving, _, hook = self._buffer.low_latency_combine(
                expert_out,
                way_back.topk_ids,
                way_back.topk_weights,
                way_back.handle,
                return_recv_hook=way_back.is_apart,
            )
            self._last_send = _Wait(hook if way_back.is_apart else None)
            rows = functools.partial(_awaited, arriving, self._last_send)
        elif way_back.is_apart:
            rows = functools.partial(self._combine_apart, expert_out, way_back.handle, self._library.Buffer.capture())
        else:
            summed, _, _ = self._buffer.combine(expert_out, way_back.handle, config=self._configs[False].combine)
            rows = functools.partial(_awaited, summed, _Wait())
        return Pending(slot=received.slot, payload=_Returning(num_rows=way_back.num_rows, rows=rows))

    def combine_end(self, pending: Pending) -> Rows:
        returning: _Returning = pending.payload
        capabilities = self._capabilities
        rows = returning.rows()[: returning.num_rows]
        return Rows(rows, capabilities.output_rows, capabilities.output_owed, self._spec.comms)

    def _combine_apart(self, expert_out: torch.Tensor, handle: Any, begun: Any) -> torch.Tensor:
        """Issued at the end: the library has one stream, in which it would stand before the other micro-batch's dispatch, which is ready sooner."""
        rows, _, event = self._buffer.combine(
            expert_out, handle, config=self._configs[True].combine, **self._apart(begun)
        )
        event.current_stream_wait()
        summed: torch.Tensor = rows
        return summed

    @staticmethod
    def _apart(begun: Any) -> dict[str, Any]:
        """Arguments of a normal call in the library's stream, after the event ``begun``."""
        return {"previous_event": begun, "async_finish": True, "allocate_on_comm_stream": True}

    def _send_normal(self, sent: _Sent, slot: int) -> Received:
        spec, buffer = self._spec, self._buffer
        per_rank, per_node, per_expert, in_rank, laid_out = buffer.get_dispatch_layout(
            sent.topk_ids, spec.num_physical_experts, **(self._apart(sent.begun) if sent.is_apart else {})
        )
        payload, ids, weights, counts, handle, arrived = buffer.dispatch(
            sent.rows,
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_node,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
            topk_idx=sent.topk_ids,
            topk_weights=sent.topk_weights,
            expert_alignment=spec.expert_alignment,
            config=self._configs[sent.is_apart].dispatch,
            **(self._apart(laid_out) if sent.is_apart else {}),
        )
        if sent.is_apart:
            arrived.current_stream_wait()
        rows, scales = payload if self._quantised else (payload, None)
        return Received(
            layout=ReceiveLayout.TOKEN_ROWS,
            rows=rows,
            scales=scales,
            scale_form=None if scales is None else ScaleForm.FP32_ROW,
            local_topk_ids=ids,
            row_weights=weights,
            aligned_rows=sum(counts),
            slot=slot,
            way_back=_WayBack.of(sent, handle),
        )

    def _send_low_latency(self, sent: _Sent, slot: int) -> _Arriving:
        spec, (num_rows, top_k) = self._spec, sent.topk_ids.shape
        if num_rows > self._capacity:
            raise DispatchMisuse(
                f"dispatch_begin: {num_rows} rows in a low-latency step, its buffers were made for {self._capacity}; "
                f"set dispatcher.low_latency_rows to {num_rows}"
            )
        self._last_send()
        payload, counts, handle, _, hook = self._buffer.low_latency_dispatch(
            sent.rows,
            sent.topk_ids,
            self._capacity,
            spec.num_physical_experts,
            use_fp8=self._quantised,
            return_recv_hook=sent.is_apart,
        )
        rows, scales = payload if self._quantised else (payload, None)
        experts = spec.num_physical_experts
        received = Received(
            layout=ReceiveLayout.EXPERT_MAJOR,
            rows=rows,
            scales=scales,
            scale_form=None if scales is None else ScaleForm.FP32_COL_TMA,
            counts=counts,
            expected_rows=(num_rows * spec.sizes.ranks * top_k + experts) // experts,
            slot=slot,
            way_back=_WayBack.of(sent, handle),
        )
        self._last_send = _Wait(hook if sent.is_apart else None)
        return _Arriving(received=received, wait=self._last_send)


def _awaited(rows: torch.Tensor, wait: _Wait) -> torch.Tensor:
    wait()
    return rows


def _some_rows(
    hidden_states: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The inputs, contiguous; one zero row that goes nowhere where there is none."""
    if hidden_states.shape[0]:
        return hidden_states.contiguous(), topk_ids.contiguous(), topk_weights.contiguous()
    return (
        hidden_states.new_zeros(1, hidden_states.shape[1]),
        topk_ids.new_full((1, topk_ids.shape[1]), -1),
        topk_weights.new_zeros(1, topk_weights.shape[1]),
    )
