"""``crossdock plan``: an expert placement from recorded loads; ``crossdock plan diff`` compares two placements."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from cyclopts import App, Parameter

from crossdock.cli.plan_report import move_sizes, moves_line, plan_report, print_report
from crossdock.errors import ConfigValueError
from crossdock.placement import check_fits, placement_change, trivial_placement
from crossdock.placement_io.load_files import read_load
from crossdock.placement_io.placement_files import Origin, PlacementFormat, read_placement, write_placement
from crossdock.planning import read_algo, windows
from crossdock.types.placement import ExpertLoad, Placement, Topology

plan = App(name="plan", help="Plan an expert placement from recorded loads, or compare two placements.")


@plan.default
def make_plan(
    loads: Annotated[tuple[str, ...], Parameter(negative="")],
    /,
    *,
    gpus: int,
    slots: int,
    nodes: int = 1,
    groups: int = 1,
    algo: str = "crossdock",
    option: Annotated[tuple[str, ...], Parameter(negative="")] = (),
    current: str | None = None,
    out: Path | None = None,
    format: PlacementFormat = "crossdock",
    window: int = 1,
    at: int = 0,
    history: int = 1,
    expert_bytes: int | None = None,
    json_: Annotated[bool, Parameter(name="--json", negative="")] = False,
) -> None:
    """Plan an expert placement from recorded loads.

    Parameters
    ----------
    loads
        Files with expert loads (.npz, .npy, .pt, .json, .jsonl) or an inline JSON text; their steps follow one another.
    gpus
        GPUs of the expert-parallel group.
    slots
        Physical experts in all (logical ones plus redundant ones).
    nodes
        Machines that the GPUs are on.
    groups
        Expert groups of the model's router; planners that know nodes keep groups together.
    algo
        Planner, for instance crossdock, global, hierarchical, elastic; options as NAME:key=value,key=value.
    option
        One planner option as key=value; may be repeated.
    current
        Placement in force: moves are counted from it, and planners that mind moves start from it.
    out
        File for the placement.
    format
        Format of that file.
    window
        Steps that are summed to a window.
    at
        Window to plan on; negative numbers count from the end. The following one is what "next" is judged on.
    history
        Windows up to that one that the planner gets as steps, for its forecast.
    expert_bytes
        Bytes of one expert's tensors in one layer, to print the bytes to move.
    json_
        Print one JSON object instead of the table.
    """
    _check_counts(history=(history, 1), expert_bytes=(expert_bytes, 0))
    topology = Topology(num_gpus=gpus, num_nodes=nodes, num_physical_experts=slots, num_groups=groups)
    choice = read_algo(algo, option)
    load = read_load(loads)
    parts = windows(load, window)
    if not -len(parts) <= at < len(parts):
        raise ConfigValueError([f"--at {at}: there are {len(parts)} windows of {window} steps"])
    at %= len(parts)
    old = None if current is None else _current(current, load, topology)
    planned = ExpertLoad(counts=np.stack(parts[max(0, at + 1 - history) : at + 1]))
    new = choice.make().plan(planned, topology, old)
    check_fits(new, topology, num_layers=load.num_layers, num_experts=load.num_logical_experts)
    if out is not None:
        write_placement(
            out, new, origin=Origin(algo=choice.name, topology=topology, options=choice.options), format=format
        )
    start = old or trivial_placement(new.num_layers, new.num_logical_experts, new.num_physical_experts)
    report = plan_report(start, new, topology, parts, at, expert_bytes)
    report |= {"algo": choice.spelled, "from": "current" if old is not None else "trivial", "notes": list(new.notes)}
    if len(parts) > 1 and window == 1 and len(parts) > 2 * at + 2:
        report["notes"].append(
            f"planned on window {at} of {len(parts)} ({window} step each): --window sums steps, --at takes another window"
        )
    print(json.dumps(report)) if json_ else print_report(report)


@plan.command(name="diff")
def diff(
    old: str,
    new: str,
    /,
    *,
    gpus: int,
    nodes: int = 1,
    expert_bytes: int | None = None,
    json_: Annotated[bool, Parameter(name="--json", negative="")] = False,
) -> None:
    """Compare two placements: what would be moved from where.

    Parameters
    ----------
    old
        Placement in force, in any format.
    new
        Placement to go to.
    gpus
        GPUs of the expert-parallel group.
    nodes
        Machines that the GPUs are on.
    expert_bytes
        Bytes of one expert's tensors in one layer, to print the bytes to move.
    json_
        Print one JSON object instead of the table.
    """
    _check_counts(expert_bytes=(expert_bytes, 0))
    # One list stands for all layers, on either side.
    before = read_placement(old, num_layers=read_placement(new).num_layers)
    after = read_placement(new, num_logical_experts=before.num_logical_experts, num_layers=before.num_layers)
    sizes = [(one.num_layers, one.num_physical_experts, one.num_logical_experts) for one in (before, after)]
    if sizes[0] != sizes[1]:
        were, are = ("{} layers of {} slots and {} experts".format(*each) for each in sizes)
        raise ConfigValueError([f"OLD has {were} and NEW {are}: only placements of the same sizes can be compared"])
    topology = Topology(num_gpus=gpus, num_nodes=nodes, num_physical_experts=before.num_physical_experts)
    change = placement_change(before, after, topology)
    report: dict[str, Any] = {
        "layers": before.num_layers,
        "moved_slots": [int(moved) for moved in change.moved],
        "slots_changed": [int(changed) for changed in change.slots_changed],
        "experts_with_other_replica_count": [int(changed) for changed in change.replicas_changed],
        **move_sizes(before, after, topology, expert_bytes),
    }
    if json_:
        print(json.dumps(report))
        return
    print(f"{'layer':>5} {'moved':>6} {'slots changed':>14} {'other counts':>13}")
    for layer, row in enumerate(zip(change.moved, change.slots_changed, change.replicas_changed, strict=True)):
        print(f"{layer:>5} {row[0]:>6} {row[1]:>14} {row[2]:>13}")
    print(moves_line(report))


def _check_counts(**values: tuple[int | None, int]) -> None:
    """Raises ``ConfigValueError`` naming the options that are below their least value."""
    problems = [
        f"--{name.replace('_', '-')}: must be at least {least}, found {value}"
        for name, (value, least) in values.items()
        if value is not None and value < least
    ]
    if problems:
        raise ConfigValueError(problems)


def _current(source: str, load: ExpertLoad, topology: Topology) -> Placement:
    """The placement in force.

    Raises:
        ConfigValueError: it is one of another model or of another number of slots.
    """
    placement = read_placement(source, num_logical_experts=load.num_logical_experts, num_layers=load.num_layers)
    if placement.num_physical_experts != topology.num_physical_experts:
        raise ConfigValueError(
            [
                f"--current has {placement.num_physical_experts} slots a layer and --slots is {topology.num_physical_experts}: a plan"
                f" starts from a placement of the same slots; give --slots {placement.num_physical_experts}, or leave --current out"
            ]
        )
    if placement.num_layers != load.num_layers:
        raise ConfigValueError(
            [
                f"--current has {placement.num_layers} layers and the load {load.num_layers}: they are not of the same model"
            ]
        )
    return placement
