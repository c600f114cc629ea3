"""The receipt: what was chosen, and how often each mode really ran (DESIGN section 13). Counters are plain integers on the host."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
from collections import Counter
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

import attrs

import crossdock
from crossdock.config import Config
from crossdock.config_render import config_tables, resolved_config
from crossdock.groups import group_tables
from crossdock.hookapi import HOOK_API_VERSION
from crossdock.plain_value import plain_value
from crossdock.types.selection import ChosenPlugin, Selection
from crossdock.types.step import StepPlan

SCHEMA_VERSION = 1
_VERSIONED = ("attrs", "numpy", "pluggy", "torch", "triton", "transformers")


@attrs.frozen(kw_only=True)
class RebalanceEntry:
    """One rebalance that was decided, done or rolled back."""

    step: int
    outcome: str
    """``applied``, ``rolled_back`` or ``refused``."""
    reason: str
    moved_slots: int = 0
    moved_bytes: int = 0
    predicted_gain_s: float | None = None
    price_s: float | None = None
    stalled_s: float = 0.0


@attrs.frozen(kw_only=True)
class FaultEntry:
    """A rank that failed, as told to this one."""

    step: int
    rank: int
    message: str


@attrs.define(kw_only=True)
class ReceiptCounters:
    """Counts of one rank since its start; warm-up is not counted because the engine does not report it."""

    padding: Counter[str] = attrs.field(factory=Counter[str])
    dispatch: Counter[str] = attrs.field(factory=Counter[str])
    forward: Counter[str] = attrs.field(factory=Counter[str])
    graph: Counter[str] = attrs.field(factory=Counter[str])
    graph_reasons: Counter[str] = attrs.field(factory=Counter[str])
    overlap: Counter[str] = attrs.field(factory=Counter[str])
    overlap_reasons: Counter[str] = attrs.field(factory=Counter[str])
    parked: int = 0
    capacity: dict[str, int] = attrs.field(factory=dict[str, int])
    """Limits that were computed at start, by name with the unit at the end."""
    rebalances: list[RebalanceEntry] = attrs.field(factory=list[RebalanceEntry])
    faults: list[FaultEntry] = attrs.field(factory=list[FaultEntry])

    def count_step(self, plan: StepPlan) -> None:
        """One finished step; every reason why a mode was not taken is counted with it."""
        if plan.park:
            self.parked += 1
            return
        self.padding[plan.padding_mode.value] += 1
        self.dispatch[plan.dispatch_mode.value] += 1
        self.forward[plan.forward_mode.name.lower()] += 1
        self.graph["eager" if plan.bucket is None else "graph"] += 1
        self.overlap["on" if plan.overlap else "off"] += 1
        if plan.bucket is None and plan.graph_reason:
            self.graph_reasons[plan.graph_reason] += 1
        if not plan.overlap and plan.overlap_reason:
            self.overlap_reasons[plan.overlap_reason] += 1

    def set_capacity(self, name: str, value: int) -> None:
        """Records a limit: ``dispatcher_rows_per_rank``, ``kv_tokens``, ..."""
        self.capacity[name] = value

    def add_rebalance(self, entry: RebalanceEntry) -> None:
        self.rebalances.append(entry)

    def add_fault(self, entry: FaultEntry) -> None:
        self.faults.append(entry)


def make_receipt(config: Config, selection: Selection, counters: ReceiptCounters) -> dict[str, Any]:
    """The receipt as plain data; it satisfies the schema of ``receipt_schema``."""
    chosen = (*selection.plugins, *selection.observers)
    return {
        "schema_version": SCHEMA_VERSION,
        "versions": package_versions(),
        "config": config_tables(resolved_config(config)),
        "plugins": [_plugin_entry(plugin) for plugin in chosen],
        "groups": {table.axis.value: [list(ranks) for ranks in table.ranks] for table in group_tables(selection.sizes)},
        "capabilities": {_key(plugin): plain_value(plugin.capabilities) for plugin in chosen},
        "counts": {
            "padding": dict(counters.padding),
            "dispatch": dict(counters.dispatch),
            "forward": dict(counters.forward),
            "graph": {**_both(counters.graph, "graph", "eager"), "reasons": dict(counters.graph_reasons)},
            "overlap": {**_both(counters.overlap, "on", "off"), "reasons": dict(counters.overlap_reasons)},
            "parked": counters.parked,
        },
        "capacity": dict(counters.capacity),
        "rebalances": [plain_value(entry) for entry in counters.rebalances],
        "faults": [plain_value(entry) for entry in counters.faults],
        "hardware": {
            "device": selection.device,
            "dtype": selection.dtype,
            "row_invariant": selection.row_invariant,
            **_host(),
        },
    }


def package_versions() -> dict[str, str]:
    """Versions of what decides results, read from metadata; absent packages are left out."""
    versions = {
        "crossdock": crossdock.__version__,
        "hook_api": str(HOOK_API_VERSION),
        "python": platform.python_version(),
    }
    for name in _VERSIONED:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def receipt_schema() -> dict[str, Any]:
    """The JSON Schema of a receipt, from package data."""
    text = files("crossdock").joinpath("schemas/receipt.schema.json").read_text(encoding="utf-8")
    schema: dict[str, Any] = json.loads(text)
    return schema


def _plugin_entry(plugin: ChosenPlugin) -> dict[str, Any]:
    return {
        "point": plugin.point,
        "name": plugin.name,
        "distribution": plugin.distribution,
        "version": plugin.version,
        "api": plugin.api,
        "options": plain_value(plugin.options),
        "passed_over": [plain_value(other) for other in plugin.passed_over],
    }


def _key(plugin: ChosenPlugin) -> str:
    return f"observer.{plugin.name}" if plugin.point == "observer" else plugin.point


def _both(counts: Mapping[str, int], *names: str) -> dict[str, int]:
    return {name: counts.get(name, 0) for name in names}


def _host() -> dict[str, Any]:
    return {"machine": platform.machine(), "system": platform.system(), "cores": os.cpu_count() or 0}
