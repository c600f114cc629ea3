"""Times calls that take turns on one GPU, each for long enough to bring the device to its power limit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

CALLS = 4
"""Calls in a graph."""


def turns_us(calls: dict[str, Callable[[], Any]], seconds: float = 0.3) -> dict[str, float]:
    """Microseconds of each call: graphs replayed for ``seconds``, of which the second half counts, once in order and once in reverse."""
    graphs = {name: _captured(call) for name, call in calls.items()}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for names in (list(calls), list(calls)[::-1]):
        for name in names:
            replays = max(2, int(seconds * 1e6 / 2 / _replays_us(graphs[name], 2)))
            _replays_us(graphs[name], replays)
            times[name].append(_replays_us(graphs[name], replays) / CALLS)
    return {name: round(sum(found) / len(found), 1) for name, found in times.items()}


def _captured(call: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()
    return graph


def _replays_us(graph: torch.cuda.CUDAGraph, replays: int) -> float:
    """Mean of some replays."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(replays):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) * 1e3 / replays
