"""The chrome_trace observer appends what it is told; the file is a trace at any moment."""

from __future__ import annotations

import json
from pathlib import Path

import attrs
import pytest
from crossdock.errors import ConfigValueError
from crossdock.observe.observers import make_observer
from crossdock.observe.trace_files import read_trace
from crossdock.types.observer import Observer, ObserverSpec, Span, StepEvent

SPAN = Span(step=7, micro_batch=1, layer=2, name="experts", category="experts", begin_us=5.0, duration_us=3.0)
STEP = StepEvent(
    rank=1,
    attn_dp_rank=1,
    step=7,
    forward_mode="decode",
    padding_mode="max_len",
    dispatch_mode="normal",
    graph=False,
    overlap=True,
    local_tokens=2,
    all_tokens=(6, 2),
    attention_pairs=(30, 10),
    sync_wait_s=0.5,
    duration_s=1.0,
    is_health_check=False,
    spans=(SPAN,),
)


def observer(options: dict[str, object], folder: Path | None) -> Observer | None:
    spec = ObserverSpec(rank=1, attn_dp_rank=1, num_ranks=2, output_folder=None if folder is None else str(folder))
    return make_observer("chrome_trace", options, spec)


def events(folder: Path) -> list[dict[str, object]]:
    text = (folder / "crossdock_rank1.trace.json").read_text()
    found: list[dict[str, object]] = json.loads(text.rstrip().rstrip(",") + "]")
    return found


def test_steps_operations_and_marks_are_events_as_soon_as_they_are_told(tmp_path: Path) -> None:
    watching = observer({"folder": str(tmp_path)}, None)
    assert watching is not None
    watching.on_step(STEP)
    watching.on_load("decode", (1.0, 0.5))
    watching.on_rebalance({"outcome": "applied"})
    watching.on_fault(0, "gone")
    by_name = {event["name"]: event for event in events(tmp_path)}
    assert {"decode", "experts", "balancedness decode", "rebalance", "fault"} <= set(by_name)
    assert by_name["decode"]["dur"] == 1e6
    assert by_name["experts"]["tid"] == 1
    assert read_trace(tmp_path / "crossdock_rank1.trace.json") == {1: (SPAN,)}


def test_steps_that_overlap_lie_in_different_lanes(tmp_path: Path) -> None:
    """At depth 1 a step begins before the one before it has ended; viewers take events of a thread only one after another."""
    watching = observer({"folder": str(tmp_path)}, None)
    assert watching is not None
    for step in range(4):
        watching.on_step(attrs.evolve(STEP, step=step, spans=(), duration_s=60.0))
    steps = [event for event in events(tmp_path) if event.get("cat") == "step"]
    assert len({event["tid"] for event in steps[:2]}) == 2
    assert [event["tid"] for event in steps[:2]] == [event["tid"] for event in steps[2:]]
    named = {event["tid"] for event in events(tmp_path) if event["ph"] == "M" and "tid" in event}
    assert {event["tid"] for event in steps} <= named


def test_the_file_ends_at_its_limit(tmp_path: Path) -> None:
    watching = observer({"most_events": 6}, tmp_path)
    assert watching is not None
    for _ in range(10):
        watching.on_step(STEP)
    assert len(events(tmp_path)) == 6


def test_without_a_folder_nothing_is_observed() -> None:
    assert observer({}, None) is None


def test_a_wrong_option_is_named() -> None:
    with pytest.raises(ConfigValueError, match="most_events"):
        observer({"most_events": 0}, None)
