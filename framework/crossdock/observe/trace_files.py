"""Spans as Chrome trace events, which Perfetto opens: a process a rank, a thread a micro-batch, and one for what it runs beside."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from crossdock.errors import LoadFileError
from crossdock.types.observer import Span

STEP_LANES = (2, 5)
"""Threads of the steps themselves, behind those of operations; of even and of odd ones, because a step may begin before the last one ends and
viewers take events of a thread only one in another or one after another."""
BESIDE_LANES = 3
"""The first thread of operations in a stream of their own; one a micro-batch."""


def span_event(rank: int, span: Span) -> dict[str, Any]:
    """A complete event, times in microseconds. Both ends are rounded, so that neighbours never overlap."""
    begin_us, end_us = round(span.begin_us, 3), round(span.begin_us + span.duration_us, 3)
    return {
        "name": span.name,
        "cat": span.category,
        "ph": "X",
        "ts": begin_us,
        "dur": round(max(end_us - begin_us, 0.0), 3),
        "pid": rank,
        "tid": span.micro_batch + BESIDE_LANES * span.is_beside,
        "args": {"layer": span.layer, "step": span.step},
    }


def name_events(rank: int) -> list[dict[str, Any]]:
    """What the lanes are called."""
    lanes = [(micro_batch, f"micro-batch {micro_batch}") for micro_batch in (0, 1)]
    lanes += [(lane + BESIDE_LANES, f"{name}, beside") for lane, name in lanes]
    return [
        {"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"rank {rank}"}},
        *({"name": "thread_name", "ph": "M", "pid": rank, "tid": tid, "args": {"name": name}} for tid, name in lanes),
    ]


def write_trace(path: Path, rank: int, spans: Iterable[Span]) -> None:
    """One rank's spans as a trace file; the folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    events = [*name_events(rank), *(span_event(rank, span) for span in spans)]
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), encoding="utf-8")


def read_trace(path: Path) -> dict[int, tuple[Span, ...]]:
    """Spans by rank; events that are not operations are passed over. A list that is still being written, or whose writer was ended, is read as
    far as it goes.

    Raises:
        LoadFileError: the file cannot be read, or is no trace of ours.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise LoadFileError(f"{path}: {error}") from error
    try:
        spans: dict[int, list[Span]] = {}
        for event in _events(text):
            if event.get("ph") == "X" and "layer" in event.get("args", {}):
                spans.setdefault(int(event["pid"]), []).append(_span(event))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise LoadFileError(
            f"{path} is no trace of Crossdock ({error}); give a file of /stop_profile or of the chrome_trace observer"
        ) from error
    return {rank: tuple(found) for rank, found in sorted(spans.items())}


def _events(text: str) -> list[dict[str, Any]]:
    if not text.lstrip().startswith("["):
        content: dict[str, list[dict[str, Any]]] = _parsed(text)
        return content["traceEvents"]
    body = text.strip().removesuffix("]").rstrip().rstrip(",")
    try:
        events: list[dict[str, Any]] = _parsed(body + "]")
    except json.JSONDecodeError:
        # An event is a line: the last one may be half there.
        events = _parsed(body.rpartition("\n")[0].rstrip().rstrip(",") + "]")
    return events


def _parsed(text: str) -> Any:
    return json.loads(text, parse_constant=_refused)


def _refused(constant: str) -> float:
    """JSON has no such numbers, and nothing can be summed with them."""
    raise ValueError(f"{constant} is no time")


def _span(event: Mapping[str, Any]) -> Span:
    lane = int(event["tid"])
    is_beside = lane >= BESIDE_LANES
    begin_us, duration_us = float(event["ts"]), float(event["dur"])
    if not (math.isfinite(begin_us) and 0.0 <= duration_us < math.inf):
        raise ValueError(f"an operation from {begin_us} us for {duration_us} us")
    return Span(
        step=int(event["args"]["step"]),
        micro_batch=lane - BESIDE_LANES * is_beside,
        is_beside=is_beside,
        layer=int(event["args"]["layer"]),
        name=str(event["name"]),
        category=str(event["cat"]),
        begin_us=begin_us,
        duration_us=duration_us,
    )
