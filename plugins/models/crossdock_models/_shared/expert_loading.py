"""Fills a rank's expert slots from a checkpoint, expert by expert."""

from __future__ import annotations

import torch
from crossdock.errors import CheckpointError
from crossdock.host_memory import advise_huge_pages
from crossdock.types.experts import ExpertTensors
from crossdock.types.model import MoeSpec

from crossdock_models._shared.shards import FP8_BLOCK, Shard
from crossdock_models._shared.weights import WeightReader


def load_experts(
    reader: WeightReader, *, layer: int, prefix: str, moe: MoeSpec, logical_experts: list[int], part: Shard
) -> ExpertTensors:
    """Tensors of one layer's local slots. Each slot is read straight into its place: no second copy of a layer exists at any time.

    Args:
        reader: the checkpoint.
        layer: model layer number.
        prefix: of the experts' names, for instance ``model.layers.3.mlp.experts``.
        moe: sizes and whether the experts are fp8 blocks.
        logical_experts: what each local slot holds.
        part: this rank's part of the intermediate size.

    Raises:
        CheckpointError: the config says fp8 and the checkpoint holds another dtype.
    """
    slots, hidden, inner = len(logical_experts), moe.hidden_size, part.size
    is_fp8 = moe.weight_dtype == "fp8_block"
    dtype = torch.float8_e4m3fn if is_fp8 else reader.dtype
    gate_up = _empty((slots, 2 * inner, hidden), dtype, reader.device)
    down = _empty((slots, hidden, inner), dtype, reader.device)
    tensors = {"gate_up": gate_up, "down": down}
    if is_fp8:
        in_blocks, out_blocks = -(-inner // FP8_BLOCK), -(-hidden // FP8_BLOCK)
        tensors["gate_up_scale"] = torch.empty(slots, 2 * in_blocks, out_blocks, device=reader.device)
        tensors["down_scale"] = torch.empty(slots, out_blocks, in_blocks, device=reader.device)
    for slot, expert in enumerate(logical_experts):
        names = [f"{prefix}.{expert}.{projection}_proj" for projection in ("gate", "up", "down")]
        targets = [gate_up[slot, :inner], gate_up[slot, inner:], down[slot]]
        for i, (name, target) in enumerate(zip(names, targets, strict=True)):
            rows, cols = (part, None) if i < 2 else (None, part)
            if not is_fp8:
                target.copy_(reader.matrix(name, rows=rows, cols=cols))
                continue
            _copy_blocks(reader, name, rows, cols, target, _scale_target(tensors, slot, i))
    return ExpertTensors(layer=layer, tensors=tensors)


def _empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Unwritten memory, on huge pages where the host has them."""
    tensor = torch.empty(shape, dtype=dtype, device=device)
    if device.type == "cpu":
        advise_huge_pages(tensor.data_ptr(), tensor.numel() * tensor.element_size())
    return tensor


def _scale_target(tensors: dict[str, torch.Tensor], slot: int, projection: int) -> torch.Tensor:
    if projection == 2:
        return tensors["down_scale"][slot]
    return tensors["gate_up_scale"][slot].chunk(2)[projection]


def _copy_blocks(
    reader: WeightReader, prefix: str, rows: Shard | None, cols: Shard | None, target: torch.Tensor, scale: torch.Tensor
) -> None:
    """Stored float8 values and their scales, as they are. Parts begin on a block: the config was checked for that."""
    name = f"{prefix}.weight"
    if not reader.is_fp8(name):
        raise CheckpointError(
            f"{name} is stored as {reader.checkpoint.dtype_name(name)}, but quantization_config says fp8; list the module in modules_to_not_convert"
        )
    index = tuple(slice(None) if part is None else part.range for part in (rows, cols))
    blocks = tuple(
        slice(None) if part is None else slice(part.start // FP8_BLOCK, -(-part.stop // FP8_BLOCK))
        for part in (rows, cols)
    )
    target.view(torch.uint8).copy_(reader.checkpoint.read(name, index).view(torch.uint8))
    scale.copy_(reader.checkpoint.read(f"{name}_scale_inv", blocks))
