"""Moments of operations become spans, and spans the numbers of overlap."""

from __future__ import annotations

import itertools
import json
import random
import time
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

import attrs
import pytest
import torch
from crossdock.errors import LoadFileError
from crossdock.observe.lane_picture import lane_picture
from crossdock.observe.span_shares import span_shares
from crossdock.observe.timeline import CATEGORIES, SAMPLE_EVERY, Timeline, clock_of
from crossdock.observe.trace_files import read_trace, span_event, write_trace
from crossdock.types.model import Op, OpKind
from crossdock.types.observer import Span


class CountingClock:
    """Each mark is ten microseconds after the last."""

    def __init__(self) -> None:
        self.marks = 0

    def mark(self) -> int:
        self.marks += 1
        return self.marks

    def read_us(self, marks: Sequence[int]) -> list[float]:
        return [10.0 * mark for mark in marks]


def op(kind: OpKind, layer: int = 0) -> Op:
    return Op(name=kind.value, kind=kind, layer=layer, fn=lambda context: None)


def run_pass(timeline: Timeline, step: int, kinds: Sequence[OpKind]) -> None:
    marks = timeline.begin_pass(step)
    if marks is not None:
        marks.begin()
        for kind in kinds:
            marks.op_ended(0, op(kind))
    timeline.pass_launched()
    timeline.end_pass()


KINDS = (OpKind.ATTN_CORE, OpKind.DISPATCH_BEGIN, OpKind.SHARED, OpKind.DISPATCH_END)


def test_one_pass_in_so_many_is_timed_without_a_profile() -> None:
    clock = CountingClock()
    timeline = Timeline(rank=0, clock=clock)
    timed = []
    for step in range(2 * SAMPLE_EVERY):
        run_pass(timeline, step, KINDS)
        if timeline.last_spans:
            timed.append(step)
    assert timed == [0, SAMPLE_EVERY]
    assert clock.marks == 2 * (1 + len(KINDS)), "the other passes cost no mark"


def test_an_operation_lasts_from_the_end_of_the_one_before() -> None:
    timeline = Timeline(rank=0, clock=CountingClock(), times_passes=True)
    run_pass(timeline, 0, KINDS)
    assert [(span.category, span.begin_us, span.duration_us) for span in timeline.last_spans] == [
        ("attention", 20.0, 10.0),
        ("dispatch", 30.0, 10.0),
        ("dense", 40.0, 10.0),
        ("wait", 50.0, 10.0),
    ]
    assert timeline.last_pass is not None
    assert timeline.last_pass.seconds() == pytest.approx(60e-6)
    assert timeline.shares()["overlap_hidden_ratio"] == pytest.approx(1 / 3)


def test_passes_end_in_the_order_in_which_they_were_begun() -> None:
    timeline = Timeline(rank=0, clock=CountingClock())
    for step in (1, 2):
        timeline.times_next = True
        marks = timeline.begin_pass(step)
        assert marks is not None
        marks.begin()
        marks.op_ended(0, op(OpKind.EXPERTS))
        timeline.pass_launched()
    ended = []
    for _ in range(2):
        timeline.end_pass()
        assert timeline.last_pass is not None
        ended.append((timeline.last_pass.step, timeline.last_spans[0].step))
    assert ended == [(1, 1), (2, 2)]
    assert timeline.begin_pass(3) is None, "only the next pass was asked for"


def test_a_profile_keeps_every_pass_between_start_and_stop() -> None:
    timeline = Timeline(rank=0, clock=CountingClock())
    run_pass(timeline, 1, KINDS)
    timeline.start_profile()
    for step in (2, 3):
        run_pass(timeline, step, KINDS)
    spans = timeline.stop_profile()
    run_pass(timeline, 5, KINDS)
    assert [span.step for span in spans] == [2] * 4 + [3] * 4
    assert not timeline.is_profiling
    assert timeline.stop_profile() == ()


def test_a_pass_that_was_replayed_as_a_whole_has_no_spans() -> None:
    timeline = Timeline(rank=0, clock=CountingClock())
    timeline.begin_pass(0)
    timeline.pass_launched()
    timeline.end_pass()
    assert timeline.last_spans == ()
    assert timeline.shares() == {}


def test_every_part_of_a_layer_has_a_category() -> None:
    assert set(OpKind) - set(CATEGORIES) == {OpKind.EMBED, OpKind.OUTPUT}


def span(name: str, category: str, begin: float, duration: float, micro_batch: int = 0, step: int = 4) -> Span:
    return Span(
        step=step,
        micro_batch=micro_batch,
        layer=1,
        name=name,
        category=category,
        begin_us=begin,
        duration_us=duration,
    )


SPANS = (
    span("dispatch_begin", "dispatch", 0, 10),
    span("dispatch_begin", "dispatch", 10, 10, micro_batch=1),
    span("dispatch_end", "wait", 20, 30),  # in flight 0 to 50
    span("experts", "experts", 50, 40),
    span("dispatch_end", "wait", 90, 5, micro_batch=1),  # in flight 10 to 95
    span("experts", "experts", 95, 5, micro_batch=1),
)


def test_exposed_communication_overlap_ratio_and_bubble() -> None:
    shares = span_shares(SPANS)
    assert (shares.passes, shares.wall_us) == (1, 100.0)
    assert shares.in_flight_us == 50.0 + 85.0
    assert (shares.exposed_us, shares.waited_us) == (55.0, 35.0)
    assert shares.overlap_ratio == pytest.approx(1 - 55 / 135)
    assert shares.bubble == pytest.approx(0.35)
    assert shares.category_us == {"dispatch": 20.0, "wait": 35.0, "experts": 45.0}
    beside = attrs.evolve(span("shared", "dense", 20, 60), is_beside=True)
    with_beside = span_shares([*SPANS, beside])
    assert (with_beside.exposed_us, with_beside.category_us["dense"]) == (shares.exposed_us, 60.0)


def test_passes_are_measured_apart_and_a_pass_without_communication_hides_nothing() -> None:
    shares = span_shares([span("attn", "attention", 0, 10), span("attn", "attention", 1000, 10, step=5)])
    assert (shares.passes, shares.wall_us, shares.overlap_ratio, shares.bubble) == (2, 20.0, 0.0, 0.0)
    assert span_shares([]).passes == 0


def test_a_trace_file_is_what_viewers_take_and_reads_back(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "rank3.trace.json"
    write_trace(path, 3, SPANS)
    events = json.loads(path.read_text())["traceEvents"]
    assert all({"name", "ph", "pid"} <= set(event) for event in events)
    complete = [event for event in events if event["ph"] == "X"]
    assert all({"ts", "dur", "tid", "cat", "args"} <= set(event) for event in complete)
    assert {event["args"]["name"] for event in events if event["ph"] == "M"} >= {"rank 3", "micro-batch 1"}
    assert read_trace(path) == {3: SPANS}
    shared = attrs.evolve(SPANS[0], category="dense", is_beside=True)
    write_trace(path, 3, [shared])
    assert read_trace(path) == {3: (shared,)}


def test_neighbours_do_not_overlap_in_the_file_however_they_are_rounded() -> None:
    """Viewers refuse events of a thread that overlap in part."""
    drawn = random.Random(0)
    begin, spans = 9_876_543_210.0, []
    for _ in range(2000):
        duration = drawn.uniform(0, 3)
        spans.append(span("experts", "experts", begin, duration))
        begin += duration
    events = [span_event(0, one) for one in spans]
    for one, following in itertools.pairwise(events):
        assert round(one["ts"] + one["dur"], 3) <= following["ts"]


def test_a_file_whose_writer_was_ended_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    lines = [json.dumps(span_event(3, one)) + ",\n" for one in SPANS[:2]]
    text = "[\n" + "".join(lines)
    path = tmp_path / "ended.json"
    for end in range(len(text) - len(lines[1]) + 1, len(text) - 2):
        path.write_text(text[:end])
        assert read_trace(path) == {3: SPANS[:1]}, text[:end]
    for end in (len(text) - 2, len(text)):
        path.write_text(text[:end])
        assert read_trace(path) == {3: SPANS[:2]}


NO_TIME = (
    '[{"name": "x", "cat": "x", "ph": "X", "ts": NaN, "dur": 1, "pid": 0, "tid": 0, "args": {"layer": 0, "step": 0}}]'
)
NO_TIMES = [NO_TIME, *(NO_TIME.replace("NaN", text) for text in ("1e999", "-1e999", "null", '"soon"', '"nan"', "[]"))]
NO_TIMES += [
    NO_TIME.replace("NaN", "1").replace('"dur": 1', f'"dur": {text}') for text in ("1e999", "-1", '"inf"', "{}")
]


@pytest.mark.parametrize(
    "text",
    ["", "{}", "no json", '[{"ph": "X", "args": {"layer": 1}}]', "[1]", '{"traceEvents": null}', "[[", *NO_TIMES],
)
def test_another_file_is_refused_by_name(tmp_path: Path, text: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(LoadFileError, match=r"other\.json is no trace of Crossdock"):
        read_trace(path)
    with pytest.raises(LoadFileError, match="missing"):
        read_trace(tmp_path / "missing.json")


def test_the_picture_has_a_lane_for_each_rank_and_micro_batch() -> None:
    picture = lane_picture({0: SPANS, 1: SPANS[:1]})
    root = ElementTree.fromstring(picture)
    texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert [text for text in texts if text and text.startswith("rank")] == [
        "rank 0, micro-batch 0",
        "rank 0, micro-batch 1",
        "rank 1, micro-batch 0",
    ]
    titles = [element.text for element in root.iter("{http://www.w3.org/2000/svg}title")]
    assert "experts, layer 1, step 4: 40 us" in titles
    assert ElementTree.fromstring(lane_picture({})) is not None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_marks_on_a_gpu_are_moments_of_the_host_also_where_it_is_far_ahead() -> None:
    """A step is launched while the one before it still runs: its operations begin when that one ends."""
    clock = clock_of(torch.device("cuda"))
    torch.cuda._sleep(1000)  # type: ignore[no-untyped-call]
    clock.read_us([clock.mark()])
    torch.cuda.synchronize()
    launched_us = time.perf_counter_ns() / 1e3
    before = clock.mark()
    torch.cuda._sleep(40_000_000)  # type: ignore[no-untyped-call]
    begun = clock.mark()
    issued_us = time.perf_counter_ns() / 1e3 - launched_us
    torch.cuda._sleep(4_000_000)  # type: ignore[no-untyped-call]
    ended = clock.mark()
    torch.cuda._sleep(40_000_000)  # type: ignore[no-untyped-call]
    moments = [moment - launched_us for moment in clock.read_us([before, begun, ended])]
    read_us = time.perf_counter_ns() / 1e3 - launched_us
    torch.cuda.synchronize()
    finished_us = time.perf_counter_ns() / 1e3 - launched_us
    assert issued_us < 2000 < moments[1] < moments[2] <= read_us
    assert moments[0] == pytest.approx(0.0, abs=500)
    assert moments[2] == pytest.approx(read_us, abs=500)
    assert read_us < finished_us - 5000, "what was issued behind the last mark is not waited for"
