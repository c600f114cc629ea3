# Launch options (num_warps, ...) are no parameters of the kernel.
# pyright: reportCallIssue=false
"""The two grouped products for many rows an expert; see ``grouped_swiglu``."""

from __future__ import annotations

import functools
from typing import Any

import attrs
import torch
from crossdock.ops.early_launch import early_launch

from crossdock_models.experts.triton.kernels.block_order import BlockOrder


@attrs.frozen(kw_only=True)
class LargeTiles:
    """Tiles of both products; ``inner`` is the step along the summed dimension and must divide both sizes."""

    rows: int = 128
    gate_columns: int = 128
    down_columns: int = 256
    inner: int = 64
    group: int = 4
    warps: int = 8
    gate_stages: int = 4
    down_stages: int = 3
    halves: bool = True
    """Last blocks of at most half the rows cost half in the first product."""


LARGE_TILES = LargeTiles()
VERY_LARGE_TILES = LargeTiles(gate_stages=3)
"""Prefill on an H200, from 512 rows an expert on (``docs/gpu-notebook.md``)."""
VERY_LARGE_ROWS = 512


def choose_large_tiles(rows_per_expert: float) -> LargeTiles:
    """The entry for the mean number of rows an expert gets."""
    return VERY_LARGE_TILES if rows_per_expert >= VERY_LARGE_ROWS else LARGE_TILES


def large_gate_up(
    rows: torch.Tensor, top_k: int, order: BlockOrder, gate_up: torch.Tensor, tiles: LargeTiles, sm_budget: int | None
) -> torch.Tensor:
    """silu(gate) * up of every pair in its order: [blocks * tile rows, I]; gate_up [S, 2I, H] contiguous.

    Half blocks of ``order`` cost half; their second half stays unwritten.
    """
    # Imported at the first call: CPU installations have no triton.
    from crossdock_models.experts.triton.kernels.grouped_large_triton import large_gate_up_kernel

    hidden_size, inner_size = gate_up.shape[2], gate_up.shape[1] // 2
    out = torch.empty(order.pairs.numel(), inner_size, dtype=rows.dtype, device=rows.device)
    large_gate_up_kernel[(programs_of(rows, sm_budget),)](
        rows,
        described(gate_up.view(-1, inner_size, hidden_size), 2, tiles.gate_columns, tiles.inner),
        order.pairs,
        order.block_experts,
        order.num_blocks,
        described(out, tiles.rows, tiles.gate_columns),
        described(out, tiles.rows // 2, tiles.gate_columns),
        rows.shape[0] * top_k,
        hidden_size,
        inner_size,
        top_k=top_k,
        block_rows=tiles.rows,
        block_columns=tiles.gate_columns,
        block_inner=tiles.inner,
        group=tiles.group,
        halves=tiles.halves,
        num_warps=tiles.warps,
        num_stages=tiles.gate_stages,
        **early_launch(rows),
    )
    return out


def large_down(
    activated: torch.Tensor, order: BlockOrder, down: torch.Tensor, tiles: LargeTiles, sm_budget: int | None
) -> torch.Tensor:
    """Output of every pair in its order: [blocks * tile rows, H]; down [S, H, I] contiguous."""
    # Imported at the first call: CPU installations have no triton.
    from crossdock_models.experts.triton.kernels.grouped_large_triton import large_down_kernel

    hidden_size, inner_size = down.shape[1], down.shape[2]
    out = torch.empty(order.pairs.numel(), hidden_size, dtype=activated.dtype, device=activated.device)
    large_down_kernel[(programs_of(activated, sm_budget),)](
        described(activated, tiles.rows, tiles.inner),
        described(down.view(-1, inner_size), tiles.down_columns, tiles.inner),
        described(out, tiles.rows, tiles.down_columns),
        order.block_experts,
        order.num_blocks,
        hidden_size,
        inner_size,
        block_rows=tiles.rows,
        block_columns=tiles.down_columns,
        block_inner=tiles.inner,
        group=tiles.group,
        num_warps=tiles.warps,
        num_stages=tiles.down_stages,
        **early_launch(activated),
    )
    return out


def programs_of(tensor: torch.Tensor, sm_budget: int | None) -> int:
    """One a multiprocessor that may be used; two where kernels are interpreted."""
    most = multiprocessors(tensor.get_device()) if tensor.is_cuda else 2
    return most if sm_budget is None else max(1, min(sm_budget, most))


@functools.cache
def multiprocessors(device_index: int) -> int:
    """Of a GPU."""
    return torch.cuda.get_device_properties(device_index).multi_processor_count


def described(tensor: torch.Tensor, *tile: int) -> Any:
    """A tensor descriptor that loads and stores tiles of these sizes."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor.from_tensor(tensor, list(tile))
