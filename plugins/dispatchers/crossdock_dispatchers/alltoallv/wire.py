"""What travels: one byte row a (token, rank) pair with the hidden row, the local expert ids and their weights."""

from __future__ import annotations

import attrs
import torch

_ID_BYTES = 4
_WEIGHT_BYTES = 4
_ROW_ALIGNMENT = 16
"""Rows start at multiples of this, so that any dtype can look at the buffer and copies are vectorised."""


@attrs.frozen(kw_only=True)
class WireFormat:
    """Where the parts of a row lie. One buffer means one collective a direction, which is what small messages pay for."""

    hidden_size: int
    top_k: int
    dtype: torch.dtype

    @property
    def hidden_bytes(self) -> int:
        return self.hidden_size * self.dtype.itemsize

    @property
    def ids_start(self) -> int:
        return -(-self.hidden_bytes // _ID_BYTES) * _ID_BYTES

    @property
    def row_bytes(self) -> int:
        used = self.ids_start + self.top_k * (_ID_BYTES + _WEIGHT_BYTES)
        return -(-used // _ROW_ALIGNMENT) * _ROW_ALIGNMENT

    def pack(self, hidden_states: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """[m, H] in ``dtype``, [m, K] ids and weights -> [m, row_bytes] uint8, a fresh buffer."""
        buffer = torch.empty((hidden_states.shape[0], self.row_bytes), dtype=torch.uint8, device=hidden_states.device)
        hidden, wire_ids, wire_weights = self.views(buffer)
        hidden.copy_(hidden_states)
        wire_ids.copy_(ids)
        wire_weights.copy_(weights)
        return buffer

    def views(self, buffer: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The parts of [m, row_bytes] uint8 without a copy: [m, H] in ``dtype``, [m, K] int32, [m, K] float32; rows are strided."""
        first_id = self.ids_start // _ID_BYTES
        words = buffer.view(torch.int32)
        hidden = buffer.view(self.dtype)[:, : self.hidden_size]
        ids = words[:, first_id : first_id + self.top_k]
        weights = words[:, first_id + self.top_k : first_id + 2 * self.top_k].view(torch.float32)
        return hidden, ids, weights
