"""What the ``torch`` backend works out once a batch: groups of decode rows, spans of prefill rows, flat cache slots."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch
from crossdock.errors import MisuseError
from crossdock.types.batch import ForwardBatch


@attrs.frozen(kw_only=True, eq=False)
class DecodeGroup:
    """Sequences with one query row each, of similar length; b of them, padded to L tokens."""

    rows: torch.Tensor | None
    """[b] int64 query rows; None when they are rows 0 to b - 1 in order."""
    slots: torch.Tensor
    """[b * L] int64 flat cache slots. Past its end a sequence repeats its first slot: free or scratch slots may hold anything, NaN too."""
    mask: torch.Tensor | None
    """[b, 1, 1, L] in the model's dtype, 0 for tokens and -inf past the end; None when all lengths are L."""
    size: int
    length: int


@attrs.frozen(kw_only=True, eq=False)
class PrefillSpan:
    """One sequence with several query rows."""

    start: int
    stop: int
    """Half-open range of rows."""
    prefix: int
    """Tokens that were in the cache before this step."""
    slots: torch.Tensor | None
    """[prefix + rows] int64; None when there is no prefix, so that nothing is read back from the cache."""


@attrs.frozen(kw_only=True, eq=False)
class TorchPlan:
    decodes: tuple[DecodeGroup, ...]
    spans: tuple[PrefillSpan, ...]
    live_rows: int
    max_slot: int
    """Largest slot read or written; compared with the pool before the first gather."""

    @property
    def is_one_group(self) -> bool:
        """One decode group covers every live row in order, so that nothing needs to be picked or put back."""
        return not self.spans and len(self.decodes) == 1 and self.decodes[0].rows is None


def make_plan(batch: ForwardBatch, page_tokens: int, dtype: torch.dtype, padding_share: float) -> TorchPlan:
    """The plan of a batch.

    Raises:
        MisuseError: a sequence is longer than its row of the page table, or a page id is negative.
    """
    _check_lengths(batch, page_tokens)
    decodes: list[tuple[int, int]] = []
    spans: list[PrefillSpan] = []
    max_slot, row = _largest(batch.kv_slots), 0
    for sequence, (rows, length) in enumerate(zip(batch.query_lens, batch.seq_lens, strict=True)):
        if rows == 1:
            decodes.append((sequence, row))
        elif rows > 1:
            slots = None
            if length > rows:
                slots = _slots(batch.page_table[sequence : sequence + 1], length, page_tokens)[0]
                max_slot = max(max_slot, _largest(slots))
            spans.append(PrefillSpan(start=row, stop=row + rows, prefix=length - rows, slots=slots))
        row += rows
    groups: list[DecodeGroup] = []
    for members in _similar_lengths(decodes, batch.seq_lens, padding_share):
        groups.append(_decode_group(members, batch, page_tokens, dtype))
        max_slot = max(max_slot, _largest(groups[-1].slots))
    return TorchPlan(decodes=tuple(groups), spans=tuple(spans), live_rows=row, max_slot=max_slot)


def _check_lengths(batch: ForwardBatch, page_tokens: int) -> None:
    capacity = batch.page_table.shape[1] * page_tokens
    longest = max(batch.seq_lens, default=0)
    if longest > capacity:
        raise MisuseError(
            f"a sequence of {longest} tokens does not fit its page table of {batch.page_table.shape[1]} pages of {page_tokens} tokens"
        )
    if batch.page_table.numel() and int(batch.page_table.min()) < 0:
        raise MisuseError(f"page table holds page id {int(batch.page_table.min())}; ids start at 0")


def _largest(slots: torch.Tensor) -> int:
    return int(slots.max()) if slots.numel() else 0


def _slots(pages: torch.Tensor, length: int, page_tokens: int) -> torch.Tensor:
    """[b, max_pages] page ids -> [b, length] flat slots."""
    used = pages[:, : -(-length // page_tokens)].long() * page_tokens
    offsets = torch.arange(page_tokens, device=pages.device)
    return (used.unsqueeze(2) + offsets).flatten(1)[:, :length]


def _similar_lengths(
    decodes: Sequence[tuple[int, int]], seq_lens: Sequence[int], padding_share: float
) -> list[list[tuple[int, int]]]:
    """(sequence, row) pairs in groups in which padding stays below its share: one long sequence must not stretch all others."""
    lengths = [seq_lens[sequence] for sequence, _ in decodes]
    if not decodes:
        return []
    if max(lengths) * len(lengths) * (1 - padding_share) <= sum(lengths):
        return [list(decodes)]
    groups: list[list[tuple[int, int]]] = []
    tokens = 0
    for member in sorted(decodes, key=lambda pair: seq_lens[pair[0]]):
        length = seq_lens[member[0]]
        if groups and length * (len(groups[-1]) + 1) * (1 - padding_share) <= tokens + length:
            groups[-1].append(member)
            tokens += length
        else:
            groups.append([member])
            tokens = length
    return groups


def _decode_group(
    members: Sequence[tuple[int, int]], batch: ForwardBatch, page_tokens: int, dtype: torch.dtype
) -> DecodeGroup:
    device = batch.page_table.device
    sequences = [sequence for sequence, _ in members]
    rows = [row for _, row in members]
    lengths = [batch.seq_lens[sequence] for sequence in sequences]
    longest = max(lengths)
    in_order = rows == list(range(len(rows)))
    whole = sequences == list(range(batch.page_table.shape[0]))
    pages = batch.page_table if whole else batch.page_table[torch.tensor(sequences, device=device)]
    slots = _slots(pages, longest, page_tokens)
    mask = None
    if min(lengths) < longest:
        past_end = torch.arange(longest, device=device) >= torch.tensor(lengths, device=device).unsqueeze(1)
        slots = torch.where(past_end, slots[:, :1], slots)
        zeros = torch.zeros(past_end.shape, dtype=dtype, device=device)
        mask = zeros.masked_fill_(past_end, float("-inf"))[:, None, None, :]
    return DecodeGroup(
        rows=None if in_order else torch.tensor(rows, device=device),
        slots=slots.reshape(-1),
        mask=mask,
        size=len(rows),
        length=longest,
    )
