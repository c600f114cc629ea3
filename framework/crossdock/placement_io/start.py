"""The placement that serving starts with (the facts, section 8.2)."""

from __future__ import annotations

from crossdock.errors import LoadFileError
from crossdock.placement import check_fits, trivial_placement
from crossdock.placement_io.content import Content, read_content
from crossdock.placement_io.load_files import VLLM_LOAD, read_load
from crossdock.placement_io.placement_files import read_placement
from crossdock.types.placement import EplbAlgo, Placement, Topology

_COUNT_KEYS = frozenset({"logical_count", "load", "records"})


def start_placement(
    init_location: str, topology: Topology, algo: EplbAlgo, *, num_layers: int, num_experts: int
) -> Placement:
    """``trivial`` (slot i holds expert i mod E), a placement as it is, or one planned from recorded counts.

    Args:
        init_location: ``trivial``, a path, or an inline JSON text; a file of counts may have other keys as well.
        topology: slots, GPUs and nodes of this start.
        algo: plans when there are counts.
        num_layers: MoE layers, L.
        num_experts: logical experts, E.

    Raises:
        LoadFileError: the source holds neither, or its layers or experts are not the model's.
        InvalidPlacement: the placement does not fit the topology.
    """
    if init_location == "trivial":
        return trivial_placement(num_layers, num_experts, topology.num_physical_experts)
    content = read_content(init_location)
    if _has_counts(content):
        load = read_load([init_location])
        found = [load.num_layers, load.num_logical_experts]
        if found != [num_layers, num_experts]:
            raise content.fail(f"counts of {found} [layers, experts], the model has {[num_layers, num_experts]}")
        return algo.plan(load, topology, None)
    placement = read_placement(init_location, num_logical_experts=num_experts, num_layers=num_layers)
    try:
        check_fits(placement, topology, num_layers=num_layers, num_experts=num_experts)
    except Exception as error:
        raise LoadFileError(f"{content.where}: {error}") from error
    return placement


def _has_counts(content: Content) -> bool:
    recorded = any(record.get("record_type") == VLLM_LOAD for record in content.records or ())
    return recorded or bool(_COUNT_KEYS & set(content.keys)) or content.where.lower().endswith(".npy")
