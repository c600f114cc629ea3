"""The dispatcher contract, hook API 1 (DESIGN section 7)."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Any, Protocol

import attrs

from crossdock.types.layout import Layout, Owed
from crossdock.types.step import DispatchMode

if TYPE_CHECKING:
    import torch

    from crossdock.rows import Rows
    from crossdock.types.comm import Comms
    from crossdock.types.parallel import ParallelSizes, RankPlace


class ReceiveLayout(enum.Enum):
    """How received rows lie.

    ``token_rows``: one row a token and rank, unsorted, with local ids and weights [R, K] (-1 = not here).
    ``flat``: [R, H] sorted by local expert, host counts per expert, each segment padded to ``alignment``.
    ``expert_major``: [local experts, capacity, H], valid counts on the device.
    ``replicated``: all rows on every rank, partial sums over the rank's experts.
    """

    TOKEN_ROWS = "token_rows"
    FLAT = "flat"
    EXPERT_MAJOR = "expert_major"
    REPLICATED = "replicated"


class ScaleForm(enum.Enum):
    """Form of the 128-element block scales of a quantised payload."""

    FP32_ROW = "fp32_row"
    FP32_COL_TMA = "fp32_col_tma"
    UE8M0_PACKED = "ue8m0_packed"


class WireDtype(enum.Enum):
    """Form of rows between ranks."""

    NATIVE = "native"
    """The model's dtype, fp32 or bf16."""
    FP8_BLOCK = "fp8_block"
    """float8_e4m3fn with one scale per 128 elements."""


@attrs.frozen(kw_only=True)
class DispatcherCapabilities:
    """What a dispatcher can do with the spec it was asked for; checked before weights are loaded."""

    phases: frozenset[str] = frozenset({"prefill", "decode"})
    devices: frozenset[str] = frozenset({"cpu"})
    layouts: frozenset[ReceiveLayout]
    input_rows: Layout
    output_rows: Layout
    output_owed: Owed
    needs_full_ep: bool
    """The expert group must be all ranks (reason code ``a2a_needs_full_ep``)."""
    rank_invariant_picks_needed: bool
    """Ranks compute partial sums of the same rows, so all must pick the same replica."""
    symmetric_counts_required: bool = False
    graph_capture: bool = False
    capacity_rows_per_rank: int | None = None
    """Most rows one rank may send in a step; None when there is no limit."""
    wire_dtypes: frozenset[WireDtype] = frozenset({WireDtype.NATIVE})
    modes: frozenset[DispatchMode] = frozenset({DispatchMode.NORMAL})
    """Protocols; with both, low latency is taken in steps in which no replica prefills."""
    split_is_useful: bool = False
    """True when work between begin and end hides communication."""
    survives_dead_rank: bool = False
    max_in_flight: int = 2
    communication_sms: int = 0
    communication_sms_settable: bool = False


@attrs.frozen(kw_only=True, eq=False)
class DispatcherSpec:
    """What a dispatcher is built for."""

    sizes: ParallelSizes
    place: RankPlace
    comms: Comms
    hidden_size: int
    top_k: int
    num_physical_experts: int
    dtype: torch.dtype
    device: torch.device
    max_rows_per_rank: int
    """Most rows this rank can bring to a step: from batch, chunk, graph and overlap limits."""
    max_decode_rows_per_rank: int = 0
    """The same for steps in which no replica prefills; 0 when unknown."""
    max_in_flight: int = 1
    accepted_layouts: tuple[ReceiveLayout, ...] = ()
    """Layouts that the experts plugin takes, best first."""
    expert_alignment: int = 1
    wire_dtype: WireDtype = WireDtype.NATIVE

    @property
    def num_local_experts(self) -> int:
        """Physical experts of this rank: slots ``moe_ep_rank * n`` to ``moe_ep_rank * n + n - 1``."""
        return self.num_physical_experts // self.sizes.moe_ep_size


@attrs.frozen(kw_only=True, eq=False)
class DispatchStep:
    """Static integers and device tensors of a step; nothing in a captured region reads anything else."""

    mode: DispatchMode = DispatchMode.NORMAL
    bucket: int | None = None
    """Rows that every rank brings in a captured step, padding included, in the layout that the dispatcher takes; None in an eager one."""
    capacity: int | None = None
    epoch: int = 0
    micro_batches: int = 1
    """Micro-batches of this step; with one, nothing that is worth an SM runs beside a transfer."""
    padded_rows: torch.Tensor | None = None
    """[rows, 1] bool on the device, in the layout that the dispatcher takes: rows that carry no token. Given in captured steps, whose
    counts change between replays; None where the host's counts say it."""
    active_ranks: torch.Tensor | None = None
    """int32 [moe_ep_size], 1 alive; None when every rank must be alive."""
    deadline_us: int | None = None
    source_counts: tuple[int, ...] | None = None
    """Rows that each rank of the world brings (padding included), when the host knows them; else None."""


@attrs.frozen(kw_only=True, eq=False)
class Pending:
    """Between a begin and its end. ``payload`` belongs to the dispatcher, nobody else looks inside."""

    slot: int
    payload: Any


@attrs.frozen(kw_only=True, eq=False)
class Received:
    """Rows that arrived at this rank, ready for its experts.

    R = received rows, S = local experts, H = hidden size, K = top-k.
    """

    layout: ReceiveLayout
    rows: torch.Tensor
    """[R, H], or [S, capacity, H] for ``expert_major``; model dtype or float8_e4m3fn."""
    scales: torch.Tensor | None = None
    scale_form: ScaleForm | None = None
    counts: list[int] | torch.Tensor | None = None
    """Rows per local expert [S]: host list (``flat``) or int32 on the device (``expert_major``)."""
    local_topk_ids: torch.Tensor | None = None
    """[R, K] int64 local expert ids, -1 = not on this rank."""
    row_weights: torch.Tensor | None = None
    """[R, K] (or [R] for ``flat``) float32; when given the experts step applies them, else combine does."""
    aligned_rows: int | None = None
    """Rows of all local experts, each rounded up to the experts' alignment, where the host knows it (``token_rows``)."""
    expected_rows: int | None = None
    """Mean rows of a local expert (``expert_major``): a hint for the choice of tiles, never a limit."""
    slot: int = 0
    way_back: Any = None
    """What combine needs; belongs to the dispatcher."""
    fault: torch.Tensor | None = None


class Dispatcher(Protocol):
    """Sends tokens to experts and brings the weighted sum back.

    Call order for one slot: dispatch_begin, dispatch_end, combine_begin, combine_end; slots < max_in_flight are independent.
    Zero rows on a rank is normal: the same calls in the same order. Combine's result is always the weighted sum over the
    token's experts of this layout (partial where ``output_owed`` says so).
    """

    @property
    def capabilities(self) -> DispatcherCapabilities: ...

    def dispatch_begin(
        self,
        hidden_states: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        step: DispatchStep,
        slot: int,
    ) -> Pending:
        """[n, H], [n, K] int64 physical (-1 none), [n, K] float32 with the routed scaling factor."""
        ...

    def dispatch_end(self, pending: Pending) -> Received: ...

    def combine_begin(self, expert_out: torch.Tensor, received: Received) -> Pending:
        """``expert_out``: same leading dims as ``received.rows``, bf16 or fp32."""
        ...

    def combine_end(self, pending: Pending) -> Rows:
        """[n, H] in the layout and with the owed sums that the capabilities declare."""
        ...
