"""The expert-load recorder: where routed tokens go, per pass and layer, without waiting for the device in a step.

One row of the ring is one global pass: ranks advance together, idle ones with a row of zeros, so rings can be added over ranks. Only the
first rank that holds a row counts it, so the sum over ranks is exactly tokens x top-k. Counts are kept by physical expert and become
logical by the map in force when they were made.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Protocol

import attrs
import torch

from crossdock.observe.pass_records import PassRecord, PassRecords
from crossdock.observe.recorder_ring import CountRing
from crossdock.observe.recorder_window import LoadWindow
from crossdock.types.layout import TokenAxis

if TYPE_CHECKING:
    from crossdock.types.batch import ForwardBatch
    from crossdock.types.comm import GroupComm
    from crossdock.types.dispatch import Received
    from crossdock.types.layout import Layout
    from crossdock.types.location import PlacementMaps
    from crossdock.types.parallel import ParallelSizes, RankPlace


class RecorderMode(enum.Enum):
    """What is kept of a pass."""

    OFF = "off"
    STAT = "stat"
    """Counts of routed tokens in a ring."""
    STAT_APPROX = "stat_approx"
    """Counts of what arrived at the experts, in a ring; includes what a dispatcher rounds up."""
    PER_PASS = "per_pass"
    """As ``stat``, and a record of each pass in the ring."""
    PER_TOKEN = "per_token"
    """As ``per_pass``, and the chosen experts of each token."""


@attrs.frozen(kw_only=True, eq=False)
class RecorderSpec:
    """What a recorder is built for. L MoE layers, P physical and E logical experts."""

    mode: RecorderMode
    maps: PlacementMaps
    sizes: ParallelSizes
    place: RankPlace
    input_rows: Layout
    """Rows that the dispatcher takes: decides which rank counts a row that several hold."""
    buffer_steps: int = 1000
    """Passes kept in the ring."""


class CountSink(Protocol):
    """Gets the counts of every pass that may be recorded, whether the recorder was started or not: balancing and reports count always."""

    def push(self, counts: torch.Tensor) -> None:
        """[L, P] int32 of one pass on this rank; copy what is kept."""
        ...

    def flush_layer(self, layer: int) -> None:
        """The layer's map is about to be overwritten."""
        ...


class NoRecorder:
    """Mode ``off``: nothing is counted."""

    def record(self, layer: int, physical_ids: torch.Tensor) -> None:
        """Nothing."""

    def record_received(self, layer: int, received: Received) -> None:
        """Nothing."""


class ExpertLoadRecorder:
    """Counts between ``begin_pass`` and ``end_pass``, while started. All ranks call both for every pass of the model."""

    def __init__(self, spec: RecorderSpec) -> None:
        self._spec = spec
        num_layers, num_physical = spec.maps.physical_to_logical.shape
        device = spec.maps.physical_to_logical.device
        self._ring = CountRing(spec.buffer_steps, spec.maps)
        self._window = LoadWindow(num_layers, num_physical, spec.sizes.moe_ep_size, device)
        # Column 0 takes ids of -1, so that counting needs no mask.
        self._counts = torch.zeros((num_layers, num_physical + 1), dtype=torch.int32, device=device)
        self._one = torch.ones(1, dtype=torch.int32, device=device)
        self._topk: dict[int, torch.Tensor] = {}
        self._records = PassRecords(spec.buffer_steps, spec.maps)
        self._counts_rows = _is_first_holder(spec.input_rows, spec.place)
        self._counts_received = spec.place.moe_tp_rank == 0
        self._started = False
        self._sinks: list[CountSink] = []
        self._in_pass: int | None = None
        self._is_captured = False
        self._batch: ForwardBatch | None = None

    @property
    def is_recording(self) -> bool:
        return self._started

    @property
    def num_passes(self) -> int:
        """Passes in the ring, at most ``buffer_steps``."""
        return self._ring.fill

    @property
    def records(self) -> tuple[PassRecord, ...]:
        """The last ``buffer_steps`` passes since ``start``, in the fine-grained modes."""
        return self._records.all()

    def start(self) -> bool:
        """Forgets everything and starts. False when it was recording already (it starts afresh all the same)."""
        was_recording = self._started
        self._ring.clear()
        self._window.clear()
        self._records.clear()
        self._started = True
        return not was_recording

    def stop(self) -> None:
        """Keeps what was counted and counts no more."""
        self._started = False

    def add_sink(self, sink: CountSink) -> None:
        """From now on ``sink`` gets counts, after the recorder's own."""
        self._sinks.append(sink)

    def begin_pass(self, pass_id: int, *, record: bool = True, batch: ForwardBatch | None = None) -> None:
        """Before a forward pass. ``record`` is a global decision, equal on all ranks: False for warm-up, idle and health-check passes.

        ``batch`` gives token ids and positions to ``per_token``.
        """
        is_wanted = self._started or bool(self._sinks)
        self._in_pass = pass_id if record and is_wanted else None
        self._batch = batch

    def begin_capture(self) -> None:
        """Before a pass that is captured to be repeated: it counts in every repetition, whether that is recorded or not."""
        self._in_pass, self._is_captured = -1, True

    def end_capture(self) -> None:
        """After it. What capturing itself counted is forgotten."""
        self._in_pass = None
        self._counts.zero_()

    def record(self, layer: int, physical_ids: torch.Tensor) -> None:
        if self._in_pass is None or self._spec.mode is RecorderMode.STAT_APPROX:
            return
        if self._counts_rows:
            self._count(layer, physical_ids.reshape(-1))
        if self._started and self._spec.mode is RecorderMode.PER_TOKEN:
            known = self._topk.get(layer)
            self._topk[layer] = physical_ids.clone() if known is None else torch.cat((known, physical_ids))

    def record_received(self, layer: int, received: Received) -> None:
        if self._in_pass is None or self._spec.mode is not RecorderMode.STAT_APPROX or not self._counts_received:
            return
        first = self._spec.place.moe_ep_rank * self._ring.slots_per_rank(self._spec.sizes.moe_ep_size)
        if received.counts is not None:
            counts = torch.as_tensor(received.counts, dtype=torch.int32, device=self._counts.device)
            self._counts[layer, 1 + first : 1 + first + counts.shape[0]] += counts
        elif received.local_topk_ids is not None:
            ids = received.local_topk_ids.reshape(-1)
            self._count(layer, torch.where(ids >= 0, ids + first, -1))

    def end_pass(self) -> None:
        """After a forward pass: the pass becomes a row of the ring."""
        if self._in_pass is None:
            if self._is_captured:
                self._counts.zero_()
            return
        counts = self._counts[:, 1:]
        if self._started:
            self._ring.push(counts)
            self._window.push(counts)
            if self._spec.mode in (RecorderMode.PER_PASS, RecorderMode.PER_TOKEN):
                is_fine = self._spec.mode is RecorderMode.PER_TOKEN
                ids = tuple(self._topk[layer] for layer in sorted(self._topk))
                batch = self._batch if is_fine else None
                self._records.add(self._in_pass, counts.clone(), batch=batch, topk_ids=ids)
        for sink in self._sinks:
            sink.push(counts)
        self._counts.zero_()
        self._topk.clear()
        self._in_pass = self._batch = None

    def flush_layer(self, layer: int) -> None:
        """Turns a layer's counts into logical ones by the map in force, which is about to be overwritten. Between two passes."""
        self._ring.flush_layer(layer)
        self._records.map_changes()
        for sink in self._sinks:
            sink.flush_layer(layer)

    def logical_counts(self, world: GroupComm) -> torch.Tensor:
        """[passes, L, E] int32, oldest pass first, summed over ranks. A collective: every rank calls it after the same pass."""
        return world.all_reduce(self._ring.logical_counts())

    def balancedness(
        self, world: GroupComm, windows: tuple[int, ...] = (10, 100, 1000)
    ) -> dict[int, tuple[float, ...]]:
        """Mean over max load of ranks, per layer, for each window of passes. A collective. 1.0 for a layer without load."""
        return self._window.balancedness(world, windows)

    def _count(self, layer: int, ids: torch.Tensor) -> None:
        self._counts[layer].scatter_add_(0, ids + 1, self._one.expand(ids.shape[0]))


def make_recorder(spec: RecorderSpec) -> ExpertLoadRecorder | NoRecorder:
    """The recorder of a mode."""
    return NoRecorder() if spec.mode is RecorderMode.OFF else ExpertLoadRecorder(spec)


def _is_first_holder(input_rows: Layout, place: RankPlace) -> bool:
    """True on the first of the ranks that hold the same rows."""
    index = {
        TokenAxis.ATTN_DP: place.attn_dp_rank,
        TokenAxis.ATTN_CP: place.attn_cp_rank,
        TokenAxis.ATTN_TP: place.attn_tp_rank,
    }
    return all(index[axis] == 0 for axis in TokenAxis if axis not in input_rows)
