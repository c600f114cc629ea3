# Launch options (num_warps, ...) are no parameters of the kernel.
# pyright: reportCallIssue=false
"""``even_shares``: the split of a layer's batch with the least largest load, on the device and without a look at its data."""

from __future__ import annotations

import importlib.util

import torch

from crossdock_eplb_algos._shared.copy_table import CopyTable, loads_without_choice, tokens_of_rows
from crossdock_eplb_algos._shared.kernels.even_shares_torch import MOMENTUM, NEWTON_STEPS, even_shares_torch, num_steps

MOST_CELLS = 1 << 15
"""Rows times columns, both rounded up to powers of two, that one program can keep in registers."""


def has_kernels(device: torch.device) -> bool:
    """Triton's kernels run there."""
    return device.type == "cuda" and importlib.util.find_spec("triton") is not None


def block_of(size: int) -> int:
    """Smallest power of two that holds ``size``, which is what a kernel's tile needs."""
    return 1 << max(0, size - 1).bit_length()


def even_shares(tokens: torch.Tensor, table: CopyTable) -> torch.Tensor:
    """[E] int64 tokens of each expert, on all ranks together -> [M, R] float32 tokens of each copy."""
    if has_kernels(tokens.device) and _cells(table) <= MOST_CELLS:
        return even_shares_compiled(tokens, table)
    base = loads_without_choice(table, tokens).to(torch.float32)
    steps = num_steps(table.only_experts.shape[1])
    return even_shares_torch(tokens_of_rows(table, tokens).to(torch.float32), base, table.slots >= 0, steps)


def even_shares_compiled(tokens: torch.Tensor, table: CopyTable) -> torch.Tensor:
    """As ``even_shares``, by the Triton kernel."""
    from crossdock_eplb_algos._shared.kernels.even_shares_triton import even_shares_kernel

    num_rows, num_ranks = table.slots.shape
    num_columns, num_slots = table.columns.shape[0], table.only_experts.shape[1]
    is_compact = num_columns < num_ranks
    make = torch.zeros if is_compact else torch.empty
    shares = make((num_rows, num_ranks), dtype=torch.float32, device=tokens.device)
    if not num_rows:
        return shares
    even_shares_kernel[(1,)](
        tokens,
        table.experts,
        table.slots,
        table.columns,
        table.only_experts,
        shares,
        tokens.shape[0],
        num_rows,
        num_ranks,
        num_columns,
        num_slots,
        MOMENTUM,
        steps=num_steps(num_slots),
        newton_steps=NEWTON_STEPS,
        is_compact=is_compact,
        rows_block=block_of(num_rows),
        columns_block=block_of(num_columns),
        slots_block=block_of(num_slots),
        num_warps=_num_warps(_cells(table)),
    )
    return shares


def _cells(table: CopyTable) -> int:
    return block_of(table.num_rows) * block_of(table.columns.shape[0])


def _num_warps(cells: int) -> int:
    """The fastest of 1 to 16 on an H200 for 256, 512, 1024 and 4096 cells."""
    if cells <= 512:
        return 8
    return 4 if cells <= 2048 else 16
