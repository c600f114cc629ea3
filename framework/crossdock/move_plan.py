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
    slots_a_gpu = topology.slots_per_gpu
    alive = [True] * topology.num_gpus if topology.active_gpus is None else list(topology.active_gpus)
    first_slot: dict[tuple[int, int], int] = {}
    for slot, expert in enumerate(old):
        if alive[slot // slots_a_gpu]:
            first_slot.setdefault((slot // slots_a_gpu, expert), slot)
    needs = _receiving_ranks(new, first_slot, alive, slots_a_gpu)
    sources = {expert: _sources(expert, ranks, first_slot, topology) for expert, ranks in needs.items()}

    moves: list[Move] = []
    received: dict[tuple[int, int], int] = {}
    for slot, (before, expert) in enumerate(zip(old, new, strict=True)):
        rank = slot // slots_a_gpu
        if before == expert or not alive[rank]:
            continue
        kind, source = _kind_and_source(rank, expert, first_slot, received, sources, topology)
        if kind in ("same_node", "cross_node", "checkpoint"):
            received[rank, expert] = slot
        moves.append(Move(slot=slot, logical_expert=expert, kind=kind, source_rank=source[0], source_slot=source[1]))
    return LayerMoves(layer=layer, moves=tuple(moves))


def _kind_and_source(
    rank: int,
    expert: int,
    held: dict[tuple[int, int], int],
    received: dict[tuple[int, int], int],
    sources: dict[int, dict[int, int]],
    topology: Topology,
) -> tuple[MoveKind, tuple[int, int]]:
    """The first kind that applies, with rank and slot to read."""
    if (rank, expert) in held:
        return "same_gpu", (rank, held[rank, expert])
    if (rank, expert) in received:
        return "free_rider", (rank, received[rank, expert])
    if rank not in sources[expert]:
        return "checkpoint", (-1, -1)
    source = sources[expert][rank]
    same_node = source // topology.gpus_per_node == rank // topology.gpus_per_node
    return "same_node" if same_node else "cross_node", (source, held[source, expert])


def _receiving_ranks(
    new: Sequence[int], held: dict[tuple[int, int], int], alive: Sequence[bool], slots_a_gpu: int
) -> dict[int, list[int]]:
    """Ranks that need each expert and do not have it, in rank order, each once."""
    needs: dict[int, list[int]] = {}
    for slot, expert in enumerate(new):
        rank = slot // slots_a_gpu
        ranks = needs.setdefault(expert, [])
        if alive[rank] and (rank, expert) not in held and (not ranks or ranks[-1] != rank):
            ranks.append(rank)
    return {expert: ranks for expert, ranks in needs.items() if ranks}


def _sources(expert: int, ranks: Sequence[int], held: dict[tuple[int, int], int], topology: Topology) -> dict[int, int]:
    """Sending rank for each receiving rank of an expert; empty when no living rank holds it."""
    holders = [rank for rank in range(topology.num_gpus) if (rank, expert) in held]
    if not holders:
        return {}
    by_node: dict[int, list[int]] = {}
    for rank in ranks:
        by_node.setdefault(rank // topology.gpus_per_node, []).append(rank)
    source: dict[int, int] = {}
    abroad: list[int] = []
    for node, members in by_node.items():
        near = [rank for rank in holders if rank // topology.gpus_per_node == node]
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
