"""Which slot gets its expert from where when a layer goes from one placement to the next. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from crossdock.errors import InvalidPlacement
from crossdock.types.moves import LayerMoves, Move, MoveKind
from crossdock.types.placement import Placement, Topology


def move_plan(old: Placement, new: Placement, topology: Topology) -> tuple[LayerMoves, ...]:
    """The moves of every layer that changes, in layer order.

    Dead GPUs neither send nor receive.

    Raises:
        InvalidPlacement: sizes differ.
    """
    if old.physical_to_logical.shape != new.physical_to_logical.shape:
        raise InvalidPlacement(
            f"no moves between slot maps of shape {list(old.physical_to_logical.shape)} and"
            f" {list(new.physical_to_logical.shape)}"
        )
    changed = (old.physical_to_logical != new.physical_to_logical).any(axis=1)
    plans = (
        layer_moves(
            int(layer), old.physical_to_logical[layer].tolist(), new.physical_to_logical[layer].tolist(), topology
        )
        for layer in changed.nonzero()[0]
    )
    return tuple(plan for plan in plans if plan.moves)


def layer_moves(layer: int, old: Sequence[int], new: Sequence[int], topology: Topology) -> LayerMoves:
    """The moves of one layer from slot list ``old`` to ``new`` (logical experts, one a slot).

    For each slot that changes the first that applies: another slot of the own GPU has the expert; an earlier slot of the own
    GPU receives it; a rank of the own node has it; any rank has it. Where several ranks hold what several ranks need, the
    needing ones are cut into one contiguous run a holder, longer runs first. What no living GPU has comes from the checkpoint.
    """
    slots_a_gpu, gpus_a_node = topology.slots_per_gpu, topology.gpus_per_node
    alive = [True] * topology.num_gpus if topology.active_gpus is None else list(topology.active_gpus)
    first_slot, holders = _held(old, alive, slots_a_gpu)
    sources = {
        expert: _sources(holders.get(expert, []), ranks, gpus_a_node)
        for expert, ranks in _receiving_ranks(new, first_slot, alive, slots_a_gpu).items()
    }
    moves: list[Move] = []
    received: dict[tuple[int, int], int] = {}
    for slot, (before, expert) in enumerate(zip(old, new, strict=True)):
        rank = slot // slots_a_gpu
        if before == expert or not alive[rank]:
            continue
        kind: MoveKind
        # The first kind that applies, with rank and slot to read.
        if (rank, expert) in first_slot:
            kind, source = "same_gpu", (rank, first_slot[rank, expert])
        elif (rank, expert) in received:
            kind, source = "free_rider", (rank, received[rank, expert])
        else:
            received[rank, expert] = slot
            sender = sources[expert].get(rank)
            if sender is None:
                kind, source = "checkpoint", (-1, -1)
            else:
                kind = "same_node" if sender // gpus_a_node == rank // gpus_a_node else "cross_node"
                source = (sender, first_slot[sender, expert])
        moves.append(Move(slot=slot, logical_expert=expert, kind=kind, source_rank=source[0], source_slot=source[1]))
    return LayerMoves(layer=layer, moves=tuple(moves))


def _held(
    slots: Sequence[int], alive: Sequence[bool], slots_a_gpu: int
) -> tuple[dict[tuple[int, int], int], dict[int, list[int]]]:
    """First slot of each (living rank, expert), and the living ranks that hold each expert, in rank order."""
    first_slot: dict[tuple[int, int], int] = {}
    holders: dict[int, list[int]] = {}
    for slot, expert in enumerate(slots):
        rank = slot // slots_a_gpu
        if alive[rank] and (rank, expert) not in first_slot:
            first_slot[rank, expert] = slot
            holders.setdefault(expert, []).append(rank)
    return first_slot, holders


def _receiving_ranks(
    new: Sequence[int], held: dict[tuple[int, int], int], alive: Sequence[bool], slots_a_gpu: int
) -> dict[int, list[int]]:
    """Ranks that need each expert and do not have it, in rank order, each once."""
    needs: dict[int, list[int]] = {}
    for slot, expert in enumerate(new):
        rank = slot // slots_a_gpu
        if alive[rank] and (rank, expert) not in held:
            ranks = needs.setdefault(expert, [])
            if not ranks or ranks[-1] != rank:
                ranks.append(rank)
    return needs


def _sources(holders: Sequence[int], ranks: Sequence[int], gpus_a_node: int) -> dict[int, int]:
    """Sending rank for each receiving rank of an expert; empty when no living rank holds it."""
    if not holders:
        return {}
    by_node: dict[int, list[int]] = {}
    for rank in ranks:
        by_node.setdefault(rank // gpus_a_node, []).append(rank)
    source: dict[int, int] = {}
    abroad: list[int] = []
    for node, members in by_node.items():
        near = [rank for rank in holders if rank // gpus_a_node == node]
        if near:
            source.update(_shared_out(near, members))
        else:
            abroad.extend(members)
    source.update(_shared_out(holders, abroad))
    return source


def _shared_out(holders: Sequence[int], needing: Sequence[int]) -> dict[int, int]:
    """Contiguous runs of ``needing`` for each holder in turn; the first ones get the longer runs."""
    length, longer = divmod(len(needing), len(holders))
    source: dict[int, int] = {}
    start = 0
    for position, holder in enumerate(holders):
        end = start + length + (position < longer)
        source.update(dict.fromkeys(needing[start:end], holder))
        start = end
    return source
