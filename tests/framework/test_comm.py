"""Collectives over gloo against their definitions."""

import os
import signal
import time
from pathlib import Path

import pytest
import torch
from crossdock.comm import LocalComm, local_comms, take_device
from crossdock.comm_all_to_all import ONE_ROUND_SUM_BYTES
from crossdock.comm_gloo import GlooComm
from crossdock.comm_shared import SharedComm, slot_bytes
from crossdock.errors import ConfigError, MisuseError, RankLost
from crossdock.groups import resolve_sizes
from crossdock.testing.world import RankFailure, RankPool

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8)
ROW_SHAPES = ((), (3,), (2, 5))


def rows_of(rank, count, shape, dtype):
    """Small integers, exact in every dtype and in sums of four."""
    generator = torch.Generator().manual_seed(100 * rank + count)
    return torch.randint(0, 8, (count, *shape), generator=generator).to(dtype)


def world_of(context, transport):
    """The group of all ranks, over shared memory or gloo."""
    comms = context.comms_of(resolve_sizes(ranks=context.size))
    world = comms.world if transport == "shm" else comms.host.world
    assert isinstance(world, SharedComm if transport == "shm" else GlooComm)
    return world


BOTH = pytest.mark.parametrize("transport", ["shm", "gloo"])


def collectives(context, transport, dtype, shape, counts):
    """Every collective on uneven rows; returns failures by name."""
    world = world_of(context, transport)
    size, rank = context.size, context.rank
    wrong = []

    def check(name, got, expected):
        if got.dtype != expected.dtype or got.shape != expected.shape or not torch.equal(got, expected):
            wrong.append((name, got, expected))

    parts = [rows_of(other, counts[other], shape, dtype) for other in range(size)]
    check("all_gatherv", world.all_gatherv(parts[rank], counts), torch.cat(parts))
    equal = [rows_of(other, counts[0], shape, dtype) for other in range(size)]
    check("all_gather", world.all_gather(equal[rank]), torch.cat(equal))
    full = [rows_of(other, sum(counts), shape, dtype) for other in range(size)]
    total = torch.stack(full).sum(0).to(dtype)
    start = sum(counts[:rank])
    check("all_reduce", world.all_reduce(full[rank]), total)
    check("reduce_scatterv", world.reduce_scatterv(full[rank], counts), total[start : start + counts[rank]])
    wide = [rows_of(other, counts[0] * size, shape, dtype) for other in range(size)]
    own = torch.stack(wide).sum(0).to(dtype)[counts[0] * rank : counts[0] * (rank + 1)]
    check("reduce_scatter", world.reduce_scatter(wide[rank]), own)
    received = torch.cat([full[other][start : start + counts[rank]] for other in range(size)])
    check("all_to_all", world.all_to_all(full[rank], counts, [counts[rank]] * size), received)
    pending = world.all_to_all_begin(full[rank], counts, [counts[rank]] * size)
    second = world.all_to_all_begin(full[rank], counts, [counts[rank]] * size)
    check("second in flight", second.wait(), received)
    check("first in flight", pending.wait(), received)
    check("broadcast", world.broadcast(full[rank], size - 1), full[size - 1])
    check("input unchanged", full[rank], rows_of(rank, sum(counts), shape, dtype))
    return wrong


@BOTH
@pytest.mark.parametrize("counts", [(2, 1, 0, 3), (0, 0, 0, 0), (0, 1, 0, 0)])
def test_collectives_equal_their_definitions_on_four_ranks_with_empty_ones(rank_pool, transport, counts):
    for dtype in DTYPES:
        for shape in ROW_SHAPES:
            assert rank_pool(4).run(collectives, transport, dtype, shape, counts) == [[]] * 4, (dtype, shape)


@BOTH
def test_collectives_equal_their_definitions_on_two_ranks(rank_pool, transport):
    for counts in ((3, 1), (1, 0), (0, 0)):
        assert rank_pool(2).run(collectives, transport, torch.float32, (3,), counts) == [[]] * 2


def float8_rows(context, transport):
    world = world_of(context, transport)
    x = torch.full((context.rank + 1, 4), float(context.rank + 1)).to(torch.float8_e4m3fn)
    return world.all_gatherv(x, [1, 2]).float()


@BOTH
def test_eight_bit_floats_travel_as_bytes(rank_pool, transport):
    expected = torch.tensor([1.0, 2.0, 2.0]).view(3, 1).expand(3, 4)
    for gathered in rank_pool(2).run(float8_rows, transport):
        assert torch.equal(gathered, expected)


def order_of_sums(context, transport, elements):
    world = world_of(context, transport)
    parts = [torch.randn(elements, generator=torch.Generator().manual_seed(rank)) for rank in range(context.size)]
    in_order = ((parts[0] + parts[1]) + parts[2]) + parts[3]
    return torch.equal(world.all_reduce(parts[context.rank]), in_order)


@pytest.mark.parametrize("elements", [5, ONE_ROUND_SUM_BYTES // 4, ONE_ROUND_SUM_BYTES // 4 + 3])
@BOTH
def test_sums_are_taken_in_rank_order_by_the_one_round_and_the_two_round_form(rank_pool, transport, elements):
    assert rank_pool(4).run(order_of_sums, transport, elements) == [True] * 4


def bf16_sum(context, transport):
    world = world_of(context, transport)
    value = [256.0, 1.0, 1.0, 1.0][context.rank]
    return float(world.all_reduce(torch.tensor([value], dtype=torch.bfloat16)))


@BOTH
def test_bf16_sums_are_rounded_once(rank_pool, transport):
    exact_then_rounded = float(torch.tensor(259.0).to(torch.bfloat16))
    assert rank_pool(4).run(bf16_sum, transport) == [exact_then_rounded] * 4


def group_members(context):
    sizes = resolve_sizes(ranks=4, attn_dp_size=2, moe_ep_size=2)
    comms = context.comms_of(sizes)
    me = torch.tensor([context.rank])
    return [group.all_gather(me).tolist() for group in (comms.attn_tp, comms.moe_ep, comms.moe_tp, comms.world)]


def test_each_rank_talks_to_the_members_of_its_groups(rank_pool):
    everyone = [0, 1, 2, 3]
    assert rank_pool(4).run(group_members) == [
        [[0, 1], [0, 2], [0, 1], everyone],
        [[0, 1], [1, 3], [0, 1], everyone],
        [[2, 3], [0, 2], [2, 3], everyone],
        [[2, 3], [1, 3], [2, 3], everyone],
    ]


def aliases(context):
    sizes = resolve_sizes(ranks=4, attn_dp_size=2, moe_ep_size=4)
    comms = context.comms_of(sizes)
    other = context.comms_of(resolve_sizes(ranks=4, attn_dp_size=2, moe_ep_size=2))
    return (
        comms.moe_ep is comms.world and comms.host.moe_ep is comms.host.world,
        isinstance(comms.moe_tp, LocalComm) and comms.moe_tp.ranks == (context.rank,),
        other.attn_tp is other.moe_tp,
        comms.host.host is comms.host,
    )


def test_axes_with_equal_groups_share_a_communicator(rank_pool):
    assert rank_pool(4).run(aliases) == [(True, True, True, True)] * 4


def wrong_counts(context, transport):
    world = world_of(context, transport)
    try:
        world.all_gatherv(torch.zeros(3, 2), [2, 2])
    except MisuseError as error:
        return str(error)


@BOTH
def test_rows_that_disagree_with_the_counts_are_refused_before_anything_is_sent(rank_pool, transport):
    assert rank_pool(2).run(wrong_counts, transport) == ["all_gatherv: the counts say 2 rows, the tensor has 3"] * 2


def test_a_group_of_one_returns_its_input_without_a_copy():
    comm = local_comms().world
    x = torch.randn(3, 2)
    assert comm.all_reduce(x) is x
    assert comm.all_gatherv(x, [3]) is x
    assert comm.reduce_scatter(x) is x
    assert comm.all_to_all_begin(x, [3], [3]).wait() is x


def large_rows(context, transport, sizes_bytes):
    """Several all-to-alls in flight whose parts need many chunks and unequal numbers of them, awaited in the other order."""
    world = world_of(context, transport)
    begun = []
    for number, size in enumerate(sizes_bytes):
        counts = [(size + 13 * peer + 7 * context.rank) for peer in range(context.size)]
        expected = [(size + 13 * context.rank + 7 * peer) for peer in range(context.size)]
        sent = torch.cat(
            [
                torch.full((count,), 10 * context.rank + peer + number, dtype=torch.uint8)
                for peer, count in enumerate(counts)
            ]
        )
        begun.append((world.all_to_all_begin(sent, counts, expected), expected, number))
    for pending, expected, number in reversed(begun):
        received = pending.wait().split(expected)
        for peer, part in enumerate(received):
            assert bool((part == 10 * peer + context.rank + number).all())
    return True


@BOTH
@pytest.mark.parametrize("ranks", [2, 4])
def test_rows_larger_than_any_buffer_arrive_whole_with_three_operations_in_flight(rank_pool, transport, ranks):
    slot = slot_bytes(ranks)
    assert rank_pool(ranks).run(large_rows, transport, [slot - 1, 5 * slot + 3, 1]) == [True] * ranks


def many_small_ones(context, transport, rounds):
    world = world_of(context, transport)
    for number in range(rounds):
        gathered = world.all_gather(torch.tensor([context.rank + number * 10]))
        assert gathered.tolist() == [rank + number * 10 for rank in range(context.size)]
    return True


@pytest.mark.parametrize("ranks", [2, 4])
def test_thousands_of_collectives_in_a_row_keep_their_order(rank_pool, ranks):
    assert rank_pool(ranks).run(many_small_ones, "shm", 3000) == [True] * ranks


def disagree_about_counts(context):
    world = world_of(context, "shm")
    world.state.timeout_s = 0.5
    counts = [2, 2] if context.rank == 0 else [1, 1]
    try:
        world.all_to_all(torch.zeros(sum(counts), 4), counts, counts)
    except (MisuseError, RankLost) as error:
        return type(error).__name__, str(error)


def test_ranks_that_disagree_about_counts_are_found_out():
    with RankPool(2) as pool:
        (_, short), (kind, surplus) = pool.run(disagree_about_counts)
    assert "did not join a collective" in short
    assert kind == "MisuseError"
    assert "rank 1 expects 16 more bytes of rank 0, which sent 32: the ranks disagree about counts" in surplus


def killed_peer(context, report):
    world = world_of(context, "shm")
    if context.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        world.all_reduce(torch.ones(3))
    except RankLost as error:
        Path(report).write_text(f"{error.rank} {error}")


def test_a_killed_rank_ends_a_collective_through_shared_memory_and_is_named(tmp_path):
    report = tmp_path / "report"
    with RankPool(2) as pool, pytest.raises(RankFailure, match="the process ended"):
        pool.run(killed_peer, str(report), timeout_s=30)
    assert report.read_text().startswith("1 the process of rank 1 (pid ")


def absent_peer(context):
    world = world_of(context, "shm")
    world.state.timeout_s = 0.5
    if context.rank == 1:
        time.sleep(1.5)
        return None
    try:
        world.all_reduce(torch.ones(3))
    except RankLost as error:
        return error.rank, str(error)


def test_a_rank_that_does_not_join_a_collective_is_named():
    with RankPool(2) as pool:
        rank, message = pool.run(absent_peer)[0]
    assert rank == 1
    assert "ranks [1] of [0, 1] did not join a collective within 0.5 s" in message


def test_a_gpu_that_is_not_there_is_refused_before_torch_trips_over_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ConfigError, match=r"needs GPU 1 for rank 1 of this machine, and torch \S+ sees 1"):
        take_device("cuda", 1)
    take_device("cpu", 1)


def test_ranks_that_share_a_gpu_take_the_same_one(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    for name in ("NCCL_HOSTID", "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"):
        monkeypatch.setenv(name, "")
    hosts = []
    for rank in range(2):
        take_device("cuda", rank, ranks_per_gpu=2)
        hosts.append(os.environ["NCCL_HOSTID"])
    assert taken == [0, 0]
    assert hosts[0] != hosts[1], "NCCL refuses two ranks of a host on one device"
    with pytest.raises(ConfigError, match=r"needs GPU 1 for rank 2 .* sees 1; .* launch\.ranks_per_gpu"):
        take_device("cuda", 2, ranks_per_gpu=2)
