"""The two grouped products for many rows an expert on Hopper, in bf16, fp16 or float8; see ``grouped_swiglu``."""

from __future__ import annotations

import functools
from typing import Any

import attrs
import torch
from crossdock.ops.fp8_block_torch import BLOCK

from crossdock_models.experts.triton.kernels.block_order import BlockOrder, block_order
from crossdock_models.experts.triton.kernels.grouped_large import programs_of

HALF_ROWS = 64
BLOCK_ROWS = 2 * HALF_ROWS
"""Rows of a block of the order that both products take, with half blocks told apart."""
STEP_BYTES = 128
"""Of each row and each weight row that a step brings."""
STAGES = 4
GROUP = 2
"""Row blocks that take the same columns next to one another: fewer bytes through L2 with two than with four or eight."""


@attrs.frozen(kw_only=True, eq=False)
class Factor:
    """One side of a product."""

    values: torch.Tensor
    """[R, width] rows, or [S, columns, width] weights; contiguous."""
    scales: torch.Tensor | None = None
    """Of float8: [R, width / 128], or [S, columns / 128, width / 128]; float32."""


@functools.cache
def is_hopper(device_index: int) -> bool:
    """Whether the device multiplies and loads as the kernel wants it."""
    return torch.cuda.get_device_capability(device_index)[0] == 9


def takes_hopper(weight: torch.Tensor, hidden_size: int, inner_size: int) -> bool:
    """Sizes of whole tiles, weights of one or two bytes, and the device."""
    is_whole = hidden_size % (2 * BLOCK) == 0 and inner_size % BLOCK == 0
    return is_whole and weight.element_size() <= 2 and weight.is_cuda and is_hopper(weight.get_device())


def hopper_products(
    rows: Factor,
    local_ids: torch.Tensor,
    gate_up: Factor,
    down: Factor,
    dtype: torch.dtype,
    sm_budget: int | None,
) -> tuple[torch.Tensor, BlockOrder]:
    """Both products of every (row, choice) pair: [places, H] in ``dtype`` of two bytes, and the places. local_ids [R, K] int64, -1 for none."""
    order = block_order(local_ids, down.values.shape[0], BLOCK_ROWS, halves=True)
    activated = hopper_gate_up(rows, local_ids.shape[1], order, gate_up, sm_budget)
    return hopper_down(activated, order, down, dtype, sm_budget), order


def hopper_gate_up(rows: Factor, top_k: int, order: BlockOrder, gate_up: Factor, sm_budget: int | None) -> Factor:
    """silu(gate) * up of every pair in its order, [places, I], in float8 with scales where the rows are in float8.

    gate_up [S, 2I, H], gate rows first. ``order`` tells half blocks of ``BLOCK_ROWS`` apart; their second half stays unwritten.
    """
    inner_size = gate_up.values.shape[1] // 2
    out = torch.empty(order.pairs.numel(), inner_size, dtype=rows.values.dtype, device=rows.values.device)
    scales = None
    if gate_up.scales is not None:
        scales = torch.empty(out.shape[0], inner_size // BLOCK, dtype=torch.float32, device=out.device)
    result = Factor(values=out, scales=scales)
    _launch(rows, gate_up, order, result, top_k, gated=True, sm_budget=sm_budget)
    return result


def hopper_down(
    activated: Factor, order: BlockOrder, down: Factor, dtype: torch.dtype, sm_budget: int | None
) -> torch.Tensor:
    """Output of every pair in its order, [places, H] in ``dtype`` of two bytes; down [S, H, I]."""
    values = activated.values
    out = torch.empty(values.shape[0], down.values.shape[1], dtype=dtype, device=values.device)
    _launch(activated, down, order, Factor(values=out), 1, gated=False, sm_budget=sm_budget)
    return out


def _launch(
    rows: Factor, weights: Factor, order: BlockOrder, out: Factor, top_k: int, *, gated: bool, sm_budget: int | None
) -> None:
    """Gathers rows for the first product; those of the second lie in their places."""
    # Imported at the first call: CPU installations have no triton.
    from crossdock_models.experts.triton.kernels.hopper_products_triton import hopper_product_kernel

    width, columns = weights.values.shape[2], out.values.shape[1]
    step = STEP_BYTES // weights.values.element_size()
    unscaled = order.num_blocks
    launch: Any = hopper_product_kernel
    launch[(programs_of(rows.values, sm_budget),)](
        rows.values,
        _described(rows.values, HALF_ROWS, step),
        _described(weights.values.view(-1, width), BLOCK, step),
        unscaled if rows.scales is None else rows.scales,
        unscaled if weights.scales is None else weights.scales,
        order.pairs,
        order.block_experts,
        order.num_blocks,
        _described(out.values, HALF_ROWS, BLOCK),
        unscaled if out.scales is None else out.scales,
        rows.values.shape[0] * top_k,
        width,
        columns,
        gathers=gated,
        gated=gated,
        scaled=weights.scales is not None,
        top_k=top_k,
        step=step,
        group=GROUP,
        stages=STAGES,
        num_warps=4,
    )


def _described(tensor: torch.Tensor, *box: int) -> Any:
    """A tensor descriptor in the layout that products read from shared memory."""
    from triton.experimental.gluon import language
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    element = {torch.bfloat16: language.bfloat16, torch.float16: language.float16}.get(
        tensor.dtype, language.float8e4nv
    )
    shared: Any = language.NVMMASharedLayout
    return TensorDescriptor.from_tensor(tensor, list(box), shared.get_default_for(list(box), element))
