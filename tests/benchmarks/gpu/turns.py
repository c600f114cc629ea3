"""Times calls that take turns on one GPU at its power limit.

The clock follows the power of the last tenths of a second, in swings of a few per cent, and a call after one that needs little power runs faster.
Turns are therefore much shorter than that, so that all calls meet the same clocks, and many, and each round has an order of its own.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable
from typing import Any

import torch

CALLS = 4
"""Calls in a graph."""
TURN_US = 10_000
"""Of one call."""
HEATING = 0.3
"""Share of the rounds that do not count."""


def turns_us(calls: dict[str, Callable[[], Any]], seconds: float = 0.3) -> dict[str, float]:
    """Microseconds of each call: medians over rounds in which its graph is replayed for ``TURN_US``, ``seconds`` a call in all."""
    graphs = {name: _captured(call) for name, call in calls.items()}
    replays = {name: max(1, round(TURN_US / _first_us(graph))) for name, graph in graphs.items()}
    rounds = max(4, round(seconds * 1e6 / TURN_US))
    turns: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in calls}
    draws = random.Random(0)
    for _ in range(rounds):
        for name in draws.sample(list(calls), len(calls)):
            turns[name].append(_replayed(graphs[name], replays[name]))
    torch.cuda.synchronize()
    return {name: _median_us(turns[name][int(rounds * HEATING) :], CALLS * replays[name]) for name in calls}


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


def _replayed(graph: torch.cuda.CUDAGraph, replays: int) -> tuple[torch.cuda.Event, torch.cuda.Event]:
    """Before and after some replays; nothing waits for them."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(replays):
        graph.replay()
    end.record()
    return start, end


def _first_us(graph: torch.cuda.CUDAGraph) -> float:
    """A replay, after one that does not count."""
    graph.replay()
    start, end = _replayed(graph, 1)
    torch.cuda.synchronize()
    return start.elapsed_time(end) * 1e3


def _median_us(turns: list[tuple[torch.cuda.Event, torch.cuda.Event]], calls: int) -> float:
    """Of one call, where a turn has ``calls``."""
    return round(statistics.median(start.elapsed_time(end) for start, end in turns) * 1e3 / calls, 1)
