"""Builds one rank's ``ForwardBatch`` from its replica's work and the step's plan; an idle replica gets zero sequences and padding."""

from __future__ import annotations

import numpy as np
import torch

from crossdock.errors import MisuseError
from crossdock.kv_cache import SCRATCH_PAGE
from crossdock.step_work import SequenceRows, StepWork
from crossdock.types.batch import ForwardBatch
from crossdock.types.step import StepPlan


def build_batch(
    work: StepWork, plan: StepPlan, *, attn_dp_rank: int, page_tokens: int, device: torch.device
) -> ForwardBatch:
    """The batch of replica ``attn_dp_rank``: live rows first, padded to ``plan.padded_tokens[attn_dp_rank]``.

    Padded rows have token 0, position 0 and write to the scratch page.

    Raises:
        MisuseError: the plan was made for other rows, or a sequence has fewer pages than tokens.
    """
    live, padded = work.num_tokens, plan.padded_tokens[attn_dp_rank]
    if live != plan.live_tokens[attn_dp_rank] or live > padded:
        raise MisuseError(
            f"step {plan.step}: replica {attn_dp_rank} has {live} rows, but the plan was made for "
            f"{plan.live_tokens[attn_dp_rank]} padded to {padded}"
        )
    ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    logit_rows: list[int] = []
    for rows in work.sequences:
        ids.extend(rows.tokens)
        positions.extend(range(rows.start, rows.end))
        slots.extend(_slots(rows, page_tokens))
        logit_rows.extend(range(len(ids) - rows.num_logit_rows, len(ids)))
    padding = [0] * (padded - live)
    scratch = [SCRATCH_PAGE * page_tokens] * (padded - live)
    return ForwardBatch(
        input_ids=torch.tensor(ids + padding, dtype=torch.int64, device=device),
        positions=torch.tensor(positions + padding, dtype=torch.int64, device=device),
        kv_slots=torch.tensor(slots + scratch, dtype=torch.int64, device=device),
        page_table=_page_table(work).to(device),
        seq_lens=tuple(rows.end for rows in work.sequences),
        query_lens=tuple(len(rows.tokens) for rows in work.sequences),
        logit_rows=torch.tensor(logit_rows, dtype=torch.int64, device=device),
        forward_mode=work.forward_mode,
        step=plan,
        attn_dp_rank=attn_dp_rank,
        num_live_tokens=live,
    )


def _slots(rows: SequenceRows, page_tokens: int) -> list[int]:
    """Flat cache slots of the new rows."""
    if rows.end > len(rows.pages) * page_tokens:
        raise MisuseError(f"{rows.end} tokens do not fit into {len(rows.pages)} pages of {page_tokens} tokens")
    if len(rows.tokens) == 1:
        return [rows.pages[rows.start // page_tokens] * page_tokens + rows.start % page_tokens]
    where = np.arange(rows.start, rows.end)
    slots: list[int] = (np.asarray(rows.pages)[where // page_tokens] * page_tokens + where % page_tokens).tolist()
    return slots


def _page_table(work: StepWork) -> torch.Tensor:
    """[B, max_pages] int32, unused entries the scratch page."""
    width = max((len(rows.pages) for rows in work.sequences), default=1)
    table = np.full((len(work.sequences), width), SCRATCH_PAGE, dtype=np.int32)
    for row, rows in zip(table, work.sequences, strict=True):
        row[: len(rows.pages)] = rows.pages
    return torch.tensor(table)
