"""``crossdock trace``: what a timeline says."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Literal

import attrs
from cyclopts import App
from rich.console import Console
from rich.table import Table

from crossdock.errors import UsageError
from crossdock.observe.lane_picture import lane_picture
from crossdock.observe.rank_waits import rank_waits
from crossdock.observe.span_shares import SpanShares, span_shares
from crossdock.observe.trace_files import read_trace
from crossdock.types.observer import Span

trace_app = App(name="trace", help="What a timeline says.")


@trace_app.command
def summary(
    *files: Path, format: Literal["text", "json"] = "text", svg: Path | None = None, step: int | None = None
) -> None:
    """Exposed communication, overlap ratio and bubble of each rank; of several ranks also what part of it is waiting for the slower one.

    Parameters
    ----------
    files
        Files of ``/stop_profile`` or of the ``chrome_trace`` observer, one a rank.
    format
        ``json`` for machines.
    svg
        Also draw the lanes into this file.
    step
        Look at this step alone.
    """
    if not files:
        raise UsageError("give at least one trace file: those of /stop_profile or of the chrome_trace observer")
    spans: dict[int, tuple[Span, ...]] = {}
    for file in files:
        for rank, found in read_trace(file).items():
            chosen = (span for span in found if step in (None, span.step))
            # A profile and the observer may have kept the same passes.
            spans[rank] = tuple(dict.fromkeys((*spans.get(rank, ()), *chosen)))
    if not any(spans.values()):
        raise UsageError(
            f"{', '.join(map(str, files))}: no timed operation" + ("" if step is None else f" of step {step}")
        )
    if svg is not None:
        _write(svg, lane_picture(spans))
    shares = {rank: span_shares(found) for rank, found in spans.items()}
    waits = rank_waits(spans) or {}
    if format == "json":
        print(json.dumps([_row(rank, found, waits.get(rank)) for rank, found in shares.items()], indent=2))
        return
    Console().print(_table(shares, waits))
    Console().print(_categories(shares))


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--svg {path}: {error.strerror}; name a file in a folder that exists") from error


def _row(rank: int, shares: SpanShares, rank_wait_us: float | None) -> dict[str, object]:
    numbers = {"overlap_ratio": shares.overlap_ratio, "bubble": shares.bubble, "rank_wait_us": rank_wait_us}
    return {"rank": rank, **attrs.asdict(shares), **numbers}


def _table(shares: dict[int, SpanShares], waits: dict[int, float]) -> Table:
    table = Table("rank", "passes", "wall ms", "in flight ms", "exposed ms", "rank wait ms", "overlap ratio", "bubble")
    for rank, found in shares.items():
        table.add_row(
            str(rank),
            str(found.passes),
            f"{found.wall_us / 1e3:.2f}",
            f"{found.in_flight_us / 1e3:.2f}",
            f"{found.exposed_us / 1e3:.2f}",
            f"{waits[rank] / 1e3:.2f}" if rank in waits else "-",
            f"{found.overlap_ratio:.3f}",
            f"{found.bubble:.3f}",
        )
    return table


def _categories(shares: dict[int, SpanShares]) -> Table:
    """The largest first, by the sum over ranks."""
    totals = Counter[str]()
    for found in shares.values():
        totals.update({name: round(us) for name, us in found.category_us.items()})
    table = Table("ms", *(f"rank {rank}" for rank in shares))
    for category, _ in totals.most_common():
        table.add_row(category, *(f"{found.category_us.get(category, 0.0) / 1e3:.2f}" for found in shares.values()))
    return table
