"""One rank's batch of a step. Every field carries the rule by which a batch is split in two (DESIGN section 5)."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Any

import attrs

from crossdock.types.step import ForwardMode, StepPlan

if TYPE_CHECKING:
    import torch


class SplitRule(enum.Enum):
    """How a field of a batch reaches the two children of an overlapped step."""

    TOKEN = "token"
    SEQUENCE = "sequence"
    COPY = "copy"
    RECOMPUTE = "recompute"
    REFUSE = "refuse"


SPLIT_RULE = "split_rule"


def split_field(rule: SplitRule, **kwargs: Any) -> Any:
    """An attrs field with its split rule; a batch field without one fails a test."""
    return attrs.field(metadata={SPLIT_RULE: rule}, **kwargs)


@attrs.frozen(kw_only=True, eq=False)
class ForwardBatch:
    """Rows of one replica, padded to ``step.padded_tokens[attn_dp_rank]`` = N; B sequences, live rows first.

    Live rows of sequence b are contiguous, in position order; sequences follow one another in the order of ``query_lens``.
    All attention-TP ranks of a replica hold the same batch.
    """

    input_ids: torch.Tensor = split_field(SplitRule.TOKEN)
    """[N] int64; padded rows 0."""
    positions: torch.Tensor = split_field(SplitRule.TOKEN)
    """[N] int64; padded rows 0."""
    kv_slots: torch.Tensor = split_field(SplitRule.TOKEN)
    """[N] int64 flat slot (page * page_tokens + offset) each row writes; padded rows point into scratch page 0."""
    page_table: torch.Tensor = split_field(SplitRule.SEQUENCE)
    """[B, max_pages] int32 page ids of each sequence, unused entries 0."""
    seq_lens: tuple[int, ...] = split_field(SplitRule.SEQUENCE)
    """Tokens of each sequence in the cache once this step's rows are written."""
    query_lens: tuple[int, ...] = split_field(SplitRule.SEQUENCE)
    """Rows of each sequence in this step; 1 for a decode row."""
    logit_rows: torch.Tensor = split_field(SplitRule.RECOMPUTE)
    """[R] int64 live rows whose logits are wanted, ascending."""
    forward_mode: ForwardMode = split_field(SplitRule.COPY)
    """Local mode of this replica."""
    step: StepPlan = split_field(SplitRule.RECOMPUTE)
    attn_dp_rank: int = split_field(SplitRule.COPY)
    num_live_tokens: int = split_field(SplitRule.RECOMPUTE)
    """Rows that carry a token; the rest is padding and gets expert id -1."""
    host_logit_rows: tuple[int, ...] | None = split_field(SplitRule.RECOMPUTE, default=None)
    """``logit_rows`` on the host, so that cutting a batch waits for no device; None where they are not known there."""

    @property
    def num_rows(self) -> int:
        """N, padding included."""
        return int(self.input_ids.shape[0])

    @property
    def num_sequences(self) -> int:
        return len(self.query_lens)
