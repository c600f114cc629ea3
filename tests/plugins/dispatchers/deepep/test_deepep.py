"""The ``deepep`` dispatcher without a GPU: the bookkeeping of handles over a library that is played by gloo."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import torch
import torch.distributed as dist
from crossdock.dispatch_guard import GuardedDispatcher
from crossdock.errors import CapacityTooSmall, DispatchMisuse
from crossdock.groups import resolve_sizes
from crossdock.ops.quantise_rows import quantise_rows
from crossdock.testing.dispatch_flights import Flight
from crossdock.testing.dispatch_scenarios import DispatchScenario, routed_rows
from crossdock.testing.world import RankContext, RankPool
from crossdock.types.dispatch import DispatcherSpec, DispatchStep, WireDtype
from crossdock.types.step import DispatchMode
from crossdock_dispatchers.deepep.dispatcher import DeepEpDispatcher
from crossdock_dispatchers.deepep.options import DeepEpOptions

TWO = resolve_sizes(ranks=2, attn_dp_size=2)
HIDDEN_SIZE, CAPACITY, EXPERTS_A_RANK = 256, 64, 3
TOLERANCES = {"bf16": 2e-2, "fp8": 8e-2}
"""Partial sums of 8 bits; rows of 3 bits on the wire."""


class PlayedConfig:
    def __init__(self, kind: str, num_sms: int) -> None:
        self.kind, self.num_sms = kind, num_sms

    def get_nvl_buffer_size_hint(self, row_bytes: int, ranks: int) -> int:
        return row_bytes * ranks * self.num_sms

    def get_rdma_buffer_size_hint(self, row_bytes: int, ranks: int) -> int:
        return 0


class PlayedEvent:
    def current_stream_wait(self) -> None:
        pass


def exchanged(value: Any) -> list[Any]:
    """Everybody's value, in rank order."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


class PlayedBuffer:
    """``deep_ep.Buffer`` as its documentation says it behaves, over gloo; no empty tensor is taken, and a handle serves once."""

    num_sms = 20

    def __init__(self, group: Any, nvl_bytes: int, rdma_bytes: int, *, low_latency_mode: bool, num_qps_per_rank: int):
        self.sizes = (nvl_bytes, rdma_bytes, low_latency_mode, num_qps_per_rank)
        self.open_handles: set[int] = set()
        self.calls: list[str] = []
        self.multiprocessors: list[int] = []
        self.to_receive = 0

    @classmethod
    def set_num_sms(cls, num_sms: int) -> None:
        cls.num_sms = num_sms

    @classmethod
    def get_dispatch_config(cls, ranks: int) -> PlayedConfig:
        return PlayedConfig("dispatch", cls.num_sms)

    @classmethod
    def get_combine_config(cls, ranks: int) -> PlayedConfig:
        return PlayedConfig("combine", cls.num_sms)

    @staticmethod
    def get_low_latency_rdma_size_hint(rows: int, hidden: int, ranks: int, experts: int) -> int:
        return 4 * rows * hidden * experts

    @staticmethod
    def capture() -> PlayedEvent:
        return PlayedEvent()

    def get_dispatch_layout(self, ids: torch.Tensor, experts: int, **ordering: Any) -> tuple[Any, ...]:
        assert ids.numel(), "the library asserts on an empty tensor"
        per_rank = experts // dist.get_world_size()
        in_rank = torch.stack([(ids // per_rank == r).any(dim=1) & (ids >= 0).any(dim=1) for r in range(2)], dim=1)
        return in_rank.sum(dim=0), None, torch.bincount(ids[ids >= 0], minlength=experts), in_rank, PlayedEvent()

    def dispatch(self, x: Any, *, topk_idx: torch.Tensor, topk_weights: torch.Tensor, expert_alignment: int, config: PlayedConfig, **_: Any) -> tuple[Any, ...]:  # fmt: skip
        assert config.kind == "dispatch"
        self.multiprocessors.append(config.num_sms)
        payload, scales = x if isinstance(x, tuple) else (x, None)
        raw = payload.view(torch.uint8) if scales is not None else payload
        first = dist.get_rank() * EXPERTS_A_RANK
        rows, found_scales, ids, weights, sources = [], [], [], [], []
        for source_raw, source_scales, source_ids, source_weights in exchanged((raw, scales, topk_idx, topk_weights)):
            here = (source_ids >= first) & (source_ids < first + EXPERTS_A_RANK)
            mine = here.any(dim=1)
            rows.append(source_raw[mine])
            found_scales.append(None if source_scales is None else source_scales[mine])
            ids.append(torch.where(here, source_ids - first, -1)[mine])
            weights.append(torch.where(here, source_weights, 0.0)[mine])
            sources.append(mine.nonzero().flatten())
        received, local_ids = torch.cat(rows), torch.cat(ids)
        counts = [-(-int((local_ids == e).sum()) // expert_alignment) * expert_alignment for e in range(EXPERTS_A_RANK)]
        handle = (sources, payload.shape[0], config.num_sms)
        self._open("dispatch", handle)
        if scales is not None:
            received = (received.view(torch.float8_e4m3fn), torch.cat(found_scales))
        return received, local_ids, torch.cat(weights), counts, handle, PlayedEvent()

    def combine(self, x: torch.Tensor, handle: Any, *, config: PlayedConfig, **_: Any) -> tuple[Any, ...]:
        self._close("combine", handle)
        assert x.dtype is torch.bfloat16
        sources, num_rows, num_sms = handle
        assert (config.kind, config.num_sms) == ("combine", num_sms), "the handle's channels are those of its dispatch"
        parts = x.split([len(rows) for rows in sources])
        total = torch.zeros(num_rows, x.shape[1])
        for all_parts, all_sources in exchanged((parts, sources)):
            total.index_add_(0, all_sources[dist.get_rank()], all_parts[dist.get_rank()].float())
        return total.to(torch.bfloat16), None, PlayedEvent()

    def low_latency_dispatch(self, x: torch.Tensor, ids: torch.Tensor, capacity: int, experts: int, *, use_fp8: bool, return_recv_hook: bool) -> tuple[Any, ...]:  # fmt: skip
        assert 0 < len(x) <= capacity
        first, places = dist.get_rank() * EXPERTS_A_RANK, capacity * dist.get_world_size()
        packed = torch.full((EXPERTS_A_RANK, places, x.shape[1]), float("nan"), dtype=torch.bfloat16)
        counts = torch.zeros(EXPERTS_A_RANK, dtype=torch.int32)
        origin = torch.full((EXPERTS_A_RANK, places, 3), -1)
        for source, (rows, source_ids) in enumerate(exchanged((x, ids))):
            for row, k in (source_ids // EXPERTS_A_RANK == dist.get_rank()).nonzero().tolist():
                if source_ids[row, k] < 0:
                    continue
                expert = int(source_ids[row, k]) - first
                packed[expert, counts[expert]] = rows[row]
                origin[expert, counts[expert]] = torch.tensor([source, row, k])
                counts[expert] += 1
        handle = (origin, len(x))
        self._open("low_latency_dispatch", handle)
        payload: Any = packed
        if use_fp8:
            flat, scales = quantise_rows(packed.nan_to_num().flatten(0, 1).float())
            payload = (flat.view_as(packed), scales.view(EXPERTS_A_RANK, places, -1))
        return payload, counts, handle, PlayedEvent(), self._under_way(return_recv_hook)

    def low_latency_combine(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, handle: Any, *, return_recv_hook: bool) -> tuple[Any, ...]:  # fmt: skip
        self._close("low_latency_combine", handle)
        origin, num_rows = handle
        total = torch.zeros(num_rows, x.shape[2])
        for rows, sources in exchanged((x, origin)):
            for expert, place in (sources[..., 0] == dist.get_rank()).nonzero().tolist():
                _, row, k = sources[expert, place].tolist()
                total[row] += weights[row, k] * rows[expert, place].float()
        return total.to(torch.bfloat16), PlayedEvent(), self._under_way(return_recv_hook)

    def _under_way(self, return_recv_hook: bool) -> Callable[[], None] | None:
        """A send clears the flags of the one before it: that one must have been received."""
        assert self.to_receive == 0, "sent again before the last send was received"
        self.to_receive = int(return_recv_hook)
        return self._receive if return_recv_hook else None

    def _receive(self) -> None:
        self.to_receive -= 1
        self.calls.append("receive")

    def _open(self, call: str, handle: Any) -> None:
        self.calls.append(call)
        self.open_handles.add(id(handle))

    def _close(self, call: str, handle: Any) -> None:
        self.calls.append(call)
        self.open_handles.remove(id(handle))


class PlayedLibrary:
    """The module."""

    Buffer = PlayedBuffer


def played_dispatcher(
    context: RankContext, options: DeepEpOptions, scenario: DispatchScenario, in_flight: int = 1
) -> tuple[DeepEpDispatcher, GuardedDispatcher]:
    spec = DispatcherSpec(
        sizes=scenario.sizes,
        place=context.place(scenario.sizes),
        comms=context.comms_of(scenario.sizes),
        hidden_size=scenario.hidden_size,
        top_k=scenario.top_k,
        num_physical_experts=scenario.num_physical_experts,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
        max_rows_per_rank=CAPACITY,
        max_decode_rows_per_rank=CAPACITY,
        max_in_flight=in_flight,
        expert_alignment=8,
        wire_dtype=WireDtype.NATIVE,
    )
    inner = DeepEpDispatcher(spec, options, PlayedLibrary, dist.group.WORLD)
    return inner, GuardedDispatcher(inner, spec)


SCENARIO = DispatchScenario(sizes=TWO, live_tokens=(5, 8), dtype="bfloat16", hidden_size=HIDDEN_SIZE)


def fly_played(context: RankContext, mode: str, wire: str, scenario: DispatchScenario) -> tuple[float, int, list[str]]:
    """Relative error of a round trip, (row, expert) pairs that came, and the library's calls."""
    options = DeepEpOptions(mode=mode, wire=wire)  # type: ignore[arg-type]
    # Built for two in flight, as under two_batch: a step of one still is ordered by the current stream.
    inner, dispatcher = played_dispatcher(context, options, scenario, in_flight=2)
    flight = Flight(context, dispatcher, scenario)
    inner._buffer.calls.clear()
    flight.dispatch_begin()
    flight.experts()
    error = flight.combine_end()
    assert not inner._buffer.open_handles, "a handle was not given back"
    return error, flight.received_pairs, inner._buffer.calls


@pytest.mark.parametrize("wire", ["bf16", "fp8"])
@pytest.mark.parametrize("mode", ["normal", "low_latency"])
@pytest.mark.parametrize(
    "changes",
    [{}, {"live_tokens": (0, 3)}, {"live_tokens": (0, 0)}, {"routing": "first_rank"}, {"routing": "one_expert", "top_k": 1}, {"routing": "replicas", "experts": "replicated", "top_k": 2}, {"routing": "holes"}, {"routing": "nowhere"}],
    ids=str,
)  # fmt: skip
def test_a_round_trip_gives_the_weighted_sum(
    mode: str, wire: str, changes: dict[str, Any], rank_pool: Callable[[int], RankPool]
) -> None:
    scenario = attrs.evolve(SCENARIO, **changes)
    reports = rank_pool(2).run(fly_played, mode, wire, scenario)
    wanted = int((routed_rows(scenario).topk_ids >= 0).sum())
    assert sum(pairs for _, pairs, _ in reports) == wanted
    for error, _, calls in reports:
        assert error <= TOLERANCES[wire]
        protocol = "" if mode == "normal" else "low_latency_"
        assert calls == [f"{protocol}dispatch", f"{protocol}combine"]


def alternate(context: RankContext, order: str, modes: dict[str, DispatchMode], micro_batches: int) -> list[float]:
    """Two micro-batches in flight, each in its protocol; letters as in the conformance kit."""
    _, dispatcher = played_dispatcher(context, DeepEpOptions(), SCENARIO, in_flight=2)
    errors: list[float] = []
    flights = {letter: Flight(context, dispatcher, SCENARIO, slot=slot) for slot, letter in enumerate(modes)}

    def begin(letter: str) -> None:
        rows = routed_rows(SCENARIO).held(dispatcher.capabilities.input_rows, SCENARIO, context.rank)
        step = DispatchStep(mode=modes[letter], micro_batches=micro_batches)
        flights[letter].pending = dispatcher.dispatch_begin(
            rows.hidden_states, rows.topk_ids, rows.topk_weights, step, flights[letter].slot
        )

    moves = {
        letter: iter((functools.partial(begin, letter), flight.experts, flight.combine_end))
        for letter, flight in flights.items()
    }
    for letter in order:
        found = next(moves[letter])()
        errors += [] if found is None else [found]
    return errors


@pytest.mark.parametrize("order", ["ababab", "abbaab", "aabbab", "abbbaa"])
@pytest.mark.parametrize("first", list(DispatchMode))
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_any_protocols_may_be_in_flight_at_once(
    micro_batches: int, first: DispatchMode, order: str, rank_pool: Callable[[int], RankPool]
) -> None:
    modes = {"a": first, "b": DispatchMode.LOW_LATENCY}
    for errors in rank_pool(2).run(alternate, order, modes, micro_batches):
        assert len(errors) == 2
        assert max(errors) <= TOLERANCES["bf16"]


def normal_calls(context: RankContext, micro_batches: int) -> tuple[list[int], int]:
    """Multiprocessors of the normal calls of a step, and the bytes of the buffer."""
    options = DeepEpOptions(mode="normal", num_sms=24, overlap_sms=8)
    inner, dispatcher = played_dispatcher(context, options, SCENARIO, in_flight=2)
    flight = Flight(context, dispatcher, SCENARIO)
    inner._buffer.multiprocessors.clear()
    rows = routed_rows(SCENARIO).held(dispatcher.capabilities.input_rows, SCENARIO, context.rank)
    step = DispatchStep(micro_batches=micro_batches)
    flight.pending = dispatcher.dispatch_begin(rows.hidden_states, rows.topk_ids, rows.topk_weights, step, 0)
    flight.experts()
    assert flight.combine_end() <= TOLERANCES["bf16"]
    return inner._buffer.multiprocessors, inner._buffer.sizes[0]


@pytest.mark.parametrize(("micro_batches", "multiprocessors"), [(1, 24), (2, 8)])
def test_transfers_beside_other_work_take_their_own_number_of_multiprocessors(
    rank_pool: Callable[[int], RankPool], micro_batches: int, multiprocessors: int
) -> None:
    """And the buffer holds the channels of the larger number, whichever it is."""
    for taken, nvl_bytes in rank_pool(2).run(normal_calls, micro_batches):
        assert taken == [multiprocessors]
        assert nvl_bytes == 2 * HIDDEN_SIZE * 2 * 24


def too_many_low_latency_rows(context: RankContext) -> str:
    """What a low-latency step of more rows than its buffers hold is told; nobody enters a collective."""
    options = DeepEpOptions(mode="auto", low_latency_rows=CAPACITY)
    inner, _ = played_dispatcher(context, options, SCENARIO)
    rows = torch.zeros(CAPACITY + 1, HIDDEN_SIZE, dtype=torch.bfloat16)
    ids, weights = torch.zeros(CAPACITY + 1, 3, dtype=torch.int64), torch.zeros(CAPACITY + 1, 3)
    with pytest.raises(DispatchMisuse) as raised:
        inner.dispatch_begin(rows, ids, weights, DispatchStep(mode=DispatchMode.LOW_LATENCY), 0)
    return str(raised.value)


def test_rows_beyond_the_low_latency_buffers_are_refused_not_lost(rank_pool: Callable[[int], RankPool]) -> None:
    for message in rank_pool(2).run(too_many_low_latency_rows):
        assert "set dispatcher.low_latency_rows to 65" in message


def test_a_dispatcher_for_more_rows_than_fit_is_not_built() -> None:
    spec: Any = SimpleNamespace(max_rows_per_rank=9000, max_decode_rows_per_rank=1025)
    with pytest.raises(CapacityTooSmall) as raised:
        DeepEpDispatcher(spec, DeepEpOptions(), PlayedLibrary, None)  # type: ignore[arg-type]
    assert raised.value.needed == 1025
