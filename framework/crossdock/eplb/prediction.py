"""What a plan wins and what it costs, in seconds. Pure host numbers."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from crossdock.move_plan import move_plan
from crossdock.placement import Floats, balancedness, gpu_loads
from crossdock.types.moves import LayerMoves
from crossdock.types.placement import Placement, Topology


@attrs.frozen(kw_only=True)
class Rates:
    """What a second buys; measured where something was measured, else configured."""

    step_s: float
    """Duration of a step."""
    expert_share: float
    """Part of a step that experts of the fullest rank take."""
    link_bytes_per_s: float
    """Between two ranks."""
    copy_bytes_per_s: float
    """From spare to live slots, while the step waits."""


@attrs.frozen(kw_only=True, eq=False)
class Forecast:
    """A finished plan, judged on the load that it was made for."""

    moves: tuple[LayerMoves, ...]
    balancedness_before: float
    balancedness_after: float
    """Mean over layers, predicted with an even split over replicas."""
    gain_s: float
    """Step time saved until the next decision."""
    price_s: float
    """Transfer time of the busiest rank, plus the stall of the switches."""
    moved_slots: int
    moved_bytes: int
    """Over links, all ranks together."""


def forecast(
    current: Placement,
    new: Placement,
    load: Floats,
    topology: Topology,
    *,
    slot_bytes: int,
    passes_to_next: int,
    rates: Rates,
) -> Forecast:
    """Gain and price of going from ``current`` to ``new`` under ``load`` [L, E]."""
    moves = move_plan(current, new, topology)
    before, after = (gpu_loads(one, load, topology).max(axis=1).sum() for one in (current, new))
    saved = 1.0 - float(after) / float(before) if before > 0 else 0.0
    links, copies = _bytes_of_busiest(moves, slot_bytes, topology)
    return Forecast(
        moves=moves,
        balancedness_before=float(balancedness(current, load, topology).mean()),
        balancedness_after=float(balancedness(new, load, topology).mean()),
        gain_s=saved * rates.expert_share * rates.step_s * passes_to_next,
        price_s=links / rates.link_bytes_per_s + copies / rates.copy_bytes_per_s,
        moved_slots=sum(len(layer.moves) for layer in moves),
        moved_bytes=slot_bytes * sum(_is_remote(move.kind) for layer in moves for move in layer.moves),
    )


def _bytes_of_busiest(moves: Sequence[LayerMoves], slot_bytes: int, topology: Topology) -> tuple[int, int]:
    """Most bytes that a rank sends or receives, and most that it copies from spare to live slots."""
    out, into, copied = ([0] * topology.num_gpus for _ in range(3))
    for layer in moves:
        for move in layer.moves:
            rank = move.slot // topology.slots_per_gpu
            copied[rank] += slot_bytes
            if _is_remote(move.kind):
                into[rank] += slot_bytes
                out[move.source_rank] += slot_bytes
    return max(*out, *into), max(copied)


def _is_remote(kind: str) -> bool:
    return kind in ("same_node", "cross_node")
