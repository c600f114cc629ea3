"""Splits a batch in two by the rule that each of its fields declares, and puts results together again (the facts, section 7.3)."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch

from crossdock.errors import BatchSplitError
from crossdock.split_point import SplitPoint
from crossdock.types.batch import SPLIT_RULE, ForwardBatch, SplitRule
from crossdock.types.step import StepPlan


@attrs.frozen(kw_only=True, eq=False)
class BatchPart:
    """What one micro-batch takes of its parent."""

    plan: StepPlan
    """Of the micro-batch."""
    rows: slice
    """Live rows."""
    sequences: slice
    padded_rows: int

    @property
    def num_live_rows(self) -> int:
        return int(self.rows.stop - self.rows.start)


def split_batch(
    batch: ForwardBatch, point: SplitPoint, plans: tuple[StepPlan, StepPlan]
) -> tuple[ForwardBatch, ForwardBatch]:
    """The two micro-batches of a batch, each padded to its own plan's count.

    Args:
        batch: not changed; the micro-batches hold copies of token fields and views of the others.
        point: where to cut.
        plans: of the micro-batches, from ``child_plans``.

    Raises:
        BatchSplitError: a field has no rule, refuses, or the plans were made for another cut.
    """
    live, rank = batch.num_live_tokens, batch.attn_dp_rank
    if (plans[0].live_tokens[rank], plans[1].live_tokens[rank]) != (point.rows, live - point.rows):
        raise BatchSplitError(
            f"replica {rank} is cut after {point.rows} of {live} rows, but the plans were made for "
            f"{plans[0].live_tokens[rank]} and {plans[1].live_tokens[rank]}"
        )
    second_from = point.sequences - point.cuts_sequence
    parts = (
        _part(plans[0], rank, slice(0, point.rows), slice(0, point.sequences)),
        _part(plans[1], rank, slice(point.rows, live), slice(second_from, batch.num_sequences)),
    )
    first, second = (_child(batch, part) for part in parts)
    if not point.cuts_sequence:
        return first, second
    rest = sum(batch.query_lens[: point.sequences]) - point.rows
    return (
        attrs.evolve(
            first,
            query_lens=(*first.query_lens[:-1], first.query_lens[-1] - rest),
            seq_lens=(*first.seq_lens[:-1], first.seq_lens[-1] - rest),
        ),
        attrs.evolve(second, query_lens=(rest, *second.query_lens[1:])),
    )


def merge_rows(parts: Sequence[torch.Tensor], live_rows: Sequence[int]) -> torch.Tensor:
    """Rows of the micro-batches in the parent's order, padding dropped. ``live_rows``: of each part; for logits all of its rows."""
    return torch.cat([part[:rows] for part, rows in zip(parts, live_rows, strict=True)])


def merge_logits(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Logits of the micro-batches in the order of the parent's ``logit_rows``."""
    return merge_rows(parts, [part.shape[0] for part in parts])


def _part(plan: StepPlan, rank: int, rows: slice, sequences: slice) -> BatchPart:
    return BatchPart(plan=plan, rows=rows, sequences=sequences, padded_rows=plan.padded_tokens[rank])


def _child(batch: ForwardBatch, part: BatchPart) -> ForwardBatch:
    values = {field.name: field_part(batch, field.name, field.metadata, part) for field in attrs.fields(type(batch))}
    return type(batch)(**values)


def field_part(batch: ForwardBatch, name: str, metadata: Mapping[Any, Any], part: BatchPart) -> Any:
    """One field of a micro-batch, by its rule.

    Raises:
        BatchSplitError: the field has no rule, refuses to be split, or is recomputed by nobody.
    """
    value = getattr(batch, name)
    match metadata.get(SPLIT_RULE):
        case SplitRule.TOKEN:
            return _token_rows(value, part)
        case SplitRule.SEQUENCE:
            return value[part.sequences]
        case SplitRule.COPY:
            return value
        case SplitRule.RECOMPUTE if name in RECOMPUTED:
            return RECOMPUTED[name](batch, part)
        case SplitRule.REFUSE if value is None:
            return None
        case SplitRule.REFUSE:
            raise BatchSplitError(f"a batch with {name} cannot be split in two; run this step without overlap")
        case rule:
            raise BatchSplitError(f"batch field {name!r} has the split rule {rule}, which nobody implements")


def _token_rows(value: torch.Tensor, part: BatchPart) -> torch.Tensor:
    """[padded rows, ...]: own live rows, then zeros (token 0 at position 0, writing to the scratch page)."""
    rows = torch.zeros((part.padded_rows, *value.shape[1:]), dtype=value.dtype, device=value.device)
    rows[: part.num_live_rows] = value[part.rows]
    return rows


def _logit_rows(batch: ForwardBatch, part: BatchPart) -> torch.Tensor:
    wanted, own = batch.logit_rows, _wanted(batch, part)
    # Without the host's copy the device is waited for.
    inside = (wanted >= part.rows.start) & (wanted < part.rows.stop) if own is None else own
    rows: torch.Tensor = wanted[inside] - part.rows.start
    return rows


def _host_logit_rows(batch: ForwardBatch, part: BatchPart) -> tuple[int, ...] | None:
    own = _wanted(batch, part)
    if own is None or batch.host_logit_rows is None:
        return None
    return tuple(row - part.rows.start for row in batch.host_logit_rows[own])


def _wanted(batch: ForwardBatch, part: BatchPart) -> slice | None:
    """Which of the ascending logit rows are the part's; None where only the device knows."""
    if batch.host_logit_rows is None:
        return None
    return slice(*(bisect_left(batch.host_logit_rows, end) for end in (part.rows.start, part.rows.stop)))


def _step(batch: ForwardBatch, part: BatchPart) -> StepPlan:
    return part.plan


def _num_live_tokens(batch: ForwardBatch, part: BatchPart) -> int:
    return part.num_live_rows


RECOMPUTED: Mapping[str, Callable[[ForwardBatch, BatchPart], Any]] = {
    "logit_rows": _logit_rows,
    "host_logit_rows": _host_logit_rows,
    "step": _step,
    "num_live_tokens": _num_live_tokens,
}
"""Fields that follow from the cut."""
