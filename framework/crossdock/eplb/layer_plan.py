"""Everything that a rank needs to know before a layer's experts move. Pure; made beside the step, because it takes milliseconds."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from crossdock.eplb.slices import Chunk, layer_slices
from crossdock.eplb.switch_groups import switch_groups
from crossdock.move_plan import layer_moves
from crossdock.types.moves import LayerMoves
from crossdock.types.placement import Topology

COPIES_A_TRANSFER = 4
"""On a device a group's copies from spare to live slots may be so many times ``max_step_bytes``: memory is that much faster than a link."""
HOST_COPIES_A_TRANSFER = 2
"""The same where the step thread copies itself: four times took up to 1.5 ms of it (1 MiB, one thread), twice takes up to 1.2."""
HOST_STEP_BYTES = 1 << 22
"""Most bytes that the step thread of a CPU rank copies in a step, whatever ``max_step_bytes`` says: 4 MiB take half a millisecond of one
core, 16 MiB, which GPUs send beside their steps, up to 2.4."""


@attrs.frozen(kw_only=True)
class MoveBudget:
    """What a step can afford, and what the maps can hold."""

    slot_bytes: int
    max_bytes: int
    """That a rank sends, and receives, in a step."""
    max_copy_bytes: int
    """That a rank copies from spare to live slots in a step; at least a slot, and a cycle of slots goes at once."""
    max_replicas: int

    @staticmethod
    def of(*, slot_bytes: int, max_step_bytes: int, max_replicas: int, is_on_host: bool) -> MoveBudget:
        """``max_step_bytes``: as configured. ``is_on_host``: experts lie in memory that the step thread copies."""
        if not is_on_host:
            sent, copied = max_step_bytes, COPIES_A_TRANSFER * max_step_bytes
        else:
            sent, copied = (min(times * max_step_bytes, HOST_STEP_BYTES) for times in (1, HOST_COPIES_A_TRANSFER))
        return MoveBudget(slot_bytes=slot_bytes, max_bytes=sent, max_copy_bytes=copied, max_replicas=max_replicas)


@attrs.frozen(kw_only=True)
class LayerPlan:
    """One layer on one rank."""

    moves: LayerMoves
    """Of all ranks."""
    slices: tuple[tuple[tuple[int, Chunk], ...], ...]
    """This rank's chunks of each slice in which it has any, with their numbers in the slice."""
    wanted: tuple[int, ...]
    """New logical expert of each physical slot."""
    groups: tuple[tuple[int, ...], ...]
    """Physical slots that switch together; equal on all ranks."""
    sources: dict[int, int]
    """Local slot that changes -> spare slot with its new expert."""
    new_experts: dict[int, int]
    """Local slot that changes -> its new logical expert."""

    def experts_of(self, slots: Sequence[int]) -> list[int]:
        """New logical experts of physical slots that change, on whatever rank."""
        return [self.wanted[slot] for slot in slots]


def plan_layer(
    row: int, old: Sequence[int], new: Sequence[int], topology: Topology, budget: MoveBudget, ep_rank: int
) -> LayerPlan:
    """How layer ``row`` goes from slot list ``old`` to ``new``."""
    local = topology.slots_per_gpu
    moves = layer_moves(row, old, new, topology)
    slices = layer_slices(moves, slot_bytes=budget.slot_bytes, max_bytes=budget.max_bytes, slots_per_rank=local)
    own = (
        tuple((tag, chunk) for tag, chunk in enumerate(chunks) if _concerns(chunk, ep_rank, local)) for chunks in slices
    )
    mine = [move for move in moves.moves if move.slot // local == ep_rank]
    return LayerPlan(
        moves=moves,
        wanted=tuple(new),
        slices=tuple(chunks for chunks in own if chunks),
        groups=switch_groups(
            moves,
            old,
            slots_per_rank=local,
            max_slots=max(1, budget.max_copy_bytes // budget.slot_bytes),
            max_replicas=budget.max_replicas,
        ),
        sources={
            move.slot % local: (move.source_slot if move.kind == "free_rider" else move.slot) % local for move in mine
        },
        new_experts={move.slot % local: move.logical_expert for move in mine},
    )


def _concerns(chunk: Chunk, ep_rank: int, local: int) -> bool:
    return ep_rank in (chunk.move.source_rank, chunk.move.slot // local)
