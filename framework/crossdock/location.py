"""Typed entry to the ``expert_location`` point, and placements as device tensors of fixed shape and address."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import attrs

from crossdock.errors import InvalidPlacement
from crossdock.plugin_call import build
from crossdock.registry import load_plugin
from crossdock.types.location import Picker

if TYPE_CHECKING:
    import torch

    from crossdock.types.location import PickerSpec, PlacementMaps
    from crossdock.types.placement import Placement


def make_expert_location(name: str, options: Mapping[str, object], spec: PickerSpec) -> Picker:
    """The picker ``name`` for ``spec``.

    Raises:
        PluginError: it cannot be loaded, declines (``static`` where ranks hold the same rows), or lacks methods of the protocol.
        ConfigValueError: an option is wrong.
    """
    picker: Picker = build(load_plugin("expert_location", name), Picker, options=options, spec=spec)
    return picker


def replica_width(num_physical_experts: int, num_logical_experts: int, max_replicas: int = 0) -> int:
    """X, the fixed width of replica lists: ``max_replicas``, or for 0 the most that one expert can ever have, P - E + 1."""
    most = num_physical_experts - num_logical_experts + 1
    return min(max_replicas, most) if max_replicas else most


def placement_maps(placement: Placement, device: torch.device, *, max_replicas: int = 0) -> PlacementMaps:
    """Device tensors for ``placement``, wide enough for every later one; the only place that allocates them.

    Raises:
        InvalidPlacement: an expert has more replicas than ``max_replicas``.
    """
    import torch

    maps = _empty_maps(placement, torch.device("cpu"), max_replicas)
    if device.type != "cpu":
        maps = attrs.evolve(_empty_maps(placement, device, max_replicas), on_host=maps)
    for layer in range(placement.num_layers):
        overwrite_layer(maps, layer, placement)
    return maps


def _empty_maps(placement: Placement, device: torch.device, max_replicas: int) -> PlacementMaps:
    import torch

    from crossdock.types.location import PlacementMaps

    num_layers, num_physical = placement.physical_to_logical.shape
    num_logical = placement.replica_counts.shape[1]
    width = replica_width(num_physical, num_logical, max_replicas)
    return PlacementMaps(
        physical_to_logical=torch.empty((num_layers, num_physical), dtype=torch.int64, device=device),
        logical_to_physical=torch.full((num_layers, num_logical, width), -1, dtype=torch.int64, device=device),
        replica_counts=torch.empty((num_layers, num_logical), dtype=torch.int64, device=device),
    )


def overwrite_layer(maps: PlacementMaps, layer: int, placement: Placement, row: int | None = None) -> None:
    """Copies one layer of ``placement`` over the maps in place: between two steps, addresses and shapes unchanged.

    Args:
        maps: to be changed.
        layer: their row.
        placement: where the new content comes from.
        row: its row; the same when None.

    Raises:
        InvalidPlacement: another number of slots or experts, or an expert has more replicas than the maps are wide.
    """
    import torch

    row = layer if row is None else row
    slots, replicas = placement.physical_to_logical[row], placement.logical_to_physical[row]
    counts = placement.replica_counts[row]
    num_logical, width = maps.logical_to_physical.shape[1:]
    found = (len(slots), len(counts))
    if found != (maps.physical_to_logical.shape[1], num_logical):
        raise InvalidPlacement(
            f"layer row {layer}: the placement has {found[0]} slots and {found[1]} experts, the maps were made for "
            f"{maps.physical_to_logical.shape[1]} and {num_logical}"
        )
    most = int(counts.max())
    if most > width:
        raise InvalidPlacement(
            f"layer row {layer}: an expert has {most} replicas and the maps hold {width}; raise eplb.max_replicas"
        )
    kept = min(width, replicas.shape[1])
    host = maps.host
    host.physical_to_logical[layer].copy_(torch.as_tensor(slots))
    host.logical_to_physical[layer].fill_(-1)
    host.logical_to_physical[layer, :, :kept].copy_(torch.as_tensor(replicas[:, :kept].copy()))
    host.replica_counts[layer].copy_(torch.as_tensor(counts))
    if maps.on_host is not None:
        for name in ("physical_to_logical", "logical_to_physical", "replica_counts"):
            # Pinned, or the copy would wait for the step that is running.
            getattr(maps, name)[layer].copy_(getattr(host, name)[layer].pin_memory(), non_blocking=True)
