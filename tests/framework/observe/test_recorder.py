"""The recorder counts live tokens, each once, and attributes them to the experts of their time."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from crossdock.comm import local_comms
from crossdock.groups import rank_place, resolve_sizes
from crossdock.location import overwrite_layer, placement_maps
from crossdock.observe.recorder import ExpertLoadRecorder, NoRecorder, RecorderMode, RecorderSpec, make_recorder
from crossdock.observe.recorder_dump import write_records
from crossdock.observe.recorder_window import balancedness_of
from crossdock.placement import trivial_placement
from crossdock.placement_io.load_files import read_load
from crossdock.testing.world import OneProcessWorld, RankContext
from crossdock.types.dispatch import Received, ReceiveLayout
from crossdock.types.layout import FULL_ROWS, LOCAL_ROWS, Layout, TokenAxis
from crossdock.types.location import PlacementMaps
from crossdock.types.parallel import ParallelSizes
from crossdock.types.placement import Placement

ONE = resolve_sizes(ranks=1)
TWO = resolve_sizes(ranks=2, attn_dp_size=2)
LAYERS, EXPERTS, SLOTS = 2, 3, 4
WORLD = local_comms().world


def make(
    mode: RecorderMode = RecorderMode.STAT,
    *,
    sizes: ParallelSizes = ONE,
    rank: int = 0,
    input_rows: Layout = FULL_ROWS,
    buffer_steps: int = 4,
) -> tuple[ExpertLoadRecorder, PlacementMaps]:
    maps = placement_maps(trivial_placement(LAYERS, EXPERTS, SLOTS), torch.device("cpu"))
    spec = RecorderSpec(
        mode=mode,
        maps=maps,
        sizes=sizes,
        place=rank_place(sizes, rank),
        input_rows=input_rows,
        buffer_steps=buffer_steps,
    )
    recorder = make_recorder(spec)
    assert isinstance(recorder, ExpertLoadRecorder)
    return recorder, maps


def one_pass(recorder: ExpertLoadRecorder, *layers: list[list[int]], pass_id: int = 0, record: bool = True) -> None:
    recorder.begin_pass(pass_id, record=record)
    for layer, ids in enumerate(layers):
        recorder.record(layer, torch.tensor(ids, dtype=torch.int64).view(-1, 2))
    recorder.end_pass()


def rank_counts(context: RankContext, input_rows: Layout) -> list[list[int]]:
    """3 live tokens of rank 0 padded to 8, rank 1 idle, top-k 2, 2 layers; warm-up and a health check around it."""
    recorder, _ = make(sizes=TWO, rank=context.rank, input_rows=input_rows)
    live, nothing = [[0, 1], [3, 2], [1, 0]] + [[-1, -1]] * 5, [[-1, -1]] * 8
    is_full = TokenAxis.ATTN_DP not in input_rows
    rows = live + nothing if is_full else (live if context.rank == 0 else nothing)
    one_pass(recorder, rows, rows)
    assert recorder.start()
    for pass_id, record in ((0, False), (1, True), (2, False)):
        one_pass(recorder, rows, rows, pass_id=pass_id, record=record)
    counts = recorder.logical_counts(context.comms_of(TWO).world)
    assert counts.shape == (1, LAYERS, EXPERTS)
    counted: list[list[int]] = counts[0].tolist()
    return counted


@pytest.mark.parametrize("input_rows", [FULL_ROWS, LOCAL_ROWS])
def test_totals_are_live_tokens_times_top_k_whoever_holds_the_rows(input_rows: Layout) -> None:
    for counted in OneProcessWorld(TWO).run(rank_counts, input_rows):
        assert counted == [[3, 2, 1]] * LAYERS  # slot 3 is a replica of expert 0
        assert [sum(layer) for layer in counted] == [3 * 2] * LAYERS


def test_nothing_is_counted_before_start_and_after_stop() -> None:
    recorder, _ = make()
    one_pass(recorder, [[0, 1]], [[0, 1]])
    assert recorder.num_passes == 0
    assert not recorder.is_recording
    recorder.start()
    one_pass(recorder, [[0, 1]], [[0, 1]])
    recorder.stop()
    one_pass(recorder, [[0, 1]], [[0, 1]])
    assert recorder.logical_counts(WORLD).tolist() == [[[1, 1, 0], [1, 1, 0]]]


def test_starting_again_forgets_and_says_that_it_was_recording() -> None:
    recorder, _ = make()
    assert recorder.start()
    one_pass(recorder, [[0, 1]], [[0, 1]])
    assert not recorder.start()
    assert recorder.logical_counts(WORLD).shape == (0, LAYERS, EXPERTS)


def test_the_ring_keeps_the_last_passes_in_order_and_knows_how_full_it_is() -> None:
    recorder, _ = make(buffer_steps=3)
    recorder.start()
    for number in range(5):
        one_pass(recorder, [[1, 2]] * number, [])
        assert recorder.num_passes == min(number + 1, 3)
    assert recorder.logical_counts(WORLD)[:, 0, 1].tolist() == [2, 3, 4]


def test_counts_belong_to_the_experts_of_their_time() -> None:
    recorder, maps = make()
    recorder.start()
    one_pass(recorder, [[0, 3]], [[0, 3]])
    recorder.flush_layer(0)
    overwrite_layer(maps, 0, Placement.from_physical(np.array([[2, 1, 0, 1], [0, 1, 2, 0]]), EXPERTS))
    one_pass(recorder, [[0, 3]], [[0, 3]])
    assert recorder.logical_counts(WORLD).tolist() == [
        [[2, 0, 0], [2, 0, 0]],
        [[0, 1, 1], [2, 0, 0]],
    ]
    for number in range(4):  # the ring wraps over flushed rows
        one_pass(recorder, [[1, 1]], [[2, 2]], pass_id=number)
    assert recorder.logical_counts(WORLD).tolist() == [[[0, 2, 0], [0, 0, 2]]] * 4


def test_balancedness_is_the_mean_over_the_maximum_and_1_without_load() -> None:
    loads = torch.tensor([[4, 4], [4, 0], [3, 1], [0, 0]])
    assert balancedness_of(loads).tolist() == pytest.approx([1.0, 0.5, 2 / 3, 1.0])


def test_windows_average_the_passes_that_had_load() -> None:
    recorder, _ = make(sizes=TWO)
    recorder.start()
    even, uneven = [[0, 2]], [[0, 1]]  # slots 0, 1 are on rank 0, slots 2, 3 on rank 1
    for number in range(12):
        one_pass(recorder, uneven if number < 10 else even, [])
    found = recorder.balancedness(WORLD, (2, 10, 1000))
    assert found[2] == pytest.approx((1.0, 1.0))
    assert found[10] == pytest.approx((0.6, 1.0))
    assert found[1000] == pytest.approx(((10 * 0.5 + 2) / 12, 1.0))


def test_a_window_without_passes_is_balanced() -> None:
    recorder, _ = make(sizes=TWO)
    recorder.start()
    assert recorder.balancedness(WORLD) == {10: (1.0, 1.0), 100: (1.0, 1.0), 1000: (1.0, 1.0)}


@pytest.mark.parametrize("mode", [RecorderMode.STAT, RecorderMode.PER_PASS, RecorderMode.PER_TOKEN])
def test_every_mode_gives_the_counts_that_a_planner_needs(mode: RecorderMode) -> None:
    recorder, _ = make(mode)
    recorder.start()
    one_pass(recorder, [[0, 1], [3, -1]], [[2, 1], [-1, -1]])
    assert recorder.logical_counts(WORLD).tolist() == [[[2, 1, 0], [0, 1, 1]]]
    assert recorder.balancedness(WORLD, (10,))[10] == (1.0, 1.0)


def test_fine_modes_keep_a_record_of_each_pass() -> None:
    recorder, _ = make(RecorderMode.PER_PASS)
    recorder.start()
    for pass_id in (4, 5):
        one_pass(recorder, [[0, 1]], [[0, 3]], pass_id=pass_id)
    assert [record.pass_id for record in recorder.records] == [4, 5]
    assert recorder.records[1].physical_count.tolist() == [[1, 1, 0, 0], [1, 0, 0, 1]]


@pytest.mark.parametrize("mode", [RecorderMode.PER_PASS, RecorderMode.PER_TOKEN])
def test_fine_modes_keep_the_last_passes_and_no_more(mode: RecorderMode) -> None:
    recorder, _ = make(mode, buffer_steps=3)
    recorder.start()
    for pass_id in range(7):
        one_pass(recorder, [[0, 1]], [[1, 2]], pass_id=pass_id)
    assert [record.pass_id for record in recorder.records] == [4, 5, 6]
    recorder.start()
    assert recorder.records == ()


@pytest.mark.parametrize("mode", [RecorderMode.PER_PASS, RecorderMode.PER_TOKEN])
def test_a_fine_dump_gives_passes_to_the_experts_of_their_time(mode: RecorderMode, tmp_path: Path) -> None:
    recorder, maps = make(mode, buffer_steps=10)
    recorder.start()
    one_pass(recorder, [[0, 1]], [[0, 1]], pass_id=0)
    for layer, slots in enumerate(([2, 1, 0, 0], [1, 0, 2, 2])):
        recorder.flush_layer(layer)
        overwrite_layer(maps, layer, Placement.from_physical([slots], EXPERTS), row=0)
        one_pass(recorder, [[0, 1]], [[0, 1]], pass_id=1 + layer)
    path = write_records(tmp_path, "1", 0, recorder.records, maps)
    expected = [[[1, 1, 0], [1, 1, 0]], [[0, 1, 1], [1, 1, 0]], [[0, 1, 1], [1, 1, 0]]]
    assert read_load([path]).counts.tolist() == expected == recorder.logical_counts(WORLD).tolist()
    carried = ["physical_to_logical_map" in record for record in torch.load(path, weights_only=True)["records"]]
    assert carried == [True, True, False]


def test_the_approximate_mode_counts_what_arrives_at_the_rank() -> None:
    recorder, _ = make(RecorderMode.STAT_APPROX, sizes=TWO, rank=1)
    recorder.start()
    recorder.begin_pass(0)
    recorder.record(0, torch.tensor([[0, 1]]))
    rows = torch.zeros(4, 1)
    recorder.record_received(
        0, Received(layout=ReceiveLayout.TOKEN_ROWS, rows=rows[:2], local_topk_ids=torch.tensor([[0, -1], [1, 0]]))
    )
    recorder.record_received(1, Received(layout=ReceiveLayout.FLAT, rows=rows, counts=[3, 1]))
    recorder.end_pass()
    # Rank 1 holds slots 2 and 3, which are experts 2 and 0.
    assert recorder.logical_counts(WORLD).tolist() == [[[1, 0, 2], [1, 0, 3]]]


def test_off_counts_nothing() -> None:
    maps = placement_maps(trivial_placement(1, 2, 2), torch.device("cpu"))
    spec = RecorderSpec(mode=RecorderMode.OFF, maps=maps, sizes=ONE, place=rank_place(ONE, 0), input_rows=FULL_ROWS)
    assert isinstance(make_recorder(spec), NoRecorder)
