"""What ``crossdock plan`` says about a placement."""

from __future__ import annotations

import sys
from typing import Any

from crossdock.move_plan import move_plan
from crossdock.placement import balancedness, gpu_loads, placement_change
from crossdock.types.moves import MOVE_KINDS
from crossdock.types.placement import Placement, Topology

_LONG_LAYERS = 20


def plan_report(
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
        **move_sizes(old, new, topology, expert_bytes),
    }


def move_sizes(old: Placement, new: Placement, topology: Topology, expert_bytes: int | None) -> dict[str, Any]:
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


def print_report(report: dict[str, Any]) -> None:
    """A row a layer, then the moves: what a person wants to see of ``plan_report``."""
    following = report["next"] or [None] * len(report["now"])
    print(f"{'layer':>5} {'now':>7} {'next':>7} {'moved':>6}")
    for layer, row in enumerate(zip(report["now"], following, report["moved_slots"], strict=True)):
        print(f"{layer:>5} {row[0]:7.4f} {_number(row[1]):>7} {row[2]:>6}")
    print(
        f"balancedness on window {report['planned_window']} of {report['windows']}: {report['now_mean']:.4f}"
        f" (worst {report['now_worst']:.4f}), {report['from']} placement {report['before_mean']:.4f}"
    )
    print(f"on the following window: {_number(report['next_mean'])} (worst {_number(report['next_worst'])})")
    print(moves_line(report))
    print(f"predicted gain: the fullest GPUs have {report['predicted_gain']:.1%} less to do")
    for note in report["notes"]:
        print(f"note: {note}")


def moves_line(report: dict[str, Any]) -> str:
    """How many slots move, and how many bytes when that is known."""
    moved = sum(report["moved_slots"])
    text = f"slots moved: {moved} ({moved / max(1, len(report['moved_slots'])):.1f} a layer)"
    if report["bytes"] is None:
        return text + "; bytes: give --expert-bytes"
    listed = ", ".join(f"{kind} {size / 2**20:.1f} MiB" for kind, size in report["bytes"].items() if size)
    return f"{text}; bytes: {listed or 'none'}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
