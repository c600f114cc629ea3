"""A layer's moves cut into slices that a step can afford. Pure: every rank cuts the same."""

from __future__ import annotations

from collections.abc import Iterator

import attrs

from crossdock.types.moves import LayerMoves, Move

MAX_CHUNKS = 32
"""Most chunks of a rank in a slice: one giant batch of transfers has hung communication libraries."""


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
class _Slice:
    chunks: list[Chunk] = attrs.field(factory=list[Chunk])
    bytes_of: dict[tuple[str, int], int] = attrs.field(factory=dict[tuple[str, int], int])
    chunks_of: dict[int, int] = attrs.field(factory=dict[int, int])

    def has_room(self, chunk: Chunk, rank: int, max_bytes: int) -> bool:
        sides = (("out", chunk.move.source_rank), ("in", rank))
        return all(
            self.bytes_of.get(side, 0) + chunk.num_bytes <= max_bytes and self.chunks_of.get(side[1], 0) < MAX_CHUNKS
            for side in sides
        )

    def add(self, chunk: Chunk, rank: int) -> None:
        self.chunks.append(chunk)
        for side in (("out", chunk.move.source_rank), ("in", rank)):
            self.bytes_of[side] = self.bytes_of.get(side, 0) + chunk.num_bytes
        for member in {chunk.move.source_rank, rank}:
            self.chunks_of[member] = self.chunks_of.get(member, 0) + 1


def layer_slices(
    moves: LayerMoves, *, slot_bytes: int, max_bytes: int, slots_per_rank: int
) -> tuple[tuple[Chunk, ...], ...]:
    """Slices in which no rank sends, or receives, more than ``max_bytes`` (a chunk is at least one byte).

    Free riders are in no slice: their tensors arrive with the earlier slot. Moves from the checkpoint are refused by the caller.
    """
    slices: list[_Slice] = []
    for chunk in _chunks(moves, slot_bytes, max_bytes):
        rank = chunk.move.slot // slots_per_rank
        for one in slices:
            if one.has_room(chunk, rank, max_bytes):
                one.add(chunk, rank)
                break
        else:
            slices.append(_Slice())
            slices[-1].add(chunk, rank)
    return tuple(tuple(one.chunks) for one in slices)


def _chunks(moves: LayerMoves, slot_bytes: int, max_bytes: int) -> Iterator[Chunk]:
    for move in moves.moves:
        if move.kind == "free_rider":
            continue
        for begin in range(0, slot_bytes, max_bytes):
            yield Chunk(move=move, begin=begin, end=min(begin + max_bytes, slot_bytes))
