"""Replica pickers: logical to physical expert ids (DESIGN section 10; the facts, section 8.4)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import attrs

if TYPE_CHECKING:
    import torch

    from crossdock.types.comm import Comms
    from crossdock.types.dispatch import Received
    from crossdock.types.parallel import ParallelSizes, RankPlace
    from crossdock.types.placement import Topology


@attrs.frozen(kw_only=True)
class PickerCapabilities:
    """What a picker needs and promises."""

    rank_invariant: bool
    """All ranks pick the same replica for the same row of a replicated buffer."""
    collective_per_layer: bool = False
    capturable: bool = True
    needs_load: bool = False


@attrs.frozen(kw_only=True, eq=False)
class PlacementMaps:
    """A placement as device tensors of fixed address and shape; a switch overwrites them in place. Rows are MoE layers."""

    physical_to_logical: torch.Tensor
    """[L, P] int64."""
    logical_to_physical: torch.Tensor
    """[L, E, X] int64, padded with -1."""
    replica_counts: torch.Tensor
    """[L, E] int64."""
    on_host: PlacementMaps | None = None
    """The same on the host, for maps of a GPU."""

    @property
    def host(self) -> PlacementMaps:
        """For those who look at the numbers: reading them never waits for a GPU."""
        return self if self.on_host is None else self.on_host


@attrs.frozen(kw_only=True, eq=False)
class PickerSpec:
    """What a picker is built for."""

    maps: PlacementMaps
    topology: Topology
    sizes: ParallelSizes
    place: RankPlace
    comms: Comms
    replicated_rows: bool
    """True when the dispatcher computes partial sums over the same rows (picks must be rank-invariant)."""
    seed: int = 0


class Picker(Protocol):
    """Turns logical into physical expert ids, in every MoE layer of every step."""

    @property
    def capabilities(self) -> PickerCapabilities: ...

    def transform_router(
        self, logits: torch.Tensor, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Before top-k: router logits [n, E] and correction bias [E]; identity unless the picker fakes routing."""
        ...

    def pick(self, layer: int, topk_ids: torch.Tensor, live_rows: int | torch.Tensor) -> torch.Tensor:
        """[n, K] int64 logical -> [n, K] int64 physical. ``layer`` is the MoE layer's row. Rows >= live_rows are masked to -1 afterwards.

        Rows that carry no token come with ids of -1, so that a picker can count the others; what is picked for them does not matter.

        Where the maps have room for one replica an expert there is nothing to pick: then a picker without ``collective_per_layer`` and
        ``needs_load`` may be passed over, and the map is taken.

        A picker with ``collective_per_layer`` is called on every rank for every MoE layer, zero rows included.
        """
        ...

    def placement_changed(self, layer: int) -> None:
        """The maps of this MoE layer were overwritten in place between two steps."""
        ...


class LoadRecorder(Protocol):
    """Counts where routed tokens go; the seam between the MoE block and the expert-load recorder. No host sync."""

    def record(self, layer: int, physical_ids: torch.Tensor) -> None:
        """``physical_ids`` [n, K] int64 after padding was masked to -1; ``layer`` is the MoE layer's row."""
        ...

    def record_received(self, layer: int, received: Received) -> None:
        """What arrived at this rank's experts, for recorders that count there (``stat_approx``); others ignore it."""
        ...
