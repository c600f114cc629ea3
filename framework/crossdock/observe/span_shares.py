"""What spans say about overlap: exposed communication, the share of it that was hidden, and the bubble."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

import attrs

from crossdock.types.observer import Span

SENDS = frozenset({"dispatch", "combine"})
"""Categories of operations that begin a transfer; the next ``wait`` of the layer ends it."""
WAIT = "wait"


@attrs.frozen(kw_only=True)
class SpanShares:
    """Of one rank, over one pass or several."""

    passes: int
    wall_us: float
    """Passes from their first operation to their last."""
    category_us: dict[str, float]
    in_flight_us: float
    """Transfers from the start of their begin to the end of their end, micro-batch by micro-batch."""
    exposed_us: float
    """Part of it in which the rank did nothing else: the operations that begin and finish transfers, with what they pack and unpack."""
    waited_us: float
    """The operations that finish transfers alone."""

    @property
    def overlap_ratio(self) -> float:
        """Share of communication that was hidden behind computation; 0 without communication."""
        return 1.0 - self.exposed_us / self.in_flight_us if self.in_flight_us else 0.0

    @property
    def bubble(self) -> float:
        """Share of the passes that was spent waiting for rows."""
        return self.waited_us / self.wall_us if self.wall_us else 0.0

    def gauges(self) -> dict[str, float]:
        """For ``/metrics``."""
        return {
            "overlap_exposed_seconds": self.exposed_us / 1e6,
            "overlap_hidden_ratio": self.overlap_ratio,
            "overlap_bubble_ratio": self.bubble,
        }


def span_shares(spans: Iterable[Span]) -> SpanShares:
    """The numbers of one rank's spans."""
    spans = tuple(spans)
    passes = pass_ends(spans)
    category_us: defaultdict[str, float] = defaultdict(float)
    for span in spans:
        category_us[span.category] += span.duration_us
    in_flight = exposed = waited = 0.0
    for sent, ended in transfers(spans):
        in_flight += ended.begin_us + ended.duration_us - sent.begin_us
        exposed += sent.duration_us + ended.duration_us
        waited += ended.duration_us
    return SpanShares(
        passes=len(passes),
        wall_us=sum(last - begin for begin, last in passes.values()),
        category_us=dict(category_us),
        in_flight_us=in_flight,
        exposed_us=exposed,
        waited_us=waited,
    )


def pass_ends(spans: Iterable[Span]) -> dict[int, tuple[float, float]]:
    """By step: when the first of one rank's operations begins, and when the last one ends; microseconds."""
    found: dict[int, tuple[float, float]] = {}
    for span in spans:
        end = span.begin_us + span.duration_us
        begin, last = found.get(span.step, (span.begin_us, end))
        found[span.step] = min(begin, span.begin_us), max(last, end)
    return found


def transfers(spans: Iterable[Span]) -> Iterator[tuple[Span, Span]]:
    """The operation that begins each transfer of one rank, and the one that finishes it."""
    lanes: defaultdict[tuple[int, int], list[Span]] = defaultdict(list)
    for span in spans:
        if not span.is_beside:
            lanes[span.step, span.micro_batch].append(span)
    for lane in lanes.values():
        sent: Span | None = None
        for span in sorted(lane, key=lambda span: span.begin_us):
            if span.category in SENDS:
                sent = span
            elif span.category == WAIT and sent is not None:
                yield sent, span
                sent = None
