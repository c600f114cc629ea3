# Launch options (num_warps, ...) are no parameters of the kernel.
# pyright: reportCallIssue=false
"""``grouped_swiglu``: rows through their local experts and back to one weighted row each, four launches, no host synchronisation."""

from __future__ import annotations

import attrs
import torch

from crossdock_models.experts.triton.kernels.block_order import block_order
from crossdock_models.experts.triton.kernels.tiles import Tiles, choose_tiles

SCALE_BLOCK = 128


@attrs.frozen(kw_only=True, eq=False)
class GroupedWeights:
    """Weights of one layer: S experts, I inner, H hidden. Scales only for float8 weights."""

    gate_up: torch.Tensor
    """[S, 2I, H] contiguous, gate rows first."""
    down: torch.Tensor
    """[S, H, I] contiguous."""
    gate_up_scale: torch.Tensor | None = None
    """[S, 2 * ceil(I / 128), ceil(H / 128)] float32."""
    down_scale: torch.Tensor | None = None
    """[S, ceil(H / 128), ceil(I / 128)] float32."""


def grouped_swiglu(
    rows: torch.Tensor,
    local_ids: torch.Tensor,
    weights: torch.Tensor,
    experts: GroupedWeights,
    tiles: Tiles | None = None,
) -> torch.Tensor:
    """rows [R, H], local_ids [R, K] int64 (-1 = none), weights [R, K] float32 -> [R, H] in the dtype of rows.

    Row r of the result is the sum over its local choices, in the order of k, of weight * expert(row); zero without any.
    """
    num_rows, hidden_size = rows.shape
    top_k = local_ids.shape[1]
    num_experts, twice_inner, _ = experts.gate_up.shape
    inner_size = twice_inner // 2
    out = torch.empty_like(rows)
    if num_rows == 0:
        return out
    # Imported at the first call: CPU installations have no triton.
    import triton

    from crossdock_models.experts.triton.kernels.grouped_swiglu_triton import (
        down_kernel,
        gate_up_kernel,
        sum_choices_kernel,
    )

    quantised = experts.gate_up_scale is not None and experts.down_scale is not None
    tiles = tiles or choose_tiles(num_rows * top_k / num_experts, quantised)
    rows, local_ids, weights = rows.contiguous(), local_ids.contiguous(), weights.contiguous()
    pairs, block_experts = block_order(local_ids, num_experts, tiles.rows)
    blocks = block_experts.numel()
    activated = torch.empty(blocks * tiles.rows, inner_size, dtype=rows.dtype, device=rows.device)
    gate_scale = experts.gate_up_scale if experts.gate_up_scale is not None else weights
    down_scale = experts.down_scale if experts.down_scale is not None else weights
    described = tiles.descriptors and not quantised and hidden_size % tiles.inner == 0 and inner_size % tiles.inner == 0
    gate_up, down, activated_rows = experts.gate_up, experts.down, activated
    if described:
        from triton.tools.tensor_descriptor import TensorDescriptor

        gate_up = TensorDescriptor.from_tensor(gate_up.view(-1, hidden_size), [tiles.gate_columns, tiles.inner])
        down = TensorDescriptor.from_tensor(down.view(-1, inner_size), [tiles.down_columns, tiles.inner])
        activated_rows = TensorDescriptor.from_tensor(activated, [tiles.rows, tiles.inner])
    gate_up_kernel[(blocks * triton.cdiv(inner_size, tiles.gate_columns),)](
        rows,
        gate_up,
        gate_scale,
        pairs,
        block_experts,
        activated,
        num_rows * top_k,
        blocks,
        hidden_size,
        inner_size,
        top_k,
        gate_scale.shape[1],
        gate_scale.shape[-1],
        block_rows=tiles.rows,
        block_columns=tiles.gate_columns,
        block_inner=tiles.inner,
        group=tiles.group,
        weight_blocks=quantised,
        descriptors=described,
        num_warps=tiles.gate_warps,
        num_stages=tiles.gate_stages,
    )
    parts = torch.empty(num_rows * top_k, hidden_size, dtype=rows.dtype, device=rows.device)
    down_kernel[(blocks * triton.cdiv(hidden_size, tiles.down_columns),)](
        activated_rows,
        down,
        down_scale,
        pairs,
        block_experts,
        weights,
        parts,
        num_rows * top_k,
        blocks,
        hidden_size,
        inner_size,
        down_scale.shape[1],
        down_scale.shape[-1],
        block_rows=tiles.rows,
        block_columns=tiles.down_columns,
        block_inner=tiles.inner,
        group=tiles.group,
        weight_blocks=quantised,
        descriptors=described,
        num_warps=tiles.down_warps,
        num_stages=tiles.down_stages,
    )
    block = min(1024, triton.next_power_of_2(hidden_size))
    sum_choices_kernel[(num_rows, triton.cdiv(hidden_size, block))](
        parts, local_ids, out, hidden_size, top_k=top_k, block=block, num_warps=4
    )
    return out
