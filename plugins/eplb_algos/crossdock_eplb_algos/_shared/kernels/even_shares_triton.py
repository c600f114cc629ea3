# mypy: ignore-errors
# pyright: basic
"""``even_shares``: one program keeps the whole problem of a layer in registers; steps as in the torch twin."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def even_shares_kernel(
    tokens_ptr,
    experts_ptr,
    slots_ptr,
    columns_ptr,
    only_experts_ptr,
    shares_ptr,
    num_experts,
    num_rows,
    num_ranks,
    num_columns,
    num_slots,
    momentum,
    steps: tl.constexpr,
    newton_steps: tl.constexpr,
    is_compact: tl.constexpr,
    rows_block: tl.constexpr,
    columns_block: tl.constexpr,
    slots_block: tl.constexpr,
):
    # tokens [E], experts [M], slots [M, R], columns [C] and only_experts [R, S], all int64 -> shares [M, R] float32, zero before where compact.
    row = tl.arange(0, rows_block)
    column = tl.arange(0, columns_block)
    # Neighbouring addresses, which the compiler turns into fewer exchanges between lanes; with many ranks those with copies only.
    rank = column
    if is_compact:
        rank = tl.load(columns_ptr + column, mask=column < num_columns, other=num_ranks)
    slot = tl.arange(0, slots_block)

    # What ranks have anyway, and what there is to share.
    inside = (rank[:, None] < num_ranks) & (slot[None, :] < num_slots)
    only = tl.load(only_experts_ptr + rank[:, None] * num_slots + slot[None, :], mask=inside, other=num_experts)
    fixed = tl.load(tokens_ptr + only, mask=only < num_experts, other=0).to(tl.float32)
    base = tl.sum(fixed, axis=1)
    expert = tl.load(experts_ptr + row, mask=row < num_rows, other=num_experts)
    tokens = tl.load(tokens_ptr + expert, mask=expert < num_experts, other=0).to(tl.float32)

    inside = (row[:, None] < num_rows) & (rank[None, :] < num_ranks)
    place = row[:, None] * num_ranks + rank[None, :]
    holds = tl.load(slots_ptr + place, mask=inside, other=-1) >= 0
    crowd = tl.maximum(tl.sum(holds.to(tl.float32), axis=0), 1.0)
    weight = tl.where(holds, 1.0 / crowd[None, :], 0.0)
    total_weight = tl.maximum(tl.sum(weight, axis=1), 1e-30)
    copies = tl.maximum(tl.sum(holds.to(tl.float32), axis=1), 1.0)
    shares = tl.where(holds, (tokens / copies)[:, None], 0.0)
    ahead = shares
    level = tl.zeros([rows_block], dtype=tl.float32)

    for step in range(steps):
        # Against the loads.
        wish = ahead * crowd[None, :] - (base + tl.sum(ahead, axis=0))[None, :]
        # Back on the tokens of each expert.
        everywhere = (tl.sum(wish * weight, axis=1) - tokens) / total_weight
        if step == 0:
            level = everywhere
        for _ in tl.static_range(newton_steps):
            above = tl.where(wish > level[:, None], weight, 0.0)
            sum_above = tl.sum(above, axis=1)
            newton = (tl.sum(wish * above, axis=1) - tokens) / tl.maximum(sum_above, 1e-30)
            level = tl.where(sum_above > 0, newton, everywhere)
        stepped = tl.maximum(wish - level[:, None], 0.0) * weight
        # Momentum.
        ahead = stepped + momentum * (stepped - shares)
        shares = stepped

    total = tl.sum(shares, axis=1)
    factor = tl.where(total > 0, tokens / tl.maximum(total, 1e-30), 0.0)
    tl.store(shares_ptr + place, shares * factor[:, None], mask=inside)
