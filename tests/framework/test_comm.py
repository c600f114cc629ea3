"""Collectives over gloo against their definitions."""

import pytest
import torch
from crossdock.comm import LocalComm, local_comms
from crossdock.comm_gloo import ONE_ROUND_SUM_BYTES
from crossdock.errors import MisuseError
from crossdock.groups import resolve_sizes

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8)
ROW_SHAPES = ((), (3,), (2, 5))


def rows_of(rank, count, shape, dtype):
    """Small integers, exact in every dtype and in sums of four."""
    generator = torch.Generator().manual_seed(100 * rank + count)
    return torch.randint(0, 8, (count, *shape), generator=generator).to(dtype)


def collectives(context, dtype, shape, counts):
    """Every collective on uneven rows; returns failures by name."""
    world = context.comms_of(resolve_sizes(ranks=context.size)).world
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


@pytest.mark.parametrize("counts", [(2, 1, 0, 3), (0, 0, 0, 0), (0, 1, 0, 0)])
def test_collectives_equal_their_definitions_on_four_ranks_with_empty_ones(rank_pool, counts):
    for dtype in DTYPES:
        for shape in ROW_SHAPES:
            assert rank_pool(4).run(collectives, dtype, shape, counts) == [[]] * 4, (dtype, shape)


def test_collectives_equal_their_definitions_on_two_ranks(rank_pool):
    for counts in ((3, 1), (1, 0), (0, 0)):
        assert rank_pool(2).run(collectives, torch.float32, (3,), counts) == [[]] * 2


def float8_rows(context):
    world = context.comms_of(resolve_sizes(ranks=context.size)).world
    x = torch.full((context.rank + 1, 4), float(context.rank + 1)).to(torch.float8_e4m3fn)
    return world.all_gatherv(x, [1, 2]).float()


def test_eight_bit_floats_travel_as_bytes(rank_pool):
    expected = torch.tensor([1.0, 2.0, 2.0]).view(3, 1).expand(3, 4)
    for gathered in rank_pool(2).run(float8_rows):
        assert torch.equal(gathered, expected)


def order_of_sums(context, elements):
    world = context.comms_of(resolve_sizes(ranks=context.size)).world
    parts = [torch.randn(elements, generator=torch.Generator().manual_seed(rank)) for rank in range(context.size)]
    in_order = ((parts[0] + parts[1]) + parts[2]) + parts[3]
    return torch.equal(world.all_reduce(parts[context.rank]), in_order)


@pytest.mark.parametrize("elements", [5, ONE_ROUND_SUM_BYTES // 4, ONE_ROUND_SUM_BYTES // 4 + 3])
def test_sums_are_taken_in_rank_order_by_the_one_round_and_the_two_round_form(rank_pool, elements):
    assert rank_pool(4).run(order_of_sums, elements) == [True] * 4


def bf16_sum(context):
    world = context.comms_of(resolve_sizes(ranks=context.size)).world
    value = [256.0, 1.0, 1.0, 1.0][context.rank]
    return float(world.all_reduce(torch.tensor([value], dtype=torch.bfloat16)))


def test_bf16_sums_are_rounded_once(rank_pool):
    exact_then_rounded = float(torch.tensor(259.0).to(torch.bfloat16))
    assert rank_pool(4).run(bf16_sum) == [exact_then_rounded] * 4


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
        comms.moe_ep.group is comms.world.group,
        isinstance(comms.moe_tp, LocalComm) and comms.moe_tp.ranks == (context.rank,),
        other.attn_tp.group is other.moe_tp.group,
        comms.host is comms,
    )


def test_axes_with_equal_groups_share_a_communicator(rank_pool):
    assert rank_pool(4).run(aliases) == [(True, True, True, True)] * 4


def wrong_counts(context):
    world = context.comms_of(resolve_sizes(ranks=context.size)).world
    try:
        world.all_gatherv(torch.zeros(3, 2), [2, 2])
    except MisuseError as error:
        return str(error)


def test_rows_that_disagree_with_the_counts_are_refused_before_anything_is_sent(rank_pool):
    assert rank_pool(2).run(wrong_counts) == ["all_gatherv: the counts say 2 rows, the tensor has 3"] * 2


def test_a_group_of_one_returns_its_input_without_a_copy():
    comm = local_comms().world
    x = torch.randn(3, 2)
    assert comm.all_reduce(x) is x
    assert comm.all_gatherv(x, [3]) is x
    assert comm.reduce_scatter(x) is x
    assert comm.all_to_all_begin(x, [3], [3]).wait() is x
