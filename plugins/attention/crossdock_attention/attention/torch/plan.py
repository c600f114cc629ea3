"""What the ``torch`` backend works out once a batch: groups of decode rows, spans of prefill rows, flat cache slots."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

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
class PagedDecodes:
    """All sequences with one query row, for the kernel that reads pages where they are; no groups, because nothing is padded."""

    rows: torch.Tensor | None
    """[b] int64 query rows; None when they are rows 0 to b - 1 in order."""
    pages: torch.Tensor
    """[b, max_pages] int32, contiguous."""
    lengths: torch.Tensor
    """[b] int64."""
    size: int


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
    decodes: tuple[DecodeGroup | PagedDecodes, ...]
    spans: tuple[PrefillSpan, ...]
    live_rows: int
    max_slot: int
    """Largest slot read or written; compared with the pool before the first read."""

    @property
    def is_one_group(self) -> bool:
        """One decode group covers every live row in order, so that nothing needs to be picked or put back."""
        return not self.spans and len(self.decodes) == 1 and self.decodes[0].rows is None


@attrs.frozen(kw_only=True)
class PlanRules:
    """What the backend was built for."""

    page_tokens: int
    dtype: torch.dtype
    padding_share: float
    reads_pages: bool
    """Decode rows go to the kernel that reads pages."""
    rows_alone: bool = False
    """Every row is attended by itself, rows of a prompt too."""
    rows_share_calls: bool = False
    """Many such rows may be handed over at once: everything that is done with them gives a row the bits that it has alone."""


def make_plan(batch: ForwardBatch, rules: PlanRules) -> TorchPlan:
    """The plan of a batch.

    Raises:
        MisuseError: a sequence is longer than its row of the page table, or a page id is negative.
    """
    _check_table(batch, rules.page_tokens)
    if rules.rows_alone:
        return _rows_alone(batch, rules)
    members: list[tuple[int, int]] = []
    spans: list[PrefillSpan] = []
    row = 0
    for sequence, rows in enumerate(batch.query_lens):
        if rows == 1:
            members.append((sequence, row))
        elif rows > 1:
            spans.append(_span(batch, sequence, row, rules.page_tokens))
        row += rows
    decodes: tuple[DecodeGroup | PagedDecodes, ...] = ()
    if members and rules.reads_pages:
        decodes = (_paged_decodes(members, batch),)
    elif members:
        groups = _similar_lengths(members, batch.seq_lens, rules.padding_share)
        decodes = tuple(_decode_group(group, batch, rules.page_tokens, rules.dtype) for group in groups)
    return TorchPlan(decodes=decodes, spans=tuple(spans), live_rows=row, max_slot=_max_slot(batch, rules.page_tokens))


def _rows_alone(batch: ForwardBatch, rules: PlanRules) -> TorchPlan:
    """Each row a sequence of its own. Keys of later rows of its sequence are in the cache by then and are not looked at."""
    seen = [
        row
        for rows, length in zip(batch.query_lens, batch.seq_lens, strict=True)
        for row in range(length - rows + 1, length + 1)
    ]
    table = batch.page_table.repeat_interleave(
        torch.tensor(batch.query_lens, dtype=torch.int64, device=batch.page_table.device), dim=0
    )
    decodes: tuple[DecodeGroup | PagedDecodes, ...] = ()
    if rules.reads_pages and seen:
        pages, lengths = table.to(torch.int32).contiguous(), torch.tensor(seen, dtype=torch.int64)
        everything = PagedDecodes(rows=None, pages=pages, lengths=lengths, size=len(seen))
        decodes = (everything,) if rules.rows_share_calls else tuple(_one_by_one(everything))
    elif seen:
        decodes = tuple(
            DecodeGroup(
                rows=torch.tensor([row], device=table.device),
                slots=_slots(table[row : row + 1], length, rules.page_tokens).reshape(-1),
                mask=None,
                size=1,
                length=length,
            )
            for row, length in enumerate(seen)
        )
    return TorchPlan(decodes=decodes, spans=(), live_rows=len(seen), max_slot=_max_slot(batch, rules.page_tokens))


def _one_by_one(group: PagedDecodes) -> Iterator[PagedDecodes]:
    for row in range(group.size):
        one = slice(row, row + 1)
        index = torch.tensor([row], device=group.pages.device)
        yield PagedDecodes(rows=index, pages=group.pages[one], lengths=group.lengths[one], size=1)


def _span(batch: ForwardBatch, sequence: int, row: int, page_tokens: int) -> PrefillSpan:
    rows, length = batch.query_lens[sequence], batch.seq_lens[sequence]
    slots = None
    if length > rows:
        slots = _slots(batch.page_table[sequence : sequence + 1], length, page_tokens)[0]
    return PrefillSpan(start=row, stop=row + rows, prefix=length - rows, slots=slots)


def _max_slot(batch: ForwardBatch, page_tokens: int) -> int:
    written = int(batch.kv_slots.max()) if batch.kv_slots.numel() else 0
    last_page = int(batch.page_table.max()) if batch.page_table.numel() else 0
    return max(written, (last_page + 1) * page_tokens - 1)


def _check_table(batch: ForwardBatch, page_tokens: int) -> None:
    capacity = batch.page_table.shape[1] * page_tokens
    longest = max(batch.seq_lens, default=0)
    if longest > capacity:
        raise MisuseError(
            f"a sequence of {longest} tokens does not fit its page table of {batch.page_table.shape[1]} pages of {page_tokens} tokens"
        )
    if batch.page_table.numel() and int(batch.page_table.min()) < 0:
        raise MisuseError(f"page table holds page id {int(batch.page_table.min())}; ids start at 0")


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


def _paged_decodes(members: Sequence[tuple[int, int]], batch: ForwardBatch) -> PagedDecodes:
    lengths = torch.tensor([batch.seq_lens[sequence] for sequence, _ in members], dtype=torch.int64)
    pages, rows = _picked(members, batch)
    return PagedDecodes(rows=rows, pages=pages.to(torch.int32).contiguous(), lengths=lengths, size=len(members))


def _picked(members: Sequence[tuple[int, int]], batch: ForwardBatch) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Rows of the page table of these sequences, and their query rows; None for rows 0 to b - 1."""
    sequences, rows = [sequence for sequence, _ in members], [row for _, row in members]
    in_order = list(range(len(members)))
    pages = batch.page_table
    if sequences != in_order or len(members) != pages.shape[0]:
        pages = pages[torch.tensor(sequences, device=pages.device)]
    return pages, None if rows == in_order else torch.tensor(rows, device=pages.device)


def _decode_group(
    members: Sequence[tuple[int, int]], batch: ForwardBatch, page_tokens: int, dtype: torch.dtype
) -> DecodeGroup:
    device = batch.page_table.device
    lengths = [batch.seq_lens[sequence] for sequence, _ in members]
    longest = max(lengths)
    pages, rows = _picked(members, batch)
    slots = _slots(pages, longest, page_tokens)
    mask = None
    if min(lengths) < longest:
        past_end = torch.arange(longest, device=device) >= torch.tensor(lengths, device=device).unsqueeze(1)
        slots = torch.where(past_end, slots[:, :1], slots)
        zeros = torch.zeros(past_end.shape, dtype=dtype, device=device)
        mask = zeros.masked_fill_(past_end, float("-inf"))[:, None, None, :]
    return DecodeGroup(rows=rows, slots=slots.reshape(-1), mask=mask, size=len(members), length=longest)
