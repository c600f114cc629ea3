"""What all ranks agree on before a step runs: record, counts, modes (DESIGN section 5; the facts, sections 2 and 4)."""

from __future__ import annotations

import enum

import attrs


class ForwardMode(enum.IntEnum):
    """Forward modes; the numbers are those of the step record (the facts, section 4.1). 5 and 7 occur in the record only."""

    PREFILL = 1
    DECODE = 2
    MIXED = 3
    IDLE = 4
    VERIFY = 5
    PREBUILT = 7


class PaddingMode(enum.Enum):
    """``max_len``: equal blocks of the largest count. ``sum_len``: the buffer holds the sum of the counts."""

    MAX_LEN = "max_len"
    SUM_LEN = "sum_len"


class DispatchMode(enum.Enum):
    """Which protocol a dispatcher with two of them uses this step; the same on all ranks."""

    NORMAL = "normal"
    LOW_LATENCY = "low_latency"


class TrialWay(enum.IntEnum):
    """How a replica wants a step to run, to measure what overlap gains; the numbers go into the step record."""

    NONE = 0
    """As the decision falls."""
    SEQUENTIAL = 1
    OVERLAPPED = 2


@attrs.frozen(kw_only=True)
class StepRecord:
    """One replica's row of the exchange: the 11 int64 fields of the facts, section 4.1, plus step number and EPLB pass."""

    num_tokens: int = 0
    num_tokens_for_logprob: int = 0
    decode_graph_vote: int = 1
    is_prefill_in_batch: int = 0
    local_can_run_overlap: int = 1
    local_forward_mode: int = int(ForwardMode.IDLE)
    prefill_graph_vote: int = 1
    max_prefix_length: int = 0
    draft_graph_vote: int = 1
    is_health_check: int = 0
    attention_pairs: int = 0
    step: int = 0
    eplb_pass: int = 0
    has_work: int = 0
    """1 while the replica holds any unfinished request; when it is 0 everywhere, all ranks park."""
    stop: int = 0
    """1 once this replica was told to stop; when it is 1 everywhere, all ranks leave together after this exchange."""
    controls: int = 0
    """Controls for all ranks that this replica has received since the start; the smallest count is what all may execute."""
    overlap_rows: int = 0
    """Live rows of this replica's first micro-batch, should the step overlap; its peers need them to size gathered buffers."""
    overlap_gain_us: int = 0
    """Time that overlap is predicted to save this replica in this step, negative where it costs; 0 while nothing was measured."""
    overlap_trial: int = int(TrialWay.NONE)
    """A ``TrialWay``: this replica measures, and wants the step to run in this way if it may overlap at all."""


@attrs.frozen(kw_only=True)
class StepCounts:
    """Input of a padding policy: pure data, equal on all ranks.

    ``tokens`` are per-replica live counts already rounded up to ``attn_tp_size``.
    """

    tokens: tuple[int, ...]
    is_prefill_in_batch: bool
    hidden_size: int
    itemsize: int
    attn_tp_size: int
    symmetric_counts_required: bool = False
    """A back end of this step needs equal blocks (a capability of the dispatcher, never its name)."""
    variable_all_reduce_max_bytes: int = 0
    """Largest buffer for which one all-reduce beats a padded gather on this machine; 0 where there is no such kernel."""
    has_hybrid_state: bool = False


@attrs.frozen(kw_only=True)
class StepPlan:
    """The global decisions of one step: pure functions of the gathered records, equal on all ranks but ``is_idle``.

    ``padded_tokens[d]`` rows belong to replica d in gathered buffers; offsets are their prefix sums.
    """

    step: int
    eplb_pass: int
    live_tokens: tuple[int, ...]
    """Rows of each replica that carry a token."""
    padded_tokens: tuple[int, ...]
    """Rows of each replica after padding, each a multiple of attn_tp_size."""
    padding_mode: PaddingMode
    forward_mode: ForwardMode
    """Global mode: ``mixed`` when active replicas differ, ``idle`` when none is active."""
    dispatch_mode: DispatchMode
    overlap: bool
    overlap_reason: str
    bucket: int | None = None
    """Graph bucket replayed by every replica, None for eager."""
    graph_reason: str = ""
    park: bool = False
    overlap_rows: tuple[int, ...] = ()
    """Live rows of each replica's first micro-batch; empty when the step does not overlap."""

    @property
    def buffer_rows(self) -> int:
        """Rows of a gathered buffer."""
        return sum(self.padded_tokens)
