"""Reads tensors of one safetensors file by ordinary file reads, a slice at a time.

The library maps files into memory instead. A mapping counts as the process's memory page by page as it is read, so that a rank that loads
its part would hold it twice; a read leaves nothing behind but the tensor.
"""

from __future__ import annotations

import os
from pathlib import Path

import attrs
import msgspec
import torch
from safetensors import safe_open

from crossdock.errors import CheckpointError

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_LENGTH_BYTES = 8
"""The file begins with the length of its header, little-endian."""


@attrs.frozen(kw_only=True)
class StoredTensor:
    """A tensor as the header tells it."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]
    """Bytes behind the header, half-open."""


class SafetensorsFile:
    """One file, held open. The library checks the header when the file is opened."""

    def __init__(self, path: Path) -> None:
        """
        Raises:
            OSError: the file is missing or cannot be read.
            safetensors.SafetensorError: it is damaged or cut short.
        """
        with safe_open(path, framework="pt"):
            pass
        self._path = path
        with path.open("rb") as file:
            header_bytes = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            header = msgspec.json.decode(file.read(header_bytes), type=dict[str, msgspec.Raw])
            self._descriptor = os.dup(file.fileno())
        self._data_start = _LENGTH_BYTES + header_bytes
        header.pop("__metadata__", None)
        self.tensors = {name: msgspec.json.decode(raw, type=StoredTensor) for name, raw in header.items()}

    def __del__(self) -> None:
        if hasattr(self, "_descriptor"):
            os.close(self._descriptor)

    def read(self, name: str, index: tuple[slice, ...] = ()) -> torch.Tensor:
        """A new tensor. Of a slice of the first dimension only those bytes are read.

        Raises:
            CheckpointError: its type is unknown here, or the file was cut while it was open.
        """
        stored = self.tensors[name]
        dtype = _DTYPES.get(stored.dtype)
        if dtype is None:
            raise CheckpointError(f"{name} is of type {stored.dtype}; known are {', '.join(_DTYPES)}")
        shape, (start, stop) = stored.shape, stored.data_offsets
        if index and shape and shape[0] and index[0].step in (None, 1):
            first, last, _ = index[0].indices(shape[0])
            row_bytes = (stop - start) // shape[0]
            start, stop = start + first * row_bytes, start + max(last, first) * row_bytes
            shape, index = (max(last - first, 0), *shape[1:]), (slice(None), *index[1:])
        data = torch.empty(stop - start, dtype=torch.uint8)
        self._fill(name, data.numpy().data, self._data_start + start)
        tensor = data.view(dtype).view(shape)
        part = tensor[index] if index else tensor
        # A part must not keep the rest in memory.
        return part if part.shape == tensor.shape else part.clone(memory_format=torch.contiguous_format)

    def _fill(self, name: str, buffer: memoryview, offset: int) -> None:
        while buffer:
            count = os.preadv(self._descriptor, [buffer], offset)
            if count == 0:
                raise CheckpointError(f"shard {self._path.name} ended inside {name}: it was cut while it was read")
            buffer, offset = buffer[count:], offset + count
