"""Placements as files.

==============  ==========================  ==========================================================================
format          suffix                      content
==============  ==========================  ==========================================================================
crossdock       ``.json``                   ``placement.schema.json`` of this package
sglang          ``.pt``, ``.json``          ``{"physical_to_logical_map": [layers][slots]}``, nothing else in it
vllm            ``.json``                   ``[layers][slots]``, or one ``[slots]`` for all layers
vllm_schedule   ``.jsonl``                  one ``eplb_initial_mapping`` record, version 1
vllm_ascend     ``.json``                   ``layer_list`` of ``device_list`` of ``device_expert``
==============  ==========================  ==========================================================================

Reading tells them apart by their content. All say only which expert a slot holds; replica lists follow from that.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, Literal, cast, get_args

import attrs
import numpy as np
import numpy.typing as npt

from crossdock.errors import InvalidPlacement, LoadFileError
from crossdock.placement_io.content import Content, as_array, read_content
from crossdock.types.placement import Placement, Topology

PlacementFormat = Literal["crossdock", "sglang", "vllm", "vllm_schedule", "vllm_ascend"]
FORMATS: Final[tuple[PlacementFormat, ...]] = get_args(PlacementFormat)
SCHEMA_VERSION: Final = 1
MAP_KEY: Final = "physical_to_logical_map"
_SCHEDULE: Final = "eplb_initial_mapping"

Slots = npt.NDArray[np.int64]


@attrs.frozen(kw_only=True)
class Origin:
    """Where a placement comes from; written into our own format."""

    algo: str
    topology: Topology
    options: Mapping[str, object] = attrs.field(factory=dict[str, object])


def read_placement(
    source: str | Path, *, num_logical_experts: int | None = None, num_layers: int | None = None
) -> Placement:
    """The placement in a file or an inline JSON text, in any of the formats.

    Args:
        num_logical_experts: E; from the content when None (its highest expert number).
        num_layers: for a vLLM map that is one list for all layers; 1 when None.

    Raises:
        LoadFileError: it cannot be read, or holds no placement; names path, key and shape.
    """
    content = read_content(source)
    slots, counts, active = _slots(content, num_layers)
    num_experts = num_logical_experts or (int(slots.max(initial=0)) + 1 if counts is None else counts.shape[1])
    try:
        placement = Placement.from_physical(slots, num_experts, active_slots=active)
    except InvalidPlacement as error:
        raise content.fail(str(error)) from error
    if counts is not None and not np.array_equal(counts, placement.replica_counts):
        raise content.fail(f"{_COUNTS} are not those of {MAP_KEY} with {num_experts} experts")
    return placement


def _slots(content: Content, num_layers: int | None) -> tuple[Slots, Slots | None, npt.NDArray[np.bool_] | None]:
    """Slot map [L, P], replica counts [L, E] where the content states them, and living slots [P] where not all are."""
    if content.mapping is not None:
        return _from_mapping(content, content.mapping)
    if content.records is not None:
        return _from_schedule(content, content.records), None, None
    slots = as_array(content.value, where=content.where, dims=(1, 2), integer=True)
    return (np.tile(slots, (num_layers or 1, 1)) if slots.ndim == 1 else slots), None, None


def _from_mapping(
    content: Content, value: Mapping[str, Any]
) -> tuple[Slots, Slots | None, npt.NDArray[np.bool_] | None]:
    if value.get("record_type") == _SCHEDULE:
        return _from_schedule(content, [value]), None, None
    if "layer_list" in value:
        return _from_ascend(content, value), None, None
    if MAP_KEY not in value:
        raise content.fail(
            f"no placement: expected the key {MAP_KEY}, layer_list or a list, found {', '.join(content.keys) or 'none'}"
        )
    if value.get("schema_version", SCHEMA_VERSION) != SCHEMA_VERSION:
        raise content.fail(f"schema_version is {value['schema_version']}, this version reads {SCHEMA_VERSION}")
    slots = content.array(MAP_KEY, dims=(2,), integer=True)
    if _COUNTS not in value:
        return slots, None, None
    counts = content.array(_COUNTS, dims=(2,), integer=True)
    if _LISTS not in value:
        return slots, counts, None
    lists = content.array(_LISTS, dims=(3,), integer=True)
    try:
        Placement(physical_to_logical=slots, logical_to_physical=lists, replica_counts=counts)
    except InvalidPlacement as error:
        raise content.fail(str(error)) from error
    active = np.zeros(slots.shape[1], dtype=np.bool_)
    active[lists[lists >= 0]] = True
    return slots, counts, active


_LISTS: Final = "logical_to_physical_map"
_COUNTS: Final = "replica_counts"


def _from_schedule(content: Content, records: list[Mapping[str, Any]]) -> Slots:
    for record in records:
        rows = record.get("initial_global_assignments")
        if record.get("record_type") == _SCHEDULE and isinstance(rows, Mapping):
            by_layer = cast("Mapping[str, Any]", rows)
            try:
                ordered = [by_layer[str(layer)] for layer in range(len(by_layer))]
            except KeyError as error:
                raise content.fail(f"initial_global_assignments has no layer {error.args[0]}") from error
            return as_array(ordered, where=f"{content.where}: initial_global_assignments", dims=(2,), integer=True)
    raise content.fail(f"no record of type {_SCHEDULE} with initial_global_assignments")


def _from_ascend(content: Content, value: Mapping[str, Any]) -> Slots:
    try:
        layers = sorted(value["layer_list"], key=lambda layer: layer["layer_id"])
        rows = [
            [
                expert
                for device in sorted(layer["device_list"], key=lambda device: device["device_id"])
                for expert in device["device_expert"]
            ]
            for layer in layers
        ]
        if len({layer["layer_id"] for layer in layers}) < len(layers):
            raise content.fail("layer_list has a layer_id twice")
    except (KeyError, TypeError) as error:
        raise content.fail(f"layer_list is not as expected ({type(error).__name__}: {error})") from error
    return as_array(rows, where=f"{content.where}: layer_list", dims=(2,), integer=True)


def write_placement(
    path: str | Path, placement: Placement, *, origin: Origin, format: PlacementFormat = "crossdock"
) -> None:
    """Write a placement. The folder must exist; an existing file is overwritten.

    Raises:
        LoadFileError: the suffix does not go with the format, or the file cannot be written.
    """
    target = Path(path)
    suffixes, render = _WRITERS[format]
    if target.suffix not in suffixes:
        raise LoadFileError(f"{target}: format {format} is written to {' or '.join(suffixes)}")
    try:
        if target.suffix == ".pt":
            _save_torch(target, placement)
        else:
            target.write_text(json.dumps(render(placement, origin)) + "\n", encoding="utf-8")
    except OSError as error:
        raise LoadFileError(f"{target}: cannot be written ({error.strerror or error})") from error


def _save_torch(path: Path, placement: Placement) -> None:
    import torch

    torch.save({MAP_KEY: torch.tensor(placement.physical_to_logical.tolist(), dtype=torch.int64)}, path)


def placement_document(placement: Placement, origin: Origin) -> dict[str, Any]:
    """The placement in our own format, as plain JSON values."""
    topology = origin.topology
    return {
        "schema_version": SCHEMA_VERSION,
        MAP_KEY: placement.physical_to_logical.tolist(),
        _LISTS: placement.logical_to_physical.tolist(),
        _COUNTS: placement.replica_counts.tolist(),
        "algo": origin.algo,
        "config": {
            "num_gpus": topology.num_gpus,
            "num_nodes": topology.num_nodes,
            "num_physical_experts": topology.num_physical_experts,
            "num_groups": topology.num_groups,
            "active_gpus": None if topology.active_gpus is None else list(topology.active_gpus),
            "options": dict(origin.options),
        },
        "notes": list(placement.notes),
    }


def _sglang(placement: Placement, _: Origin) -> dict[str, Any]:
    return {MAP_KEY: placement.physical_to_logical.tolist()}


def _vllm(placement: Placement, _: Origin) -> list[Any]:
    rows: list[Any] = placement.physical_to_logical.tolist()
    return rows


def _vllm_schedule(placement: Placement, _: Origin) -> dict[str, Any]:
    rows = placement.physical_to_logical.tolist()
    return {
        "record_type": _SCHEDULE,
        "version": 1,
        "num_redundant_experts": placement.num_physical_experts - placement.num_logical_experts,
        "num_slots": placement.num_physical_experts,
        "initial_global_assignments": {str(layer): row for layer, row in enumerate(rows)},
    }


def _vllm_ascend(placement: Placement, origin: Origin) -> dict[str, Any]:
    devices = placement.physical_to_logical.reshape(placement.num_layers, origin.topology.num_gpus, -1).tolist()
    return {
        "moe_layer_count": placement.num_layers,
        "layer_list": [
            {
                "layer_id": layer,
                "device_count": len(row),
                "device_list": [{"device_id": device, "device_expert": experts} for device, experts in enumerate(row)],
            }
            for layer, row in enumerate(devices)
        ],
    }


_WRITERS: Final[dict[PlacementFormat, tuple[tuple[str, ...], Callable[[Placement, Origin], Any]]]] = {
    "crossdock": ((".json",), placement_document),
    "sglang": ((".json", ".pt"), _sglang),
    "vllm": ((".json",), _vllm),
    "vllm_schedule": ((".jsonl",), _vllm_schedule),
    "vllm_ascend": ((".json",), _vllm_ascend),
}
