"""Reads slices of a checkpoint in the compute dtype, fp8 blocks included."""

from __future__ import annotations

import attrs
import torch
from crossdock.errors import CheckpointError
from crossdock.ops.fp8_block import dequantise_blocks, num_blocks
from crossdock.types.model import Checkpoint

from crossdock_models._shared.shards import FP8_BLOCK, Shard


@attrs.frozen(kw_only=True, eq=False)
class WeightReader:
    """This rank's slices of a checkpoint. Every tensor it returns owns its memory: nothing stays mapped to the file."""

    checkpoint: Checkpoint
    dtype: torch.dtype
    device: torch.device

    def matrix(self, prefix: str, *, rows: Shard | None = None, cols: Shard | None = None) -> torch.Tensor:
        """``<prefix>.weight`` or a part of it, [rows, cols]; block-quantised ones are dequantised."""
        name = f"{prefix}.weight"
        height, width = self.checkpoint.shape(name)
        rows, cols = rows or Shard(0, height), cols or Shard(0, width)
        stored = self.checkpoint.read(name, (rows.range, cols.range))
        if not self.is_fp8(name):
            return stored.to(device=self.device, dtype=self.dtype, copy=True)
        scale = self.checkpoint.read(f"{name}_scale_inv", (_blocks(rows), _blocks(cols)))
        return dequantise_blocks(stored, scale, self.dtype, rows.start % FP8_BLOCK, cols.start % FP8_BLOCK).to(
            self.device
        )

    def vector(self, name: str, part: Shard | None = None) -> torch.Tensor:
        """A vector, or a part of it, in the compute dtype."""
        stored = self.checkpoint.read(name, () if part is None else (part.range,))
        return stored.to(device=self.device, dtype=self.dtype, copy=True)

    def float_vector(self, name: str) -> torch.Tensor:
        """A vector in float32 whatever the compute dtype: correction biases."""
        return self.checkpoint.read(name).to(device=self.device, dtype=torch.float32, copy=True)

    def is_fp8(self, name: str) -> bool:
        """Whether a tensor is stored as float8 blocks.

        Raises:
            CheckpointError: it is stored in a dtype that is not read.
        """
        stored = self.checkpoint.dtype_name(name)
        if stored not in ("F32", "F16", "BF16", "F8_E4M3"):
            raise CheckpointError(
                f"{name} is stored as {stored}; F32, F16, BF16 and F8_E4M3 with block scales can be read"
            )
        return stored == "F8_E4M3"


def _blocks(part: Shard) -> slice:
    """Blocks that a range of rows or columns touches."""
    return slice(part.start // FP8_BLOCK, max(num_blocks(part.stop), part.start // FP8_BLOCK))
