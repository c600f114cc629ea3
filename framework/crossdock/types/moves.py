"""What has to be copied to get from one placement to the next (the facts, section 8.8)."""

from __future__ import annotations

from typing import Final, Literal

import attrs

MoveKind = Literal["same_gpu", "free_rider", "same_node", "cross_node", "checkpoint"]
MOVE_KINDS: Final[tuple[MoveKind, ...]] = ("same_gpu", "free_rider", "same_node", "cross_node", "checkpoint")


@attrs.frozen(kw_only=True)
class Move:
    """New content of one slot of one layer. Slots that keep their expert have no move."""

    slot: int
    """Physical slot that gets the expert."""
    logical_expert: int
    kind: MoveKind
    """``same_gpu``: from another slot of the own GPU; ``free_rider``: the GPU receives the expert for an earlier slot anyway;
    ``same_node`` and ``cross_node``: received from another rank; ``checkpoint``: no living GPU has it."""
    source_rank: int
    """EP rank that sends; the own rank for ``same_gpu`` and ``free_rider``, -1 for ``checkpoint``."""
    source_slot: int
    """Slot to read: in the old placement, but for a ``free_rider`` the earlier slot that receives the expert, and -1 for
    ``checkpoint``."""


@attrs.frozen(kw_only=True)
class LayerMoves:
    """All moves of one layer, in slot order. Every rank derives the same list, so nothing is negotiated."""

    layer: int
    moves: tuple[Move, ...]

    def bytes_by_kind(self, expert_bytes: int) -> dict[MoveKind, int]:
        """Bytes to copy or send, for tensors of ``expert_bytes`` a replica."""
        total = dict.fromkeys(MOVE_KINDS, 0)
        for move in self.moves:
            total[move.kind] += expert_bytes
        return total
