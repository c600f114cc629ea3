"""Appends events to a JSON list, which trace viewers read before its end is written."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from crossdock.observe.trace_files import STEP_LANES, name_events, span_event
from crossdock.types.observer import StepEvent


class ChromeTraceObserver:
    """One file; each step is an event, with the operations of those that were timed."""

    def __init__(self, folder: str, rank: int, most_events: int) -> None:
        path = Path(folder) / f"crossdock_rank{rank}.trace.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        self._rank = rank
        self._left = most_events
        # Line by line, so that the file is whole whenever the process ends.
        self._file: TextIO = path.open("w", encoding="utf-8", buffering=1)
        self._file.write("[\n")
        lanes = [
            {"name": "thread_name", "ph": "M", "pid": rank, "tid": tid, "args": {"name": f"{which} steps"}}
            for tid, which in zip(STEP_LANES, ("even", "odd"), strict=True)
        ]
        self._write([*name_events(rank), *lanes])

    def on_step(self, event: StepEvent) -> None:
        """The step, its wait for other replicas, and its operations."""
        now_us = time.perf_counter_ns() / 1e3
        about = {
            "step": event.step,
            "mode": event.forward_mode,
            "overlap": event.overlap,
            "graph": event.graph,
            "tokens": event.local_tokens,
            "all_tokens": list(event.all_tokens),
            "sync_wait_us": round(event.sync_wait_s * 1e6, 1),
        }
        duration_us = event.duration_s * 1e6
        step = {"name": event.forward_mode, "cat": "step", "ph": "X", "ts": now_us - duration_us, "dur": duration_us}
        self._write(
            [
                {**step, "pid": self._rank, "tid": STEP_LANES[event.step % 2], "args": about},
                *(span_event(self._rank, span) for span in event.spans),
            ]
        )

    def on_load(self, forward_mode: str, balancedness_per_layer: tuple[float, ...]) -> None:
        """A counter track of the mean over layers."""
        if balancedness_per_layer:
            mean = sum(balancedness_per_layer) / len(balancedness_per_layer)
            self._instant(f"balancedness {forward_mode}", {"mean": mean}, phase="C")

    def on_rebalance(self, event: Mapping[str, Any]) -> None:
        """A mark in the time line."""
        self._instant("rebalance", {name: str(value) for name, value in event.items()})

    def on_fault(self, rank: int, message: str) -> None:
        """A mark in the time line."""
        self._instant("fault", {"rank": rank, "message": message})

    def _instant(self, name: str, about: Mapping[str, Any], phase: str = "i") -> None:
        event = {"name": name, "ph": phase, "ts": time.perf_counter_ns() / 1e3, "pid": self._rank, "tid": STEP_LANES[0]}
        self._write([{**event, "args": dict(about)}])

    def _write(self, events: list[dict[str, Any]]) -> None:
        for event in events[: self._left]:
            self._file.write(json.dumps(event) + ",\n")
        self._left -= min(self._left, len(events))
