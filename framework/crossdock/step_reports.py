"""What a finished step says to others: an event for observers, and the logits of prompt rows to those who asked for them."""

from __future__ import annotations

import time

import attrs

from crossdock.engine_seams import AgreedStep, InFlight, LogitSink
from crossdock.observe.timeline import Timeline
from crossdock.scheduled import Scheduled
from crossdock.types.observer import StepEvent
from crossdock.types.parallel import RankPlace


@attrs.frozen(kw_only=True, eq=False)
class OpenStep:
    """A step that was agreed on and whose tokens the host has not taken yet."""

    agreed: AgreedStep
    scheduled: Scheduled | None
    """None on a peer, and on a leader that was told to stop."""
    in_flight: InFlight | None
    """None where nobody had rows."""
    started_s: float


def step_event(step: OpenStep, place: RankPlace, timeline: Timeline | None) -> StepEvent:
    """The event of a step that has just finished on this rank."""
    plan, replica = step.agreed.plan, place.attn_dp_rank
    return StepEvent(
        rank=place.rank,
        attn_dp_rank=replica,
        step=plan.step,
        forward_mode=plan.forward_mode.name.lower(),
        padding_mode=plan.padding_mode.value,
        dispatch_mode=plan.dispatch_mode.value,
        graph=plan.bucket is not None,
        overlap=plan.overlap,
        local_tokens=plan.live_tokens[replica],
        all_tokens=plan.live_tokens,
        attention_pairs=tuple(record.attention_pairs for record in step.agreed.records),
        sync_wait_s=step.agreed.wait_s,
        duration_s=time.perf_counter() - step.started_s,
        is_health_check=not step.agreed.is_counted,
        spans=() if timeline is None else timeline.last_spans,
    )


def hand_over_prompt_logits(in_flight: InFlight, sink: LogitSink) -> None:
    """Gives ``sink`` the logits of the sequences that keep them."""
    scheduled = in_flight.scheduled
    if scheduled is None:
        return
    first = 0
    for sequence, rows in zip(scheduled.sequences, scheduled.work.sequences, strict=True):
        if sequence.keeps_prompt_logits and rows.num_logit_rows:
            logits = in_flight.logits[first : first + rows.num_logit_rows]
            sink(sequence.rid, rows.end - rows.num_logit_rows, logits)
        first += rows.num_logit_rows
