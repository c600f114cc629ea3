"""What the ``triton`` backend works out once a batch: decode rows, and blocks of prefill rows."""

from __future__ import annotations

import attrs
import torch
from crossdock.errors import MisuseError
from crossdock.host_values import on_device
from crossdock.types.batch import ForwardBatch

from crossdock_attention.attention.triton.kernels.paged_decode import DecodeHeads, DecodeTile, choose_splits
from crossdock_attention.attention.triton.kernels.prefill import GQA_PREFILL, MLA_PREFILL, PrefillTile, query_blocks

ALIGNED_INTS = 4
"""int32 in the 16 bytes that Triton tells aligned pointers by."""


@attrs.frozen(kw_only=True, eq=False)
class DecodeBuffers:
    """Static storage of a captured bucket: every row is taken as one sequence, unused rows have length 0."""

    page_table: torch.Tensor
    """[bucket, columns] int32."""
    seq_lens: torch.Tensor
    """[bucket] int32."""
    tile: DecodeTile
    splits: int
    arrivals: torch.Tensor
    """[bucket * groups of heads] int32 zeros, see ``paged_decode``."""
    shares_contexts: bool
    """Rows see other rows of the step."""


@attrs.frozen(kw_only=True, eq=False)
class DecodeRows:
    """Sequences with one query row each."""

    rows: torch.Tensor | None
    """[b] int64 query rows; None when they are all rows of the batch in order."""
    page_table: torch.Tensor
    seq_lens: torch.Tensor
    tile: DecodeTile
    splits: int
    arrivals: torch.Tensor
    shares_contexts: bool = False
    """A row's context may hold other rows of this step, so all of them are stored first."""


@attrs.frozen(kw_only=True, eq=False)
class PrefillRows:
    """Sequences with several query rows."""

    blocks: torch.Tensor
    """[M, 4] int32, see ``query_blocks``."""
    tile: PrefillTile
    is_fresh: bool
    """No sequence has a prefix: this step's keys and values are all there is to see."""
    contexts: tuple[tuple[int, int, int, int], ...]
    """(sequence, first row, rows, prefix) of each."""
    kv_starts: torch.Tensor
    """[B] int32: where each sequence's context starts when contexts are packed back to back; 0 for others."""
    first_rows: torch.Tensor
    """[B] int32: each sequence's first row in the batch; 0 for others."""


@attrs.frozen(kw_only=True, eq=False)
class TritonPlan:
    decode: DecodeRows | None
    prefill: PrefillRows | None
    live_rows: int

    @property
    def single_rows(self) -> DecodeRows | None:
        """The decode rows where they are all rows of the batch."""
        return self.decode if self.prefill is None and self.decode is not None and self.decode.rows is None else None


def make_plan(batch: ForwardBatch, page_tokens: int, heads: DecodeHeads) -> TritonPlan:
    """The plan of an eager batch.

    Raises:
        MisuseError: a sequence is longer than its row of the page table.
    """
    capacity = batch.page_table.shape[1] * page_tokens
    if max(batch.seq_lens, default=0) > capacity:
        raise MisuseError(
            f"a sequence of {max(batch.seq_lens)} tokens does not fit its page table of {capacity} tokens"
        )
    device = batch.input_ids.device
    singles: list[tuple[int, int]] = []
    spans: list[tuple[int, int, int, int]] = []
    row = 0
    for sequence, (rows, length) in enumerate(zip(batch.query_lens, batch.seq_lens, strict=True)):
        if rows == 1:
            singles.append((sequence, row))
        elif rows > 1:
            spans.append((sequence, row, rows, length - rows))
        row += rows
    return TritonPlan(
        decode=_decode_rows(singles, batch, heads, device) if singles else None,
        prefill=_prefill_rows(spans, batch.num_sequences, device, heads) if spans else None,
        live_rows=row,
    )


def fill_buffers(batch: ForwardBatch, buffers: DecodeBuffers) -> TritonPlan:
    """The plan of a captured step: copies the batch into the bucket's static storage.

    Raises:
        MisuseError: a sequence has several rows, or the batch does not fit the bucket.
    """
    bucket, columns = buffers.page_table.shape
    size, width = batch.page_table.shape
    if size > bucket or width > columns or any(rows != 1 for rows in batch.query_lens):
        raise MisuseError(
            f"a bucket of {bucket} rows and {columns} pages got {size} sequences with {width} pages and rows {batch.query_lens[:8]}"
        )
    buffers.page_table[:size, :width].copy_(batch.page_table)
    buffers.seq_lens.zero_()
    buffers.seq_lens[:size].copy_(torch.tensor(batch.seq_lens, dtype=torch.int32))
    decode = DecodeRows(
        rows=None,
        page_table=buffers.page_table,
        seq_lens=buffers.seq_lens,
        tile=buffers.tile,
        splits=buffers.splits,
        arrivals=buffers.arrivals,
        shares_contexts=buffers.shares_contexts,
    )
    return TritonPlan(decode=decode, prefill=None, live_rows=bucket)


def _decode_rows(
    singles: list[tuple[int, int]], batch: ForwardBatch, heads: DecodeHeads, device: torch.device
) -> DecodeRows:
    sequences, rows = [sequence for sequence, _ in singles], [row for _, row in singles]
    lengths = [batch.seq_lens[sequence] for sequence in sequences]
    everything = len(rows) == batch.num_rows and rows == list(range(len(rows)))
    whole = len(sequences) == batch.page_table.shape[0]
    tile = heads.tile(len(rows))
    return DecodeRows(
        rows=None if everything else on_device(rows, torch.int64, device),
        page_table=batch.page_table if whole else batch.page_table[on_device(sequences, torch.int64, device)],
        seq_lens=on_device(lengths, torch.int32, device),
        tile=tile,
        splits=choose_splits(len(rows), heads.groups(tile), max(lengths), tile),
        arrivals=torch.zeros(len(rows) * heads.groups(tile), dtype=torch.int32, device=device),
    )


def _prefill_rows(
    spans: list[tuple[int, int, int, int]], num_sequences: int, device: torch.device, heads: DecodeHeads
) -> PrefillRows:
    # Kernels are compiled for where pointers are aligned; so they are, whatever the number of sequences.
    places = -(-num_sequences // ALIGNED_INTS) * ALIGNED_INTS
    starts, firsts, total = [0] * places, [0] * places, 0
    for sequence, first, rows, prefix in spans:
        starts[sequence], firsts[sequence] = total, first
        total += rows + prefix
    tile = MLA_PREFILL if heads.is_latent else GQA_PREFILL
    placed = on_device([starts, firsts], torch.int32, device)
    return PrefillRows(
        blocks=on_device(query_blocks(spans, tile.rows), torch.int32, device),
        tile=tile,
        is_fresh=all(prefix == 0 for *_, prefix in spans),
        contexts=tuple(spans),
        kv_starts=placed[0, :num_sequences],
        first_rows=placed[1, :num_sequences],
    )
