"""What part of a rank's exposed communication is waiting for a slower rank: seen only in the spans of all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from crossdock.observe.span_shares import pass_ends, transfers
from crossdock.types.observer import Span


def rank_waits(spans: Mapping[int, Sequence[Span]]) -> dict[int, float] | None:
    """Microseconds by rank that it stood in a transfer before the last rank had come to it: no strategy hides them.

    A transfer is the same on all ranks by step, layer, micro-batch and direction. What a rank spends in the operations that begin and finish it
    counts up to the moment at which the last rank begins it; the rest of its exposed time is the transfer itself.

    Args:
        spans: of every rank that is to be compared, with the host clock of one machine.

    Returns:
        None for fewer than two ranks, and where their clocks do not agree: passes of one step lie apart.
    """
    if len(spans) < 2 or not _is_one_clock(spans):
        return None
    found = {rank: {_name(sent): (sent, ended) for sent, ended in transfers(own)} for rank, own in spans.items()}
    last: dict[tuple[object, ...], float] = {}
    for own in found.values():
        for name, (sent, _) in own.items():
            last[name] = max(last.get(name, sent.begin_us), sent.begin_us)
    return {
        rank: sum(_before(last[name], part) for name, transfer in own.items() for part in transfer)
        for rank, own in found.items()
    }


def _name(sent: Span) -> tuple[object, ...]:
    return sent.step, sent.layer, sent.micro_batch, sent.category


def _before(moment_us: float, span: Span) -> float:
    return min(max(moment_us - span.begin_us, 0.0), span.duration_us)


def _is_one_clock(spans: Mapping[int, Sequence[Span]]) -> bool:
    """Passes of a step overlap in time on all ranks that have it."""
    passes: dict[int, list[tuple[float, float]]] = {}
    for own in spans.values():
        for step, (begin, end) in pass_ends(own).items():
            passes.setdefault(step, []).append((begin, end))
    return all(max(begin for begin, _ in found) <= min(end for _, end in found) for found in passes.values())
