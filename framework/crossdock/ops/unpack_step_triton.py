# mypy: ignore-errors
# pyright: basic
"""Triton kernel of ``unpack_step``: one program a row."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["bucket", "dispatch_rows", "num_logits", "columns"])
def unpack_step_kernel(
    # pointers
    packed,
    sampled,
    input_ids,
    positions,
    kv_slots,
    seq_lens,
    page_table,
    padded_rows,
    logit_rows,
    # sizes
    bucket,
    dispatch_rows,
    num_logits,
    columns,
    # meta
    page_block: tl.constexpr,
) -> None:
    """``packed``: width, then six fields of each row, then which rows are padded, then rows with logits, then the pages of each sequence."""
    row = tl.program_id(0)
    fields = packed + 1
    mask = fields + 6 * bucket
    logits = mask + dispatch_rows
    # 1. Does this row of the dispatcher carry a token?
    if row < dispatch_rows:
        tl.store(padded_rows + row, tl.load(mask + row).to(tl.uint8))
    if row < num_logits:
        tl.store(logit_rows + row, tl.load(logits + row).to(tl.int64))
    if row < bucket:
        # 2. The row itself; a pending id comes from the step before.
        token = tl.load(fields + row).to(tl.int64)
        source = tl.load(fields + bucket + row)
        known = tl.load(sampled + source, mask=token < 0, other=0)
        length = tl.load(fields + 4 * bucket + row)
        tl.store(input_ids + row, tl.where(token < 0, known, token))
        tl.store(positions + row, tl.load(fields + 2 * bucket + row).to(tl.int64))
        tl.store(kv_slots + row, tl.load(fields + 3 * bucket + row).to(tl.int64))
        tl.store(seq_lens + row, length)
        # 3. The pages of its sequence. A row without one has none.
        if length > 0:
            width = tl.load(packed)
            pages = logits + num_logits + tl.load(fields + 5 * bucket + row) * width
            for start in range(0, width, page_block):
                column = start + tl.arange(0, page_block)
                inside = column < width
                tl.store(page_table + row * columns + column, tl.load(pages + column, mask=inside), mask=inside)
