"""Embedding and head, sharded over attention TP only: no collective crosses replicas outside the MoE."""

from __future__ import annotations

import torch
from crossdock.ops.packed_linear import PackedLinear
from crossdock.rows import Rows
from crossdock.types.comm import Comms
from crossdock.types.layout import ATTN_ROWS, SumAxis
from torch.nn import functional

from crossdock_models._shared.shards import Shard, balanced_shard


class Embedding:
    """Rows of the vocabulary that this rank holds; other ids give zero, so that the sum over attention TP is the embedding."""

    def __init__(self, weight: torch.Tensor, part: Shard, comms: Comms) -> None:
        """``weight`` [part, H]."""
        self._weight = weight
        self._part = part
        self._comms = comms

    def __call__(self, input_ids: torch.Tensor) -> Rows:
        """[N] int64 -> [N, H], the replica's rows, owing the sum over attention TP."""
        if self._comms.attn_tp.size == 1:
            rows = functional.embedding(input_ids, self._weight)
        else:
            elsewhere = (input_ids < self._part.start) | (input_ids >= self._part.stop)
            local = (input_ids - self._part.start).masked_fill_(elsewhere, 0)
            rows = functional.embedding(local, self._weight).masked_fill_(elsewhere.unsqueeze(1), 0)
        return Rows(rows, ATTN_ROWS, frozenset({SumAxis.ATTN_TP}), self._comms)


class Head:
    """Logits over the whole vocabulary from this rank's rows of it."""

    def __init__(self, weight: torch.Tensor, vocab_size: int, comms: Comms) -> None:
        """``weight`` [rows, H]: this rank's part, padded with zero rows to the same height on all ranks."""
        self._linear = PackedLinear(weight)
        self._vocab_size = vocab_size
        self._comms = comms

    def __call__(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[R, H] -> [R, vocab] float32. Ranks of a replica want the same rows, so zero rows are zero on all of them."""
        logits = self._linear.in_float32(hidden_states)
        group = self._comms.attn_tp
        if group.size == 1:
            return logits
        gathered = group.all_gather(logits).unflatten(0, (group.size, -1))
        parts = [gathered[rank, :, : vocab_part(self._vocab_size, group.size, rank).size] for rank in range(group.size)]
        return torch.cat(parts, dim=1)


def vocab_part(vocab_size: int, parts: int, index: int) -> Shard:
    """Ids of a rank; any vocabulary can be split."""
    return balanced_shard(vocab_size, parts, index)


def padded_head_rows(weight: torch.Tensor, vocab_size: int, parts: int) -> torch.Tensor:
    """Zero rows below a rank's part, up to the tallest part: the gather wants equal blocks."""
    tallest = -(-vocab_size // parts)
    return functional.pad(weight, (0, 0, 0, tallest - weight.shape[0]))
