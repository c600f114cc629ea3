"""``crossdock plan``: an expert placement from recorded loads; ``crossdock plan diff`` compares two placements."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from cyclopts import App, Parameter

from crossdock.errors import ConfigValueError
from crossdock.move_plan import move_plan
from crossdock.placement import balancedness, check_fits, gpu_loads, placement_change, trivial_placement
from crossdock.placement_io.load_files import read_load
from crossdock.placement_io.placement_files import Origin, PlacementFormat, read_placement, write_placement
from crossdock.planning import read_algo, windows
from crossdock.types.moves import MOVE_KINDS
from crossdock.types.placement import ExpertLoad, Placement, Topology

plan = App(name="plan", help="Plan an expert placement from recorded loads, or compare two placements.")
_LONG_LAYERS = 20


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
    topology = Topology(num_gpus=gpus, num_nodes=nodes, num_physical_experts=slots, num_groups=groups)
    choice = read_algo(algo, option)
    load = read_load(loads)
    parts = windows(load, window)
    if not -len(parts) <= at < len(parts):
        raise ConfigValueError([f"--at {at}: there are {len(parts)} windows of {window} steps"])
    at %= len(parts)
    old = None
    if current is not None:
        old = read_placement(current, num_logical_experts=load.num_logical_experts, num_layers=load.num_layers)
        check_fits(old, topology, num_layers=load.num_layers, num_experts=load.num_logical_experts)
    planned = ExpertLoad(counts=np.stack(parts[max(0, at + 1 - max(1, history)) : at + 1]))
    new = choice.make().plan(planned, topology, old)
    check_fits(new, topology, num_layers=load.num_layers, num_experts=load.num_logical_experts)
    if out is not None:
        write_placement(
            out, new, origin=Origin(algo=choice.name, topology=topology, options=choice.options), format=format
        )
    start = old or trivial_placement(new.num_layers, new.num_logical_experts, new.num_physical_experts)
    report = _report(start, new, topology, parts, at, expert_bytes)
    report |= {"algo": choice.spelled, "from": "current" if old is not None else "trivial", "notes": list(new.notes)}
    if len(parts) > 1 and window == 1 and len(parts) > 2 * at + 2:
        report["notes"].append(
            f"planned on window {at} of {len(parts)} ({window} step each): --window sums steps, --at takes another window"
        )
    print(json.dumps(report)) if json_ else _print_report(report)


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
    before = read_placement(old)
    after = read_placement(new, num_logical_experts=before.num_logical_experts, num_layers=before.num_layers)
    topology = Topology(num_gpus=gpus, num_nodes=nodes, num_physical_experts=before.num_physical_experts)
    change = placement_change(before, after, topology)
    report: dict[str, Any] = {
        "layers": before.num_layers,
        "moved_slots": [int(moved) for moved in change.moved],
        "slots_changed": [int(changed) for changed in change.slots_changed],
        "experts_with_other_replica_count": [int(changed) for changed in change.replicas_changed],
        **_moves(before, after, topology, expert_bytes),
    }
    if json_:
        print(json.dumps(report))
        return
    print(f"{'layer':>5} {'moved':>6} {'slots changed':>14} {'other counts':>13}")
    for layer, row in enumerate(zip(change.moved, change.slots_changed, change.replicas_changed, strict=True)):
        print(f"{layer:>5} {row[0]:>6} {row[1]:>14} {row[2]:>13}")
    print(_moves_line(report))


def _report(
    old: Placement, new: Placement, topology: Topology, parts: list[Any], at: int, expert_bytes: int | None
) -> dict[str, Any]:
    """Everything that is printed, as plain JSON values."""
    now = balancedness(new, parts[at], topology)
    before = balancedness(old, parts[at], topology)
    following = balancedness(new, parts[at + 1], topology) if at + 1 < len(parts) else None
    moved = placement_change(old, new, topology).moved
    peaks = [gpu_loads(placement, parts[at], topology).max(axis=1).sum() for placement in (old, new)]
    return {
        "windows": len(parts),
        "planned_window": at,
        "now": now.tolist(),
        "now_mean": float(now.mean()),
        "now_worst": float(now.min()),
        "next": None if following is None else following.tolist(),
        "next_mean": None if following is None else float(following.mean()),
        "next_worst": None if following is None else float(following.min()),
        "before_mean": float(before.mean()),
        "moved_slots": [int(count) for count in moved],
        "predicted_gain": float(1 - peaks[1] / peaks[0]) if peaks[0] > 0 else 0.0,
        **_moves(old, new, topology, expert_bytes),
    }


def _moves(old: Placement, new: Placement, topology: Topology, expert_bytes: int | None) -> dict[str, Any]:
    """Counts, and bytes when the size of an expert is known, by kind of move."""
    counts = dict.fromkeys(MOVE_KINDS, 0)
    for layer in _with_progress(move_plan(old, new, topology), new.num_layers):
        for kind, number in layer.bytes_by_kind(1).items():
            counts[kind] += number
    sizes = None if expert_bytes is None else {kind: number * expert_bytes for kind, number in counts.items()}
    return {"moves": counts, "bytes": sizes}


def _with_progress(layers: Any, num_layers: int) -> Any:
    """A progress bar on a terminal when there is much to do."""
    if num_layers < _LONG_LAYERS or not sys.stderr.isatty():
        return layers
    from rich.console import Console
    from rich.progress import track

    return track(layers, description="moves by layer", console=Console(stderr=True), transient=True)


def _print_report(report: dict[str, Any]) -> None:
    following = report["next"] or [None] * len(report["now"])
    print(f"{'layer':>5} {'now':>7} {'next':>7} {'moved':>6}")
    for layer, row in enumerate(zip(report["now"], following, report["moved_slots"], strict=True)):
        print(f"{layer:>5} {row[0]:7.4f} {_number(row[1]):>7} {row[2]:>6}")
    print(
        f"balancedness on window {report['planned_window']} of {report['windows']}: {report['now_mean']:.4f}"
        f" (worst {report['now_worst']:.4f}), {report['from']} placement {report['before_mean']:.4f}"
    )
    print(f"on the following window: {_number(report['next_mean'])} (worst {_number(report['next_worst'])})")
    print(_moves_line(report))
    print(f"predicted gain: the fullest GPUs have {report['predicted_gain']:.1%} less to do")
    for note in report["notes"]:
        print(f"note: {note}")


def _moves_line(report: dict[str, Any]) -> str:
    moved = sum(report["moved_slots"])
    text = f"slots moved: {moved} ({moved / max(1, len(report['moved_slots'])):.1f} a layer)"
    if report["bytes"] is None:
        return text + "; bytes: give --expert-bytes"
    listed = ", ".join(f"{kind} {size / 2**20:.1f} MiB" for kind, size in report["bytes"].items() if size)
    return f"{text}; bytes: {listed or 'none'}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
