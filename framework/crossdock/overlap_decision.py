"""Whether a step runs as two micro-batches: a pure function of the gathered records, so that all ranks do or none does."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from crossdock.types.step import DispatchMode, ForwardMode, StepRecord
from crossdock.types.strategy import OverlapLimits

PASSIVE_MODES = (ForwardMode.IDLE, ForwardMode.PREBUILT)
"""Modes of a replica that brings no rows."""
PROBE_STEPS = 64
"""Of so many steps one runs sequentially and one overlapped whatever is predicted, so that both times stay measured."""


@attrs.frozen(kw_only=True)
class OverlapRules:
    """Everything but the records that decides; equal on all ranks."""

    limits: OverlapLimits = attrs.field(factory=OverlapLimits)
    has_communication: bool = True
    """The dispatcher sends rows between begin and end, so there is something to hide."""


def active_modes(records: Sequence[StepRecord]) -> frozenset[ForwardMode]:
    """Modes of the replicas that bring rows."""
    return frozenset(ForwardMode(record.local_forward_mode) for record in records) - frozenset(PASSIVE_MODES)


def decide_overlap(
    records: Sequence[StepRecord], dispatch_mode: DispatchMode, rules: OverlapRules | None
) -> tuple[bool, str]:
    """(True, "") for two micro-batches on every replica, or False and the reason code (the facts, section 7.2)."""
    if rules is None:
        return False, "off"
    modes, limits = active_modes(records), rules.limits
    if not modes:
        return False, "all_idle"
    if len(modes) > 1 and not limits.mixes_modes:
        return False, "modes_differ"
    prefills = modes != frozenset({ForwardMode.DECODE})
    if prefills and dispatch_mode is DispatchMode.LOW_LATENCY:
        return False, "low_latency_prefill"
    if not all(record.local_can_run_overlap for record in records):
        return False, "vote"
    return _worth_it(records, prefills, rules) if limits.is_gated else (True, "")


def _worth_it(records: Sequence[StepRecord], prefills: bool, rules: OverlapRules) -> tuple[bool, str]:
    if not rules.has_communication:
        return False, "nothing_to_hide"
    smallest = rules.limits.min_prefill_rows if prefills else rules.limits.min_decode_rows
    if max(record.num_tokens for record in records) < smallest:
        return False, "too_small"
    turn = records[0].step % PROBE_STEPS
    if turn == 0:
        return False, "probe"
    if sum(record.overlap_gain_us for record in records) < 0 and turn != PROBE_STEPS // 2:
        return False, "no_gain"
    return True, ""
