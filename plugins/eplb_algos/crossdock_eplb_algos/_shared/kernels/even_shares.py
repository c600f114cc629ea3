# Launch options (num_warps, ...) are no parameters of the kernel.
# pyright: reportCallIssue=false
"""``even_shares``: the split of a layer's batch with the least largest load, on the device and without a look at its data."""

from __future__ import annotations

import importlib.util

import torch

from crossdock_eplb_algos._shared.copy_table import CopyTable, loads_without_choice, tokens_of_rows
from crossdock_eplb_algos._shared.kernels.even_shares_torch import MOMENTUM, NEWTON_STEPS, even_shares_torch, num_steps

MOST_CELLS = 1 << 15
"""Rows times ranks, both rounded up to powers of two, that one program can keep in registers."""
_CELLS_A_WARP = 512


def has_kernels(device: torch.device) -> bool:
    """Triton's kernels run there."""
    return device.type == "cuda" and importlib.util.find_spec("triton") is not None


def even_shares(tokens: torch.Tensor, table: CopyTable) -> torch.Tensor:
    """[E] int64 tokens of each expert, on all ranks together -> [M, R] float32 tokens of each copy."""
    if has_kernels(tokens.device) and _block(table.num_rows) * _block(table.num_ranks) <= MOST_CELLS:
        return even_shares_compiled(tokens, table)
    base = loads_without_choice(table, tokens).to(torch.float32)
    steps = num_steps(table.only_experts.shape[1])
    return even_shares_torch(tokens_of_rows(table, tokens).to(torch.float32), base, table.slots >= 0, steps)


def even_shares_compiled(tokens: torch.Tensor, table: CopyTable) -> torch.Tensor:
    """As ``even_shares``, by the Triton kernel."""
    from crossdock_eplb_algos._shared.kernels.even_shares_triton import even_shares_kernel

    num_rows, num_ranks = table.slots.shape
    shares = torch.empty((num_rows, num_ranks), dtype=torch.float32, device=tokens.device)
    if not num_rows:
        return shares
    rows_block, ranks_block = _block(num_rows), _block(num_ranks)
    num_slots = table.only_experts.shape[1]
    even_shares_kernel[(1,)](
        tokens,
        table.experts,
        table.slots,
        table.only_experts,
        shares,
        tokens.shape[0],
        num_rows,
        num_ranks,
        num_slots,
        MOMENTUM,
        steps=num_steps(num_slots),
        newton_steps=NEWTON_STEPS,
        rows_block=rows_block,
        ranks_block=ranks_block,
        slots_block=_block(num_slots),
        num_warps=max(1, min(16, rows_block * ranks_block // _CELLS_A_WARP)),
    )
    return shares


def _block(size: int) -> int:
    return 1 << max(0, size - 1).bit_length()
