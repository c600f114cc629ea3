"""A layer's moves cut into slices that a step can afford. Pure: every rank cuts the same."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import attrs

from crossdock.types.moves import LayerMoves, Move

MAX_CHUNKS = 32
"""Most chunks that a rank sends, or receives, in a slice: one giant batch of transfers has hung communication libraries."""


@attrs.frozen(kw_only=True)
class Chunk:
    """Bytes ``begin`` to ``end - 1`` of a slot's tensors, laid end to end."""

    move: Move
    begin: int
    end: int

    @property
    def num_bytes(self) -> int:
        return self.end - self.begin


@attrs.define
class _Side:
    """What a rank sends, or what it receives, in each slice so far."""

    bytes_in: list[int] = attrs.field(factory=list[int])
    chunks_in: list[int] = attrs.field(factory=list[int])
    first_open: int = 0

    def has_room(self, index: int, num_bytes: int, max_bytes: int) -> bool:
        if index >= len(self.bytes_in):
            return True
        return self.bytes_in[index] + num_bytes <= max_bytes and self.chunks_in[index] < MAX_CHUNKS

    def add(self, index: int, num_bytes: int, max_bytes: int) -> None:
        missing = index + 1 - len(self.bytes_in)
        self.bytes_in += [0] * missing
        self.chunks_in += [0] * missing
        self.bytes_in[index] += num_bytes
        self.chunks_in[index] += 1
        while self.first_open < len(self.bytes_in) and not self.has_room(self.first_open, num_bytes, max_bytes):
            self.first_open += 1


def layer_slices(
    moves: LayerMoves, *, slot_bytes: int, max_bytes: int, slots_per_rank: int
) -> tuple[tuple[Chunk, ...], ...]:
    """Slices in which no rank sends, or receives, more than ``max_bytes``.

    Free riders are in no slice: their tensors arrive with the earlier slot.
    """
    slices: list[list[Chunk]] = []
    sides: dict[tuple[str, int], _Side] = {}
    for chunk in _chunks(moves, slot_bytes, max_bytes):
        out = sides.setdefault(("out", chunk.move.source_rank), _Side())
        into = sides.setdefault(("in", chunk.move.slot // slots_per_rank), _Side())
        index, size = max(out.first_open, into.first_open), chunk.num_bytes
        while not (out.has_room(index, size, max_bytes) and into.has_room(index, size, max_bytes)):
            index += 1
        out.add(index, size, max_bytes)
        into.add(index, size, max_bytes)
        slices += [[] for _ in range(index + 1 - len(slices))]
        slices[index].append(chunk)
    return tuple(tuple(chunks) for chunks in slices)


def _chunks(moves: LayerMoves, slot_bytes: int, max_bytes: int) -> Iterator[Chunk]:
    """Every moved slot in parts of nearly equal size."""
    parts = -(-slot_bytes // max_bytes)
    bounds = [slot_bytes * part // parts for part in range(parts + 1)]
    for move in moves.moves:
        if move.kind != "free_rider":
            for begin, end in itertools.pairwise(bounds):
                yield Chunk(move=move, begin=begin, end=end)
