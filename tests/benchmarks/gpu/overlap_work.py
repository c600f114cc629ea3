"""The steps that ``overlap.py`` times: rows of one replica."""

from __future__ import annotations

import torch
from crossdock.step_work import SequenceRows, StepWork

PAGE = 64


def prefill_work(rows: int, seed: int) -> StepWork:
    """Sequences of up to 2,048 rows from position 0."""
    length = min(rows, 2048)
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 100, (rows // length, length), generator=generator).tolist()
    return StepWork(
        sequences=tuple(
            SequenceRows(tokens=tuple(row), start=0, pages=_pages(number, length), num_logit_rows=1)
            for number, row in enumerate(ids)
        )
    )


def decode_work(rows: int, context: int) -> StepWork:
    """One row each of sequences at the same position."""
    return StepWork(
        sequences=tuple(
            SequenceRows(
                tokens=(number % 100,),
                start=context - 1,
                pages=_pages(number, context),
                num_logit_rows=1,
                is_decode=True,
            )
            for number in range(rows)
        )
    )


def _pages(number: int, length: int) -> tuple[int, ...]:
    """Of sequence ``number``; page 0 is for padding."""
    pages = -(-length // PAGE)
    return tuple(range(1 + number * pages, 1 + (number + 1) * pages))
