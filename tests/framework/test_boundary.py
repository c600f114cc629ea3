"""Entered chains of blocks against the same chain with no ranks."""

from types import SimpleNamespace

import attrs
import pytest
import torch
from crossdock.boundary import Boundary, Stream
from crossdock.boundary_moves import SMALL_SUMS, SmallSums
from crossdock.boundary_plan import BlockSpec, attention_block, embedding_block, head_block, plan_boundaries
from crossdock.comm import local_comms
from crossdock.errors import MisuseError, RowsMisuse, SelectionRefused
from crossdock.groups import drop_unit_axes, drop_unit_sums, resolve_sizes
from crossdock.rows import Rows
from crossdock.testing.world import OneProcessWorld
from crossdock.types.layout import ATTN_ROWS, COMPLETE, FULL_ROWS, LOCAL_ROWS, Layout, SumAxis, TokenAxis
from crossdock.types.parallel import ParallelSizes
from crossdock.types.step import DispatchMode, ForwardMode, PaddingMode, StepPlan
from hypothesis import assume, given, settings
from hypothesis import strategies as st

HIDDEN = 3
NO_SUMS = SmallSums(sum_len_bytes=0, attn_tp_bytes=0)
ALL_SUMS = SmallSums(sum_len_bytes=1 << 20, attn_tp_bytes=1 << 20)


@attrs.frozen(kw_only=True)
class Chain:
    """Blocks between embedding and head, the padded counts of a step, and the layout that runs them."""

    sizes: ParallelSizes
    blocks: tuple[BlockSpec, ...]
    counts: tuple[int, ...]
    padding_mode: PaddingMode
    small_sums: SmallSums = SMALL_SUMS
    over_gloo: bool = False


def step_of(counts, padding_mode=PaddingMode.SUM_LEN, live=None):
    return StepPlan(
        step=1,
        eplb_pass=0,
        live_tokens=live or counts,
        padded_tokens=counts,
        padding_mode=padding_mode,
        forward_mode=ForwardMode.DECODE,
        dispatch_mode=DispatchMode.NORMAL,
        overlap=False,
        overlap_reason="off",
    )


def norm(x):
    return x / (1.0 + x.abs().mean(-1, keepdim=True))


def gated(residual, output):
    return 0.5 * residual + torch.sigmoid(residual) * output


def block_output(number, x):
    """What block ``number`` does to finished rows, row by row."""
    return torch.sin(x * (number + 1)) + 0.1 * number


def reference(chain):
    """(inputs of all blocks, outputs of all blocks) over the rows of all replicas, with no ranks."""
    generator = torch.Generator().manual_seed(len(chain.blocks))
    output = torch.randn(sum(chain.counts), HIDDEN, generator=generator, dtype=torch.float64)
    inputs, outputs, residual = [], [output], None
    for number, block in enumerate([*chain.blocks, head_block()]):
        if residual is None:
            residual = output
        else:
            residual = gated(residual, output) if block.is_gated_update else residual + output
        inputs.append(norm(residual))
        output = block_output(number, inputs[-1])
        outputs.append(output)
    return inputs, outputs


def cut(full, layout: Layout, chain, place):
    """This rank's rows of a global tensor."""
    held = drop_unit_axes(layout, chain.sizes)
    if TokenAxis.ATTN_DP in held or chain.sizes.attn_dp_size == 1:
        start = sum(chain.counts[: place.attn_dp_rank])
        full = full[start : start + chain.counts[place.attn_dp_rank]]
    if TokenAxis.ATTN_TP in held:
        rows = full.shape[0] // chain.sizes.attn_tp_size
        full = full[rows * place.attn_tp_rank : rows * (place.attn_tp_rank + 1)]
    return full


def partial(tensor, owed, chain, place):
    """This rank's addend: shares over the owed groups sum to one, and no two are equal."""
    share = 1.0
    for axis in drop_unit_sums(owed, chain.sizes):
        size = getattr(chain.sizes, f"{axis.value}_size")
        index = getattr(place, f"{axis.value}_rank")
        share *= (index + 1) * 2 / (size * (size + 1))
    return tensor * share


def run_chain(context, chain):
    """Largest difference of any block's input from the reference, and the residual layouts that occurred."""
    comms, place = context.comms_of(chain.sizes), context.place(chain.sizes)
    comms = comms.host if chain.over_gloo else comms
    inputs, outputs = reference(chain)
    batch = SimpleNamespace(step=step_of(chain.counts, chain.padding_mode), attn_dp_rank=place.attn_dp_rank)
    specs = [embedding_block(), *chain.blocks, head_block()]
    embedded = partial(cut(outputs[0], specs[0].output, chain, place), specs[0].owed, chain, place)
    stream = Stream().followed_by(Rows(embedded, specs[0].output, specs[0].owed, comms))
    worst = 0.0
    for number, plan in enumerate(plan_boundaries(specs, chain.sizes)):
        block = specs[number + 1]
        boundary = Boundary(plan, comms, chain.small_sums)
        read = local_norm(chain, place) if block.is_local_read else norm
        rows, stream = boundary.enter(stream, gated if block.is_gated_update else None, read, batch)
        expected = cut(inputs[number], block.input, chain, place)
        assert rows.value.shape == expected.shape
        if expected.numel():
            worst = max(worst, float((rows.value - expected).abs().max()))
        if block.output is not None:
            output = partial(cut(outputs[number + 1], block.output, chain, place), block.owed, chain, place)
            stream = stream.followed_by(Rows(output, block.output, block.owed, comms))
    return worst


def local_norm(chain, place):
    """A norm that may see rows of this replica only."""

    def read(x):
        own = chain.counts[place.attn_dp_rank]
        assert x.shape[0] in (own, own // chain.sizes.attn_tp_size), "a local read ran on gathered rows"
        return norm(x)

    return read


TOLERANCE = 1e-12
"""float64 sums of at most six addends."""
MOE_SUM = frozenset({SumAxis.MOE_EP, SumAxis.MOE_TP})
ALLGATHERV = BlockSpec(name="moe", input=FULL_ROWS, output=FULL_ROWS, owed=MOE_SUM)
ALLTOALLV = BlockSpec(name="a2a", input=LOCAL_ROWS, output=LOCAL_ROWS)
DENSE_TP = BlockSpec(name="dense", input=ATTN_ROWS, output=ATTN_ROWS, owed=frozenset({SumAxis.ATTN_TP}))
ATTENTION = attention_block("attention")


@st.composite
def chains(draw):
    attn_dp, attn_tp = draw(st.sampled_from([(1, 1), (2, 1), (1, 2), (2, 2), (4, 1), (1, 4), (3, 2)]))
    ranks = attn_dp * attn_tp
    moe_ep = draw(st.sampled_from([width for width in range(1, ranks + 1) if ranks % width == 0]))
    sizes = resolve_sizes(ranks=ranks, attn_dp_size=attn_dp, attn_tp_size=attn_tp, moe_ep_size=moe_ep)
    slices = draw(st.lists(st.integers(0, 3), min_size=attn_dp, max_size=attn_dp))
    mode = draw(st.sampled_from(list(PaddingMode)))
    if mode is PaddingMode.MAX_LEN:
        slices = [max(slices)] * attn_dp
    layouts = st.sampled_from([FULL_ROWS, ATTN_ROWS, LOCAL_ROWS])
    owed = st.sampled_from(
        [COMPLETE, frozenset({SumAxis.ATTN_TP}), MOE_SUM, frozenset({SumAxis.MOE_EP}), frozenset({SumAxis.MOE_TP})]
    )
    blocks = st.builds(
        BlockSpec,
        name=st.just("block"),
        input=layouts,
        output=layouts,
        owed=owed,
        is_gated_update=st.booleans(),
        is_local_read=st.booleans(),
    )
    return Chain(
        sizes=sizes,
        blocks=tuple(draw(st.lists(blocks, min_size=1, max_size=5))),
        counts=tuple(rows * attn_tp for rows in slices),
        padding_mode=mode,
        small_sums=draw(st.sampled_from([NO_SUMS, SmallSums(sum_len_bytes=100, attn_tp_bytes=200), ALL_SUMS])),
    )


@settings(max_examples=150, deadline=None)
@given(chains())
def test_any_chain_of_blocks_equals_the_chain_without_ranks(chain):
    blocks = [embedding_block(), *chain.blocks, head_block()]
    try:
        plan_boundaries(blocks, chain.sizes)
    except MisuseError:
        assume(False)
    assert max(OneProcessWorld(chain.sizes).run(run_chain, chain)) <= TOLERANCE


def models(attn_dp, attn_tp):
    """Chains of real layer kinds."""
    two = resolve_sizes(ranks=attn_dp * attn_tp, attn_dp_size=attn_dp)
    split = resolve_sizes(ranks=4, attn_dp_size=attn_dp, moe_ep_size=2) if attn_dp * attn_tp == 4 else two
    for sizes in {two, split}:
        yield sizes, (ATTENTION, ALLGATHERV, ATTENTION, ALLGATHERV)
        yield sizes, (ATTENTION, DENSE_TP, ATTENTION, ALLTOALLV, ATTENTION, ALLTOALLV)
        yield sizes, (ATTENTION, ALLTOALLV, ATTENTION, ALLGATHERV, ATTENTION, DENSE_TP)


@pytest.mark.parametrize(
    ("attn_dp", "attn_tp", "counts", "mode"),
    [
        (2, 1, (3, 1), PaddingMode.SUM_LEN),
        (2, 1, (0, 2), PaddingMode.SUM_LEN),
        (2, 1, (4, 4), PaddingMode.MAX_LEN),
        (1, 2, (2,), PaddingMode.SUM_LEN),
        (2, 2, (2, 0), PaddingMode.SUM_LEN),
        (2, 2, (6, 2), PaddingMode.SUM_LEN),
        (2, 2, (4, 4), PaddingMode.MAX_LEN),
        (4, 1, (1, 0, 0, 5), PaddingMode.SUM_LEN),
        (1, 4, (8,), PaddingMode.MAX_LEN),
    ],
)
def test_layers_of_real_models_equal_one_process_on_real_ranks(rank_pool, attn_dp, attn_tp, counts, mode):
    for sizes, blocks in models(attn_dp, attn_tp):
        for small_sums, over_gloo in ((NO_SUMS, False), (ALL_SUMS, False), (NO_SUMS, True)):
            chain = Chain(
                sizes=sizes,
                blocks=blocks,
                counts=counts,
                padding_mode=mode,
                small_sums=small_sums,
                over_gloo=over_gloo,
            )
            assert max(rank_pool(sizes.ranks).run(run_chain, chain)) <= TOLERANCE


def one_rank_entry():
    sizes, comms = resolve_sizes(ranks=1), local_comms()
    (plan,) = plan_boundaries([embedding_block(), attention_block("first")], sizes)
    batch = SimpleNamespace(step=step_of((2,)), attn_dp_rank=0)
    return Boundary(plan, comms), Rows(torch.ones(2, 3), ATTN_ROWS, COMPLETE, comms), batch


def test_a_boundary_entered_twice_with_one_output_is_refused():
    boundary, output, batch = one_rank_entry()
    stream = Stream().followed_by(output)
    rows, after = boundary.enter(stream, None, norm, batch)
    assert rows.value.shape == (2, 3) and after.pending is None
    with pytest.raises(RowsMisuse, match="entered before"):
        boundary.enter(after, None, norm, batch)
    with pytest.raises(RowsMisuse, match="dropped"):
        stream.followed_by(output)


def test_rows_that_disagree_with_the_steps_counts_are_refused_with_both_numbers():
    boundary, _, batch = one_rank_entry()
    stream = Stream().followed_by(Rows(torch.ones(3, 3), ATTN_ROWS, COMPLETE, local_comms()))
    with pytest.raises(RowsMisuse, match=r"counts \[2\] say 2 rows, the tensor has 3"):
        boundary.enter(stream, None, norm, batch)


def double_sum(context):
    sizes = resolve_sizes(ranks=2, attn_dp_size=2)
    comms = context.comms_of(sizes)
    plans = plan_boundaries([embedding_block(), ATTENTION, ALLGATHERV, head_block()], sizes)
    batch = SimpleNamespace(step=step_of((1, 1)), attn_dp_rank=context.rank)
    finished = Rows(torch.ones(2, 3), FULL_ROWS, MOE_SUM, comms).complete()
    stream = Stream(residual=Rows(torch.ones(1, 3), ATTN_ROWS, COMPLETE, comms)).followed_by(finished)
    try:
        Boundary(plans[2], comms).enter(stream, None, norm, batch)
    except RowsMisuse as error:
        return str(error)


def test_a_block_that_summed_although_it_said_it_would_owe_is_refused_instead_of_summed_twice():
    for message in OneProcessWorld(resolve_sizes(ranks=2, attn_dp_size=2)).run(double_sum):
        assert "rows owing ['moe_ep'], got {} rows owing []" in message


def test_a_gated_boundary_needs_its_update_and_a_plain_one_refuses_one():
    boundary, output, batch = one_rank_entry()
    with pytest.raises(RowsMisuse, match="is_gated_update=False"):
        boundary.enter(Stream().followed_by(output), lambda residual, x: residual, norm, batch)


def test_a_boundary_with_attention_cp_is_planned_but_not_run():
    sizes = resolve_sizes(ranks=4, attn_cp_size=2)
    (plan,) = plan_boundaries([embedding_block(), attention_block("first")], sizes)
    with pytest.raises(SelectionRefused, match="attn_cp_size 1"):
        Boundary(plan, local_comms())
