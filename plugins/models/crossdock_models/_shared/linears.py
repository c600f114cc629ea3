"""Projections of a rank: several matrices of a checkpoint in one product, in float8 where checkpoint and device have it."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from typing import TypeAlias

import attrs
import torch
from crossdock.ops.fp8_linear import Fp8Linear
from crossdock.ops.packed_linear import PackedLinear

from crossdock_models._shared.shards import FP8_BLOCK, Shard
from crossdock_models._shared.weights import WeightReader

Linear: TypeAlias = PackedLinear | Fp8Linear
"""``[n, in] -> [n, out]``."""


@attrs.frozen(kw_only=True, eq=False)
class LinearPart:
    """This rank's part of one matrix of the checkpoint."""

    prefix: str
    rows: Shard | None = None
    cols: Shard | None = None
    reorder: Callable[[torch.Tensor], torch.Tensor] | None = None
    """[rows, ...] -> the same rows in another order."""


def load_linear(reader: WeightReader, parts: Sequence[LinearPart], bias: torch.Tensor | None = None) -> Linear:
    """Rows of the parts, one below the other, as one product.

    Block-quantised parts stay float8 on a GPU when their blocks stay whole; else they are dequantised.
    """
    if reader.device.type == "cuda" and reader.dtype is torch.bfloat16 and importlib.util.find_spec("triton"):
        blocks = stacked_blocks(reader, parts)
        if blocks is not None:
            return Fp8Linear(*blocks, bias)
    weights = [reader.matrix(part.prefix, rows=part.rows, cols=part.cols) for part in parts]
    ordered = [
        weight if part.reorder is None else part.reorder(weight) for weight, part in zip(weights, parts, strict=True)
    ]
    return PackedLinear(ordered[0] if len(ordered) == 1 else torch.cat(ordered), bias)


def stacked_blocks(reader: WeightReader, parts: Sequence[LinearPart]) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The parts as they are stored: [rows, cols] float8_e4m3fn and [row blocks, col blocks] float32, one below the other.

    None when a part is not stored so, begins inside a block, ends inside one before the last part, or is reordered across blocks.
    """
    if not all(_has_whole_blocks(reader, part, is_last=part is parts[-1]) for part in parts):
        return None
    weights = [_stored(reader, part) for part in parts]
    scales = [
        reader.checkpoint.read(
            f"{part.prefix}.weight_scale_inv", tuple(_blocks(range_) for range_ in _ranges(reader, part))
        )
        for part in parts
    ]
    weight = torch.cat([weight.to(reader.device) for weight in weights]).view(torch.float8_e4m3fn)
    return weight, torch.cat([scale.to(device=reader.device, dtype=torch.float32) for scale in scales])


def _ranges(reader: WeightReader, part: LinearPart) -> tuple[Shard, Shard]:
    height, width = reader.checkpoint.shape(f"{part.prefix}.weight")
    return part.rows or Shard(0, height), part.cols or Shard(0, width)


def _has_whole_blocks(reader: WeightReader, part: LinearPart, *, is_last: bool) -> bool:
    if not reader.is_fp8(f"{part.prefix}.weight"):
        return False
    rows, cols = _ranges(reader, part)
    begins = rows.start % FP8_BLOCK == 0 and cols.start % FP8_BLOCK == 0
    ends = cols.size % FP8_BLOCK == 0 and (is_last or rows.size % FP8_BLOCK == 0)
    return begins and ends and _keeps_blocks(part, rows.size)


def _keeps_blocks(part: LinearPart, num_rows: int) -> bool:
    """Whether the new order moves rows inside their blocks only."""
    if part.reorder is None:
        return True
    block = torch.arange(num_rows)[:, None] // FP8_BLOCK
    return torch.equal(part.reorder(block), block)


def _stored(reader: WeightReader, part: LinearPart) -> torch.Tensor:
    """Stored bytes in the part's order; operators know them better than float8."""
    rows, cols = _ranges(reader, part)
    stored = reader.checkpoint.read(f"{part.prefix}.weight", (rows.range, cols.range)).view(torch.uint8)
    return stored if part.reorder is None else part.reorder(stored)


def _blocks(part: Shard) -> slice:
    return slice(part.start // FP8_BLOCK, -(-part.stop // FP8_BLOCK))
