# Launch options (num_warps, ...) are no parameters of the kernel.
# pyright: reportCallIssue=false
"""``grouped_swiglu``: rows through their local experts and back to one weighted row each, five launches (two for a few rows), no host synchronisation."""

from __future__ import annotations

from typing import Any

import attrs
import torch
from crossdock.ops.early_launch import early_launch

from crossdock_models.experts.triton.kernels.block_order import block_order
from crossdock_models.experts.triton.kernels.few_rows import are_few, few_rows_swiglu
from crossdock_models.experts.triton.kernels.tiles import Tiles, choose_tiles


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

    @property
    def num_experts(self) -> int:
        return self.down.shape[0]

    @property
    def hidden_size(self) -> int:
        return self.down.shape[1]

    @property
    def inner_size(self) -> int:
        return self.down.shape[2]

    @property
    def is_quantised(self) -> bool:
        return self.gate_up_scale is not None

    def can_describe(self, tiles: Tiles) -> bool:
        """Tiles come through descriptors: whole steps along the summed dimension only, plain weights only."""
        is_whole = self.hidden_size % tiles.inner == 0 and self.inner_size % tiles.inner == 0
        return tiles.descriptors and is_whole and not self.is_quantised


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
    num_rows, top_k = local_ids.shape
    if num_rows == 0:
        return torch.empty_like(rows)
    rows, local_ids, weights = rows.contiguous(), local_ids.contiguous(), weights.contiguous()
    if tiles is None and not experts.is_quantised and are_few(local_ids, experts.num_experts):
        return few_rows_swiglu(rows, local_ids, weights, experts.gate_up, experts.down)
    tiles = tiles or choose_tiles(num_rows * top_k / experts.num_experts, experts.is_quantised)
    pairs, block_experts = block_order(local_ids, experts.num_experts, tiles.rows)
    activated = gate_up_rows(rows, top_k, pairs, block_experts, experts, tiles)
    parts = down_rows(activated, weights, pairs, block_experts, experts, tiles)
    return sum_choices(parts, local_ids)


def gate_up_rows(
    rows: torch.Tensor,
    top_k: int,
    pairs: torch.Tensor,
    block_experts: torch.Tensor,
    experts: GroupedWeights,
    tiles: Tiles,
) -> torch.Tensor:
    """silu(gate) * up of every pair, in the order of ``pairs``: [blocks * tile rows, I]."""
    # Imported at the first call: CPU installations have no triton.
    import triton

    from crossdock_models.experts.triton.kernels.grouped_swiglu_triton import gate_up_kernel

    blocks, inner_size, hidden_size = block_experts.numel(), experts.inner_size, experts.hidden_size
    activated = torch.empty(blocks * tiles.rows, inner_size, dtype=rows.dtype, device=rows.device)
    described = experts.can_describe(tiles)
    gate_up = experts.gate_up.view(-1, inner_size, hidden_size)
    scale = experts.gate_up_scale if experts.gate_up_scale is not None else gate_up
    gate_up_kernel[(blocks * triton.cdiv(inner_size, tiles.gate_columns),)](
        rows,
        _described(gate_up, 2, tiles.gate_columns, tiles.inner) if described else gate_up,
        scale,
        pairs,
        block_experts,
        activated,
        rows.shape[0] * top_k,
        blocks,
        hidden_size,
        inner_size,
        top_k,
        scale.shape[1],
        scale.shape[-1],
        block_rows=tiles.rows,
        block_columns=tiles.gate_columns,
        block_inner=tiles.inner,
        group=tiles.group,
        weight_blocks=experts.is_quantised,
        descriptors=described,
        num_warps=tiles.gate_warps,
        num_stages=tiles.gate_stages,
        **early_launch(rows),
    )
    return activated


def down_rows(
    activated: torch.Tensor,
    weights: torch.Tensor,
    pairs: torch.Tensor,
    block_experts: torch.Tensor,
    experts: GroupedWeights,
    tiles: Tiles,
) -> torch.Tensor:
    """Weighted output of every pair at its own place: [R * K, H]; places of choices elsewhere stay unwritten."""
    # Imported at the first call: CPU installations have no triton.
    import triton

    from crossdock_models.experts.triton.kernels.grouped_swiglu_triton import down_kernel

    blocks, inner_size, hidden_size = block_experts.numel(), experts.inner_size, experts.hidden_size
    parts = torch.empty(weights.numel(), hidden_size, dtype=activated.dtype, device=activated.device)
    described = experts.can_describe(tiles)
    down = experts.down.view(-1, inner_size)
    scale = experts.down_scale if experts.down_scale is not None else down
    down_kernel[(blocks * triton.cdiv(hidden_size, tiles.down_columns),)](
        _described(activated, tiles.rows, tiles.inner) if described else activated,
        _described(down, tiles.down_columns, tiles.inner) if described else down,
        scale,
        pairs,
        block_experts,
        weights,
        parts,
        weights.numel(),
        blocks,
        hidden_size,
        inner_size,
        scale.shape[1],
        scale.shape[-1],
        block_rows=tiles.rows,
        block_columns=tiles.down_columns,
        block_inner=tiles.inner,
        group=tiles.group,
        weight_blocks=experts.is_quantised,
        descriptors=described,
        num_warps=tiles.down_warps,
        num_stages=tiles.down_stages,
        **early_launch(activated),
    )
    return parts


def sum_choices(parts: torch.Tensor, local_ids: torch.Tensor) -> torch.Tensor:
    """Rows of ``parts`` [R * K, H] back to one a token: the choices that are here, added in their order."""
    # Imported at the first call: CPU installations have no triton.
    import triton

    from crossdock_models.experts.triton.kernels.grouped_swiglu_triton import sum_choices_kernel

    (num_rows, top_k), hidden_size = local_ids.shape, parts.shape[1]
    out = torch.empty(num_rows, hidden_size, dtype=parts.dtype, device=parts.device)
    block = min(1024, triton.next_power_of_2(hidden_size))
    sum_choices_kernel[(num_rows, triton.cdiv(hidden_size, block))](
        parts, local_ids, out, hidden_size, top_k=top_k, block=block, num_warps=4, **early_launch(parts)
    )
    return out


def _described(tensor: torch.Tensor, *tile: int) -> Any:
    """A tensor descriptor that loads tiles of these sizes."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor.from_tensor(tensor, list(tile))
