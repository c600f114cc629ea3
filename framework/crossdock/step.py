"""The global decisions of a step: pure functions of the gathered records, so that every rank decides the same (DESIGN section 5)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import attrs

from crossdock.errors import AgreementError
from crossdock.groups import align_rows
from crossdock.overlap_decision import OverlapRules, active_modes, decide_overlap
from crossdock.padding import choose_padding, padded_tokens
from crossdock.types.padding import PaddingPolicy
from crossdock.types.parallel import ParallelSizes
from crossdock.types.step import DispatchMode, ForwardMode, StepCounts, StepPlan, StepRecord


@attrs.frozen(kw_only=True, eq=False)
class StepRules:
    """Everything but the records that decides a step; equal on all ranks, from config and capabilities."""

    sizes: ParallelSizes
    padding: PaddingPolicy
    hidden_size: int
    itemsize: int
    """Bytes of an element of the hidden states."""
    dispatch_modes: frozenset[DispatchMode] = frozenset({DispatchMode.NORMAL})
    """Protocols of the dispatcher; with both, normal is taken when any replica prefills."""
    symmetric_counts_required: bool = False
    captured_rows: tuple[int, ...] = ()
    """Captured sizes of decode steps in rows of a replica, ascending; empty when steps are not captured."""
    captured_prefill_rows: tuple[int, ...] = ()
    """The same for steps with prompt tokens."""
    captured_pairs: int = 0
    """Query-key pairs of prompts up to which such a step is captured."""
    overlap: OverlapRules | None = None
    """None where the strategy runs one micro-batch."""
    variable_all_reduce_max_bytes: int = 0
    has_hybrid_state: bool = False


def check_records(records: Sequence[StepRecord]) -> None:
    """All replicas must be at the same step and have made the same number of forward passes.

    Raises:
        AgreementError: names the replicas that differ from the majority, and the field.
    """
    for field in ("step", "eplb_pass"):
        values = [int(getattr(record, field)) for record in records]
        common, _ = Counter(values).most_common(1)[0]
        odd = [replica for replica, value in enumerate(values) if value != common]
        if odd:
            found = ", ".join(f"replica {replica} at {values[replica]}" for replica in odd)
            raise AgreementError(
                f"replicas disagree about {field}: {found}, the others at {common}; a rank left the common step loop",
                odd_ranks=odd,
                field=field,
            )


def decide_step(records: Sequence[StepRecord], rules: StepRules) -> StepPlan:
    """The plan that all ranks follow.

    Args:
        records: one a replica, in replica order.
        rules: equal on all ranks.

    Raises:
        AgreementError: steps or EPLB passes differ.
    """
    check_records(records)
    live = tuple(record.num_tokens for record in records)
    aligned = tuple(align_rows(count, rules.sizes.attn_tp_size) for count in live)
    prefills = any(record.is_prefill_in_batch for record in records)
    bucket, graph_reason = _bucket(records, aligned, prefills, rules)
    if bucket is None:
        mode = choose_padding(rules.padding, _counts(aligned, prefills, rules))
        padded = padded_tokens(mode, aligned)
    else:
        mode = rules.padding.captured_mode()
        padded = (bucket,) * len(live)
    # A graph holds the protocol of decode steps, whatever rows it takes, and prompts in one micro-batch.
    forward_mode, dispatch_mode = global_mode(records), _dispatch_mode(prefills and bucket is None, rules)
    if prefills and bucket is not None and rules.overlap is not None:
        overlap, overlap_reason = False, "not_captured"
    else:
        overlap, overlap_reason = decide_overlap(records, dispatch_mode, rules.overlap, bucket)
    return StepPlan(
        step=records[0].step,
        eplb_pass=records[0].eplb_pass,
        live_tokens=live,
        padded_tokens=padded,
        padding_mode=mode,
        forward_mode=forward_mode,
        dispatch_mode=dispatch_mode,
        overlap=overlap,
        overlap_reason=overlap_reason,
        bucket=bucket,
        graph_reason=graph_reason,
        park=not any(record.has_work or record.num_tokens for record in records),
        overlap_rows=tuple(record.overlap_rows for record in records) if overlap else (),
    )


def global_mode(records: Sequence[StepRecord]) -> ForwardMode:
    """The mode of all active replicas; ``mixed`` when they differ, ``idle`` when none is active."""
    modes = active_modes(records)
    if not modes:
        return ForwardMode.IDLE
    return next(iter(modes)) if len(modes) == 1 else ForwardMode.MIXED


def needs_idle_batch(plan: StepPlan, attn_dp_rank: int) -> bool:
    """The replica brings no rows to a step in which others do: it runs the step with zero live rows."""
    return plan.live_tokens[attn_dp_rank] == 0 and max(plan.live_tokens) > 0


def _counts(aligned: tuple[int, ...], prefills: bool, rules: StepRules) -> StepCounts:
    return StepCounts(
        tokens=aligned,
        is_prefill_in_batch=prefills,
        hidden_size=rules.hidden_size,
        itemsize=rules.itemsize,
        attn_tp_size=rules.sizes.attn_tp_size,
        symmetric_counts_required=rules.symmetric_counts_required,
        variable_all_reduce_max_bytes=rules.variable_all_reduce_max_bytes,
        has_hybrid_state=rules.has_hybrid_state,
    )


def _bucket(
    records: Sequence[StepRecord], aligned: tuple[int, ...], prefills: bool, rules: StepRules
) -> tuple[int | None, str]:
    """The captured size that every replica replays, or None and why the step runs eager."""
    if not rules.captured_rows:
        return None, "off"
    if prefills:
        return _prefill_bucket(records, max(aligned), rules)
    if not all(record.decode_graph_vote for record in records):
        return None, "vote"
    return _smallest(rules.captured_rows, max(aligned), "too_large")


def _prefill_bucket(records: Sequence[StepRecord], largest: int, rules: StepRules) -> tuple[int | None, str]:
    if not rules.captured_prefill_rows:
        return None, "prefill"
    if not all(record.prefill_graph_vote for record in records):
        return None, "prefill_vote"
    # As if all rows were of one prompt, behind the longest prefix.
    pairs = (record.num_tokens * record.max_prefix_length + record.num_tokens**2 // 2 for record in records)
    if max(pairs) > rules.captured_pairs:
        return None, "prefill_context"
    return _smallest(rules.captured_prefill_rows, largest, "prefill_too_large")


def _smallest(captured: Sequence[int], largest: int, reason: str) -> tuple[int | None, str]:
    """The smallest size that holds ``largest`` rows, or None and ``reason``."""
    fitting = [rows for rows in captured if rows >= largest]
    return (min(fitting), "") if fitting else (None, reason)


def _dispatch_mode(prefills: bool, rules: StepRules) -> DispatchMode:
    if len(rules.dispatch_modes) == 1:
        return next(iter(rules.dispatch_modes))
    return DispatchMode.NORMAL if prefills else DispatchMode.LOW_LATENCY
