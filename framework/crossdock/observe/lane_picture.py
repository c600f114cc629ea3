"""Spans as a picture: a lane for each rank, micro-batch and stream, time from left to right. SVG, no library, opens in a browser."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from xml.sax.saxutils import escape

from crossdock.types.observer import Span

COLOURS = {
    "attention": "#4c78a8",
    "boundary": "#b0b7c3",
    "route": "#8e6bbf",
    "dispatch": "#f2a541",
    "experts": "#3f9b5f",
    "combine": "#e07b39",
    "wait": "#c8403a",
    "dense": "#7fb8a4",
    "other": "#d8d8d8",
}
WIDTH, LEFT, LANE, GAP, TOP = 1250, 200, 22, 6, 34


def lane_picture(spans: Mapping[int, Sequence[Span]]) -> str:
    """The SVG text of spans by rank; an empty picture for none."""
    lanes = sorted({(rank, span.micro_batch, span.is_beside) for rank, found in spans.items() for span in found})
    every = [span for found in spans.values() for span in found]
    first = min((span.begin_us for span in every), default=0.0)
    last = max((span.begin_us + span.duration_us for span in every), default=first + 1.0)
    scale = (WIDTH - LEFT) / max(last - first, 1e-9)
    height = TOP + len(lanes) * (LANE + GAP) + GAP
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        *_legend(),
    ]
    for place, (rank, micro_batch, is_beside) in enumerate(lanes):
        top = TOP + place * (LANE + GAP)
        name = f"rank {rank}, micro-batch {micro_batch}" + ", beside" * is_beside
        parts.append(f'<text x="4" y="{top + 15}">{name}</text>')
        for span in spans[rank]:
            if (span.micro_batch, span.is_beside) == (micro_batch, is_beside):
                parts.append(_box(span, LEFT + (span.begin_us - first) * scale, span.duration_us * scale, top))
    return "\n".join([*parts, "</svg>\n"])


def _legend() -> list[str]:
    parts: list[str] = []
    for place, (category, colour) in enumerate(COLOURS.items()):
        left = LEFT + place * 110
        parts.append(f'<rect x="{left}" y="8" width="12" height="12" fill="{colour}"/>')
        parts.append(f'<text x="{left + 16}" y="18">{category}</text>')
    return parts


def _box(span: Span, left: float, width: float, top: int) -> str:
    title = escape(f"{span.name}, layer {span.layer}, step {span.step}: {span.duration_us:.0f} us")
    colour = COLOURS.get(span.category, COLOURS["other"])
    return (
        f'<rect x="{left:.2f}" y="{top}" width="{max(width, 0.2):.2f}" height="{LANE}" fill="{colour}">'
        f"<title>{title}</title></rect>"
    )
