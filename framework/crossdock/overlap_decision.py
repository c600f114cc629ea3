"""Whether a step runs as two micro-batches: a pure function of the gathered records, so that all ranks do or none does."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from crossdock.types.step import DispatchMode, ForwardMode, StepRecord, TrialWay
from crossdock.types.strategy import OverlapLimits

PASSIVE_MODES = (ForwardMode.IDLE, ForwardMode.PREBUILT)
"""Modes of a replica that brings no rows."""


@attrs.frozen(kw_only=True)
class OverlapRules:
    """Everything but the records that decides; equal on all ranks."""

    limits: OverlapLimits = attrs.field(factory=OverlapLimits)
    has_communication: bool = True
    """The dispatcher sends rows between begin and end, so there is something to hide."""
    captured_rows: tuple[int, ...] = ()
    """Graph sizes that were captured in two micro-batches."""


def active_modes(records: Sequence[StepRecord]) -> frozenset[ForwardMode]:
    """Modes of the replicas that bring rows."""
    return frozenset(ForwardMode(record.local_forward_mode) for record in records) - frozenset(PASSIVE_MODES)


def decide_overlap(
    records: Sequence[StepRecord], dispatch_mode: DispatchMode, rules: OverlapRules | None, bucket: int | None = None
) -> tuple[bool, str]:
    """(True, "") for two micro-batches on every replica, or False and the reason code (the facts, section 7.2).

    Args:
        records: one a replica.
        dispatch_mode: protocol of this step.
        rules: None for a strategy with one micro-batch.
        bucket: the graph that the step replays; None for an eager one.
    """
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
    is_worth_it, reason = _worth_it(records, prefills, rules) if limits.is_gated else (True, "")
    if is_worth_it and bucket is not None and bucket not in rules.captured_rows:
        return False, "not_captured"
    return is_worth_it, reason


def _worth_it(records: Sequence[StepRecord], prefills: bool, rules: OverlapRules) -> tuple[bool, str]:
    if not rules.has_communication:
        return False, "nothing_to_hide"
    smallest = rules.limits.min_prefill_rows if prefills else rules.limits.min_decode_rows
    largest = max(record.num_tokens for record in records)
    if largest < smallest:
        return False, "too_small"
    # The others wait for the largest replicas.
    asked = [record for record in records if record.num_tokens == largest]
    match max(record.overlap_trial for record in asked):
        case TrialWay.OVERLAPPED:
            return True, ""
        case TrialWay.SEQUENTIAL:
            return False, "probe"
        case _:
            return (False, "no_gain") if sum(record.overlap_gain_us for record in asked) < 0 else (True, "")
