"""Bodies and answers of the placement endpoints."""

from __future__ import annotations

from typing import Any

import attrs


@attrs.frozen(kw_only=True)
class PlanPlacementBody:
    """``POST /placement/plan``: what a plan is worth; with ``dry_run`` false also start to move to it."""

    algo: str | None = None
    """Planner; the configured one when absent."""
    options: dict[str, Any] = attrs.Factory(dict)
    """Of ``algo``."""
    plan: dict[str, Any] | list[Any] | None = None
    """A placement in any of the file formats, instead of a planner's."""
    dry_run: bool = True


@attrs.frozen(kw_only=True)
class ApplyPlacementBody:
    """``POST /placement/apply``: start to move to ``plan``, for instance the answer of ``/placement/plan``."""

    plan: dict[str, Any] | list[Any]
    reason: str | None = None


@attrs.frozen(kw_only=True)
class PlanPlacementResponse:
    """Balancedness is mean over max load of the ranks, by the counts since the last decision; even split over replicas."""

    dry_run: bool
    passes: int
    """Passes in the counts; with 0 every balancedness is 1."""
    balancedness_now: float
    balancedness_now_worst: float
    balancedness_planned: float
    balancedness_planned_worst: float
    layers_changed: int
    moved_slots: int
    moved_bytes: int
    """Over links, all ranks together."""
    physical_to_logical_map: list[list[int]]
    notes: list[str]


@attrs.frozen(kw_only=True)
class ApplyPlacementResponse:
    status: str
    layers_changed: int
