"""Offline planning over windows of a recorded load: what a planner reaches on the window it saw and on the next one.

A window is the sum of W steps. Plan i is made on window i and judged on window i ("now") and on window i + 1 ("next").
"""

from __future__ import annotations

import itertools
import statistics
import time
import tomllib
from collections.abc import Callable, Iterable, Sequence

import attrs
import numpy as np

from crossdock.errors import ConfigValueError
from crossdock.placement import Floats, balancedness, balancedness_bound, make_eplb_algo, placement_change
from crossdock.types.placement import EplbAlgo, ExpertLoad, Placement, Topology


@attrs.frozen(kw_only=True)
class AlgoChoice:
    """A planner and its options, as a command line names them."""

    name: str
    options: dict[str, object] = attrs.field(factory=dict[str, object])
    spelled: str = ""
    """The words of the user, for reports."""

    def make(self) -> EplbAlgo:
        """The planner."""
        return make_eplb_algo(self.name, self.options)


def read_algo(spec: str, extra: Iterable[str] = ()) -> AlgoChoice:
    """``NAME`` or ``NAME:key=value,key=value``; ``extra`` are further ``key=value`` words.

    Values are read as TOML (numbers, true, quoted text) and else taken as text.

    Raises:
        ConfigValueError: a word is not ``key=value``.
    """
    name, _, words = spec.partition(":")
    options: dict[str, object] = {}
    for word in [*(part for part in words.split(",") if part), *extra]:
        key, equals, value = word.partition("=")
        if not equals or not key.strip():
            raise ConfigValueError([f"planner option {word!r}: expected key=value"])
        options[key.strip()] = _toml_value(value.strip())
    return AlgoChoice(name=name, options=options, spelled=spec)


def _toml_value(text: str) -> object:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def read_topology(config: str) -> Topology:
    """``SLOTS:GPUS[:NODES[:GROUPS]]``, for instance ``288:32:4:8``.

    Raises:
        ConfigValueError: not of this form, or sizes that do not divide.
    """
    parts = config.split(":")
    if not 2 <= len(parts) <= 4 or not all(part.strip().isdecimal() for part in parts):
        raise ConfigValueError([f"config {config!r}: expected SLOTS:GPUS:NODES:GROUPS, for instance 288:32:4:8"])
    slots, gpus, nodes, groups = (int(part) for part in (*parts, "1", "1")[:4])
    return Topology(num_gpus=gpus, num_nodes=nodes, num_physical_experts=slots, num_groups=groups)


def windows(load: ExpertLoad, steps: int) -> list[Floats]:
    """Consecutive windows [L, E] of so many steps; a shorter rest at the end is left out, unless it is all there is.

    Raises:
        ConfigValueError: ``steps`` is below 1.
    """
    if steps < 1:
        raise ConfigValueError([f"window: must be at least 1 step, found {steps}"])
    counts = load.counts
    if len(counts) < steps:
        return [counts.sum(axis=0)]
    return [counts[start : start + steps].sum(axis=0) for start in range(0, len(counts) - steps + 1, steps)]


@attrs.frozen(kw_only=True)
class PlannerScore:
    """One row of ``bench plan``. Means are over layers and plans; ``next`` and ``moved`` are None without a further window."""

    windows: int
    """Plans made."""
    ms_median: float
    """Thread CPU time of a plan."""
    ms_min: float
    now_mean: float
    now_worst: float
    next_mean: float | None
    next_worst: float | None
    moved_slots_mean: float | None
    """Replicas a layer that a GPU did not hold in the plan before."""
    bound_mean: float
    """What no placement can pass on the planned windows."""


def score_planner(
    algo: EplbAlgo,
    topology: Topology,
    parts: Sequence[Floats],
    *,
    history: int = 1,
    chain: bool = False,
    repeat: int = 3,
    progress: Callable[[], None] = lambda: None,
) -> PlannerScore:
    """Plan every window but the last (the only one when there is one) and judge the plans.

    Args:
        algo: the planner; its options are in it.
        parts: windows [L, E].
        history: windows up to the planned one that are given to the planner as steps, for forecasts.
        chain: give each plan to the next as the current placement.
        repeat: timed calls of each plan; the first call of all is not timed.
        progress: called after each plan.
    """
    plans = max(1, len(parts) - 1)
    current: Placement | None = None
    made: list[Placement] = []
    times_ms: list[float] = []
    algo.plan(ExpertLoad(counts=parts[0]), topology, None)
    for index in range(plans):
        load = ExpertLoad(counts=np.stack(parts[max(0, index + 1 - history) : index + 1]))
        placement, elapsed_ms = _timed(algo, load, topology, current)
        times_ms += [elapsed_ms, *(_timed(algo, load, topology, current)[1] for _ in range(repeat - 1))]
        made.append(placement)
        current = placement if chain else None
        progress()
    now = np.stack([balancedness(placement, parts[index], topology) for index, placement in enumerate(made)])
    following = [balancedness(p, parts[index + 1], topology) for index, p in enumerate(made) if index + 1 < len(parts)]
    moved = [placement_change(old, new, topology).moved.mean() for old, new in itertools.pairwise(made)]
    return PlannerScore(
        windows=plans,
        ms_median=statistics.median(times_ms),
        ms_min=min(times_ms),
        now_mean=float(now.mean()),
        now_worst=float(now.min()),
        next_mean=float(np.mean(following)) if following else None,
        next_worst=float(np.min(following)) if following else None,
        moved_slots_mean=float(np.mean(moved)) if moved else None,
        bound_mean=float(np.mean([balancedness_bound(parts[index], topology) for index in range(plans)])),
    )


def _timed(algo: EplbAlgo, load: ExpertLoad, topology: Topology, current: Placement | None) -> tuple[Placement, float]:
    start = time.thread_time_ns()
    placement = algo.plan(load, topology, current)
    return placement, (time.thread_time_ns() - start) / 1e6
