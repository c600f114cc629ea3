"""Builds one rank's batch from its replica's work and the step's plan; an idle replica gets zero sequences and padding.

First as arrays on the host, then in one upload to the device: one copy costs less than the many that it replaces.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import TypeAlias

import attrs
import numpy as np
import numpy.typing as npt
import torch

from crossdock.errors import MisuseError
from crossdock.host_values import on_device
from crossdock.kv_cache import SCRATCH_PAGE
from crossdock.step_work import PENDING, StepWork
from crossdock.types.batch import ForwardBatch
from crossdock.types.step import ForwardMode, StepPlan

Ints: TypeAlias = npt.NDArray[np.int32]


@attrs.frozen(kw_only=True, eq=False)
class HostBatch:
    """The live rows of a batch on the host: n rows of B sequences. All arrays int32."""

    token_ids: Ints
    """[n], ``PENDING`` where the id is still on the device."""
    sources: Ints
    """[n]: place of a pending id among the ids of the step before."""
    positions: Ints
    """[n]."""
    kv_slots: Ints
    """[n]."""
    page_table: Ints
    """[B, width], unused entries the scratch page."""
    seq_lens: Ints
    """[B] tokens in the cache after the step."""
    query_lens: Ints
    """[B] rows."""
    logit_rows: Ints
    """[R]."""
    num_samples: int
    """Ids that the step will sample."""
    forward_mode: ForwardMode
    attn_dp_rank: int

    @property
    def num_live(self) -> int:
        return int(self.token_ids.shape[0])


def build_batch(work: StepWork, plan: StepPlan, *, attn_dp_rank: int, page_tokens: int) -> HostBatch:
    """The batch of replica ``attn_dp_rank``.

    Raises:
        MisuseError: the plan was made for other rows, or a sequence has fewer pages than tokens.
    """
    sequences = work.sequences
    query_lens = _ints([len(rows.tokens) for rows in sequences])
    live, padded = int(query_lens.sum()), plan.padded_tokens[attn_dp_rank]
    if live != plan.live_tokens[attn_dp_rank] or live > padded:
        raise MisuseError(
            f"step {plan.step}: replica {attn_dp_rank} has {live} rows, but the plan was made for "
            f"{plan.live_tokens[attn_dp_rank]} padded to {padded}"
        )
    starts = _ints([rows.start for rows in sequences])
    seq_lens = starts + query_lens
    table, num_pages = _page_table(work)
    short = np.flatnonzero(seq_lens > num_pages * page_tokens)
    if short.size:
        first = short[0]
        raise MisuseError(f"{seq_lens[first]} tokens do not fit into {num_pages[first]} pages of {page_tokens} tokens")
    positions = _ranges(starts, query_lens)
    sequence_of_row = np.repeat(np.arange(len(sequences)), query_lens)
    num_logits = _ints([rows.num_logit_rows for rows in sequences])
    return HostBatch(
        token_ids=_ints(list(chain.from_iterable([rows.tokens for rows in sequences]))),
        sources=np.repeat(_ints([rows.source for rows in sequences]), query_lens),
        positions=positions,
        kv_slots=table[sequence_of_row, positions // page_tokens] * np.int32(page_tokens) + positions % page_tokens,
        page_table=table,
        seq_lens=seq_lens,
        query_lens=query_lens,
        logit_rows=_ranges(np.cumsum(query_lens, dtype=np.int32) - num_logits, num_logits),
        num_samples=work.num_samples,
        forward_mode=work.forward_mode,
        attn_dp_rank=attn_dp_rank,
    )


def upload_batch(batch: HostBatch, plan: StepPlan, sampled: torch.Tensor) -> ForwardBatch:
    """``batch`` on the device of ``sampled``, padded to ``plan.padded_tokens`` of its replica.

    Padded rows have token 0, position 0 and write to the scratch page.

    Args:
        batch: of this rank.
        plan: it was built for.
        sampled: [most] int64, the ids of the step before; pending tokens are taken from it.
    """
    live, padded = batch.num_live, plan.padded_tokens[batch.attn_dp_rank]
    rows = np.zeros((4, padded), dtype=np.int32)
    rows[:, :live] = batch.token_ids, batch.positions, batch.kv_slots, batch.sources
    width = batch.page_table.shape[1]
    # Four fields of equal length before the page table, which so lies at a multiple of 16 bytes: kernels are compiled for aligned pointers.
    packed = np.concatenate((rows.ravel(), batch.page_table.ravel(), batch.logit_rows))
    there = on_device(packed, torch.int32, sampled.device)
    ids, positions, slots = there[: 3 * padded].to(torch.int64).view(3, padded).unbind()
    is_pending = bool((batch.token_ids == PENDING).any())
    if is_pending:
        sources = there[3 * padded : 4 * padded].to(torch.int64)
        ids = torch.where(ids == PENDING, sampled[sources.clamp(min=0)], ids)
    tail = there[4 * padded :]
    return ForwardBatch(
        input_ids=ids,
        positions=positions,
        kv_slots=slots,
        page_table=tail[: batch.page_table.size].view(-1, width),
        seq_lens=tuple(batch.seq_lens.tolist()),
        query_lens=tuple(batch.query_lens.tolist()),
        logit_rows=tail[batch.page_table.size :].to(torch.int64),
        forward_mode=batch.forward_mode,
        step=plan,
        attn_dp_rank=batch.attn_dp_rank,
        num_live_tokens=live,
        host_logit_rows=tuple(batch.logit_rows.tolist()),
    )


def _ints(values: Sequence[int]) -> Ints:
    return np.array(values, dtype=np.int32)


def _ranges(starts: Ints, counts: Ints) -> Ints:
    """start, start + 1, ... of each range, one after the other."""
    before = np.cumsum(counts, dtype=np.int32) - counts
    return np.repeat(starts - before, counts) + np.arange(counts.sum(), dtype=np.int32)


def _page_table(work: StepWork) -> tuple[Ints, Ints]:
    """[B, width] pages of each sequence, and how many it has."""
    num_pages = _ints([len(rows.pages) for rows in work.sequences])
    flat = _ints(list(chain.from_iterable([rows.pages for rows in work.sequences])))
    width = int(num_pages.max(initial=1))
    if flat.size == len(num_pages) * width:
        return flat.reshape(-1, width), num_pages
    table = np.full((len(num_pages), width), SCRATCH_PAGE, dtype=np.int32)
    table[np.arange(width) < num_pages[:, None]] = flat
    return table, num_pages
