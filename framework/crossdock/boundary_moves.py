"""The moves of rows between ranks that a boundary is made of, for the counts of one step (the facts, section 3).

Every move takes its sizes from one list, the step's padded counts: gather sizes, scatter sizes, offsets and buffer length cannot differ.
Rows of a replica are split over its attention-TP ranks in equal slices, and ranks are ordered replica first, so a gather of slices over
all ranks lands every replica contiguous and in order.
"""

from __future__ import annotations

import itertools

import attrs
import torch

from crossdock.errors import RowsMisuse
from crossdock.types.comm import Comms
from crossdock.types.step import PaddingMode, StepPlan


@attrs.frozen(kw_only=True)
class SmallSums:
    """Sizes of gathered buffers up to which one all-reduce is the cheaper form; equal on all ranks."""

    sum_len_bytes: int = 0
    """Under ``sum_len``, where a machine has a kernel that beats a gather of unequal blocks."""
    attn_tp_bytes: int = 1 << 15
    """With attention TP, where the other form takes two collectives, each with its own latency (half of the CPU time of a boundary at 8
    rows of 512 floats on four ranks; equal at 64 rows)."""


SMALL_SUMS = SmallSums()
"""The sizes that were measured, for a machine without a kernel for unequal blocks."""


@attrs.frozen(kw_only=True, eq=False)
class RowMoves:
    """Moves of one step on one rank. [rows, H] tensors; inputs are not changed, results may be views of them."""

    comms: Comms
    counts: tuple[int, ...]
    """Padded rows of each replica, each a multiple of attn_tp_size."""
    attn_dp_rank: int
    all_reduce_max_bytes: int
    """Buffers of at most this size go as one all-reduce over all ranks instead of a scatter and a gather."""

    @staticmethod
    def of(step: StepPlan, comms: Comms, attn_dp_rank: int, sums: SmallSums) -> RowMoves:
        limits = [sums.sum_len_bytes] if step.padding_mode is PaddingMode.SUM_LEN else []
        if comms.attn_tp.size > 1:
            limits.append(sums.attn_tp_bytes)
        return RowMoves(
            comms=comms,
            counts=step.padded_tokens,
            attn_dp_rank=attn_dp_rank,
            all_reduce_max_bytes=max(limits, default=0),
        )

    @property
    def replica_rows(self) -> int:
        return self.counts[self.attn_dp_rank]

    @property
    def slice_rows(self) -> int:
        return self.replica_rows // self.comms.attn_tp.size

    @property
    def slice_start(self) -> int:
        """Of this rank's slice in its replica's rows."""
        return self.slice_rows * self.comms.attn_tp.rank

    @property
    def replica_start(self) -> int:
        """Of this replica's slot in full rows."""
        return sum(self.counts[: self.attn_dp_rank])

    def slice_counts(self) -> list[int]:
        """Rows of every rank's slice, in rank order."""
        width = self.comms.attn_tp.size
        return list(itertools.chain.from_iterable([count // width] * width for count in self.counts))

    def check(self, what: str, found: int, expected: int) -> None:
        """Rows that disagree with the step's counts would be gathered into other replicas' slots.

        Raises:
            RowsMisuse: with both numbers.
        """
        if found != expected:
            raise RowsMisuse(
                f"{what}: the step's counts {list(self.counts)} say {expected} rows, the tensor has {found}"
            )

    def cut_slice(self, x: torch.Tensor) -> torch.Tensor:
        """Replica rows -> own slice."""
        return x[self.slice_start : self.slice_start + self.slice_rows]

    def cut_replica(self, x: torch.Tensor) -> torch.Tensor:
        """Full rows -> own slot."""
        return x[self.replica_start : self.replica_start + self.replica_rows]

    def return_slice(self, x: torch.Tensor) -> torch.Tensor:
        """Partial full rows -> own slice of the sum over all ranks."""
        return self.comms.world.reduce_scatterv(x, self.slice_counts())

    def return_replica(self, x: torch.Tensor) -> torch.Tensor:
        """Partial full rows -> own slot of the sum over all ranks."""
        if self._fits_all_reduce(x.shape[0], x):
            return self.cut_replica(self.comms.world.all_reduce(x))
        return self.comms.attn_tp.all_gather(self.return_slice(x))

    def gather_slices(self, x: torch.Tensor) -> torch.Tensor:
        """Own slice -> full rows."""
        return self.comms.world.all_gatherv(x, self.slice_counts())

    def gather_copies(self, x: torch.Tensor) -> torch.Tensor:
        """Replica rows, equal on its ranks -> full rows."""
        if self._fits_all_reduce(sum(self.counts), x):
            return self.comms.world.all_reduce(self._in_buffer(x, writes=self.comms.attn_tp.rank == 0))
        return self.gather_slices(self.cut_slice(x))

    def gather_partials(self, x: torch.Tensor) -> torch.Tensor:
        """Partial replica rows -> full rows; completes the sum over attn_tp on the way."""
        if self._fits_all_reduce(sum(self.counts), x):
            return self.comms.world.all_reduce(self._in_buffer(x, writes=True))
        return self.gather_slices(self.comms.attn_tp.reduce_scatter(x))

    def _fits_all_reduce(self, rows: int, x: torch.Tensor) -> bool:
        row_bytes = x[:1].numel() * x.element_size() if x.shape[0] else x.new_empty((1, *x.shape[1:])).nbytes
        return 0 < rows * row_bytes <= self.all_reduce_max_bytes

    def _in_buffer(self, x: torch.Tensor, *, writes: bool) -> torch.Tensor:
        buffer = x.new_zeros((sum(self.counts), *x.shape[1:]))
        if writes:
            self.cut_replica(buffer).copy_(x)
        return buffer
