"""What one replica computes in one step, as plain data: the leader makes it, its attention-TP peers receive the same value."""

from __future__ import annotations

import attrs
import msgspec

from crossdock.types.step import ForwardMode, StepRecord

PENDING = -1
"""In place of a token id that a step in flight samples: the device has it, the host does not yet."""


class SequenceRows(msgspec.Struct, frozen=True, kw_only=True):
    """The rows of one sequence in one step. A ``Struct``, because it is made for each sequence in each step: in a tenth of the time."""

    tokens: tuple[int, ...]
    """Token ids to compute, in position order; a single ``PENDING`` for the id at ``source``."""
    start: int
    """Position of the first of them; so many tokens of the sequence are already in the cache."""
    pages: tuple[int, ...]
    """Pages of the sequence, enough for ``start + len(tokens)`` tokens."""
    num_logit_rows: int = 0
    """The last so many rows need logits."""
    is_decode: bool = False
    """One row whose logits choose the next token of an already generating sequence."""
    samples: bool = False
    """The last row chooses a token."""
    source: int = -1
    """Place of a ``PENDING`` token among the ids that the replica's step before this one sampled; -1 for known tokens."""

    @property
    def end(self) -> int:
        """Tokens in the cache once these rows are written."""
        return self.start + len(self.tokens)


@attrs.frozen(kw_only=True)
class StepWork:
    """All rows of one replica in one step; empty for an idle replica."""

    sequences: tuple[SequenceRows, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(len(rows.tokens) for rows in self.sequences)

    @property
    def num_logit_rows(self) -> int:
        return sum(rows.num_logit_rows for rows in self.sequences)

    @property
    def num_samples(self) -> int:
        """Sequences that get a new token."""
        return sum(rows.samples for rows in self.sequences)

    @property
    def attention_pairs(self) -> int:
        """Query-key pairs of causal attention: e·p + e·(e+1)/2 for e new tokens after p cached ones."""
        pairs = 0
        for rows in self.sequences:
            new = len(rows.tokens)
            pairs += new * rows.start + new * (new + 1) // 2
        return pairs

    @property
    def forward_mode(self) -> ForwardMode:
        """This replica's own mode."""
        if not self.sequences:
            return ForwardMode.IDLE
        decodes = sum(rows.is_decode for rows in self.sequences)
        if decodes == len(self.sequences):
            return ForwardMode.DECODE
        return ForwardMode.MIXED if decodes else ForwardMode.PREFILL

    def record(self, *, step: int, eplb_pass: int, has_work: bool, is_health_check: bool) -> StepRecord:
        """This replica's row of the exchange (the facts, section 4.1)."""
        mode = self.forward_mode
        return StepRecord(
            num_tokens=self.num_tokens,
            num_tokens_for_logprob=self.num_logit_rows,
            is_prefill_in_batch=int(mode in (ForwardMode.PREFILL, ForwardMode.MIXED)),
            local_forward_mode=int(mode),
            # A captured pass has logits of rows that are sampled from, for as long as no other step is launched.
            prefill_graph_vote=int(self.num_logit_rows == self.num_samples),
            max_prefix_length=max((rows.start for rows in self.sequences if not rows.is_decode), default=0),
            is_health_check=int(is_health_check),
            attention_pairs=self.attention_pairs,
            step=step,
            eplb_pass=eplb_pass,
            has_work=int(has_work),
        )


def encode_work(work: StepWork) -> bytes:
    """``work`` for the attention-TP peers."""
    return msgspec.msgpack.encode(work)


def decode_work(data: bytes) -> StepWork:
    """The value that ``encode_work`` was given."""
    return msgspec.msgpack.decode(data, type=StepWork)
