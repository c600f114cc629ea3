"""The MoE block end to end: every layout and dispatcher gives each row the weighted sum of its experts, scaled once."""

from __future__ import annotations

from collections.abc import Callable

import attrs
import pytest
import torch
from crossdock.dispatch import make_dispatcher
from crossdock.dispatch_layout import dispatch_step, rows_of_rank
from crossdock.errors import RowsMisuse
from crossdock.experts import adapt_experts, layouts_needed, make_experts
from crossdock.groups import align_rows, drop_unit_axes, rank_place, resolve_sizes
from crossdock.location import make_expert_location, placement_maps
from crossdock.moe import MoeBlock, padded_rows
from crossdock.observe.recorder import ExpertLoadRecorder, RecorderMode, RecorderSpec
from crossdock.placement import trivial_placement
from crossdock.rows import Rows, complete_rows
from crossdock.testing.world import OneProcessWorld, RankContext, RankPool
from crossdock.types.attention import AttnMetadata
from crossdock.types.batch import ForwardBatch
from crossdock.types.dispatch import DispatcherSpec
from crossdock.types.experts import ExpertsSpec, ExpertTensors
from crossdock.types.layout import ATTN_ROWS, FULL_ROWS, LOCAL_ROWS, Layout, TokenAxis
from crossdock.types.location import PickerSpec
from crossdock.types.model import ForwardContext, MoeParts
from crossdock.types.parallel import ParallelSizes
from crossdock.types.placement import Topology
from crossdock.types.step import DispatchMode, ForwardMode, PaddingMode, StepPlan

HIDDEN, INNER, EXPERTS, TOP_K, LAYER = 32, 64, 6, 2, 5
SCALING = 2.5
TOLERANCE = 1e-5
"""fp32 sums over ranks in another order, relative to the largest value."""


@attrs.frozen(kw_only=True)
class Case:
    sizes: ParallelSizes
    live: tuple[int, ...]
    dispatcher: str
    redundant: int = 0
    picker: str = "dynamic"

    @property
    def padded(self) -> tuple[int, ...]:
        return tuple(align_rows(live + 1, self.sizes.attn_tp_size) for live in self.live)

    @property
    def plan(self) -> StepPlan:
        return StepPlan(
            step=0,
            eplb_pass=0,
            live_tokens=self.live,
            padded_tokens=self.padded,
            padding_mode=PaddingMode.SUM_LEN,
            forward_mode=ForwardMode.DECODE,
            dispatch_mode=DispatchMode.NORMAL,
            overlap=False,
            overlap_reason="",
        )


class ScaledSoftmax:
    """Softmax over a fixed projection, top-k, no renormalisation, scaled by 2.5."""

    bias: torch.Tensor | None = None

    def __init__(self) -> None:
        self._weight = torch.randn(EXPERTS, HIDDEN, generator=torch.Generator().manual_seed(5)) / HIDDEN**0.5

    def logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states.float() @ self._weight.T

    def select(self, logits: torch.Tensor, bias: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        weights, ids = logits.softmax(dim=-1).topk(TOP_K)
        return ids, weights * SCALING


def expert_weights() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(6)
    return (
        torch.randn(EXPERTS, 2 * INNER, HIDDEN, generator=generator) / HIDDEN**0.5,
        torch.randn(EXPERTS, HIDDEN, INNER, generator=generator) / INNER**0.5,
    )


def all_rows(case: Case) -> torch.Tensor:
    return torch.randn(sum(case.padded), HIDDEN, generator=torch.Generator().manual_seed(7))


def oracle(case: Case) -> torch.Tensor:
    """[rows of all replicas, H]: every expert on every row, weighted by the router; padding is zero."""
    rows, router = all_rows(case), ScaledSoftmax()
    gate_up, down = expert_weights()
    ids, weights = router.select(router.logits(rows), None)
    shares = torch.zeros(len(rows), EXPERTS).scatter(1, ids, weights)
    gate, up = torch.einsum("nh,eih->eni", rows, gate_up).chunk(2, dim=-1)
    outputs = torch.einsum("eni,ehi->neh", torch.nn.functional.silu(gate) * up, down)
    total = (outputs * shares[:, :, None]).sum(dim=1)
    start = 0
    for live, padded in zip(case.live, case.padded, strict=True):
        total[start + live : start + padded] = 0
        start += padded
    return total


def local_tensors(case: Case, slots: torch.Tensor, moe_tp_rank: int) -> ExpertTensors:
    """Weights of a rank's slots, and its share of the intermediate size."""
    gate_up, down = expert_weights()
    share = INNER // case.sizes.moe_tp_size
    part = slice(moe_tp_rank * share, (moe_tp_rank + 1) * share)
    gate, up = gate_up[slots].chunk(2, dim=1)
    tensors = {
        "gate_up": torch.cat((gate[:, part], up[:, part]), dim=1).contiguous(),
        "down": down[slots][:, :, part].contiguous(),
    }
    return ExpertTensors(layer=LAYER, tensors=tensors)


def build(context: RankContext, case: Case) -> tuple[MoeBlock, MoeParts]:
    sizes, place, comms = case.sizes, context.place(case.sizes), context.comms_of(case.sizes)
    physical = EXPERTS + case.redundant
    num_local = physical // sizes.moe_ep_size
    cpu = torch.device("cpu")
    experts = make_experts(
        "torch",
        {},
        ExpertsSpec(
            hidden_size=HIDDEN,
            intermediate_size=INNER // sizes.moe_tp_size,
            num_local_experts=num_local,
            top_k=TOP_K,
            activation="silu",
            dtype=torch.float32,
            device=cpu,
        ),
    )
    dispatcher = make_dispatcher(
        case.dispatcher,
        {},
        DispatcherSpec(
            sizes=sizes,
            place=place,
            comms=comms,
            hidden_size=HIDDEN,
            top_k=TOP_K,
            num_physical_experts=physical,
            dtype=torch.float32,
            device=cpu,
            max_rows_per_rank=64,
            accepted_layouts=layouts_needed(experts.capabilities.layouts),
        ),
    )
    capabilities = dispatcher.capabilities
    maps = placement_maps(trivial_placement(1, EXPERTS, physical), cpu)
    slots = maps.physical_to_logical[0, place.moe_ep_rank * num_local : (place.moe_ep_rank + 1) * num_local]
    experts.attach(local_tensors(case, slots, place.moe_tp_rank))
    picker_spec = PickerSpec(
        maps=maps,
        topology=Topology(num_gpus=sizes.moe_ep_size, num_nodes=1, num_physical_experts=physical),
        sizes=sizes,
        place=place,
        comms=comms,
        replicated_rows=capabilities.rank_invariant_picks_needed,
    )
    recorder_spec = RecorderSpec(
        mode=RecorderMode.STAT, maps=maps, sizes=sizes, place=place, input_rows=capabilities.input_rows
    )
    parts = MoeParts(
        dispatcher=dispatcher,
        experts=adapt_experts(experts, capabilities.layouts, num_local),
        picker=make_expert_location(case.picker, {}, picker_spec),
        maps=maps,
        recorder=ExpertLoadRecorder(recorder_spec),
        num_physical_experts=physical,
    )
    return MoeBlock(layer=LAYER, layer_row=0, router=ScaledSoftmax(), parts=parts, sizes=sizes, place=place), parts


def context_of(case: Case, rank: int, input_rows: Layout) -> ForwardContext:
    replica = rank_place(case.sizes, rank).attn_dp_rank
    rows = case.padded[replica]
    batch = ForwardBatch(
        input_ids=torch.zeros(rows, dtype=torch.int64),
        positions=torch.zeros(rows, dtype=torch.int64),
        kv_slots=torch.zeros(rows, dtype=torch.int64),
        page_table=torch.zeros((0, 1), dtype=torch.int32),
        seq_lens=(),
        query_lens=(),
        logit_rows=torch.zeros(0, dtype=torch.int64),
        forward_mode=ForwardMode.DECODE,
        step=case.plan,
        attn_dp_rank=replica,
        num_live_tokens=case.live[replica],
    )
    return ForwardContext(
        batch=batch,
        attn_metadata=AttnMetadata(batch=batch, data=None),
        dispatch_step=dispatch_step(case.plan, input_rows, case.sizes),
    )


def held(case: Case, layout: Layout, rank: int) -> slice:
    """The rows of all replicas that a rank holds."""
    axes, place = drop_unit_axes(layout, case.sizes), rank_place(case.sizes, rank)
    count = rows_of_rank(layout, case.padded, rank, case.sizes)
    first = sum(case.padded[: place.attn_dp_rank]) if TokenAxis.ATTN_DP in axes else 0
    first += place.attn_tp_rank * count if TokenAxis.ATTN_TP in axes else 0
    return slice(first, first + count)


def run_block(context: RankContext, case: Case) -> tuple[float, list[int]]:
    """Largest error of this rank's rows relative to the oracle's largest value, and the recorded load by expert."""
    block, parts = build(context, case)
    capabilities = parts.dispatcher.capabilities
    comms = context.comms_of(case.sizes)
    hidden = complete_rows(
        all_rows(case)[held(case, capabilities.input_rows, context.rank)], capabilities.input_rows, comms
    )
    recorder = parts.recorder
    assert isinstance(recorder, ExpertLoadRecorder)
    recorder.start()
    recorder.begin_pass(0)
    ctx = context_of(case, context.rank, capabilities.input_rows)
    routed = block.route(ctx, hidden)
    received = block.dispatch_end(ctx, block.dispatch_begin(ctx, hidden, routed))
    out, received = block.experts(ctx, received)
    combined = block.combine_end(ctx, block.combine_begin(ctx, out, received))
    recorder.end_pass()
    wanted = oracle(case)
    found = combined.complete().value
    mine = wanted[held(case, capabilities.output_rows, context.rank)]
    counts: list[int] = recorder.logical_counts(comms.world)[0, 0].tolist()
    scale = max(float(wanted.abs().max()), 1.0)
    return (float((found - mine).abs().max()) / scale if mine.numel() else 0.0), counts


def router_counts(case: Case) -> list[int]:
    router, rows = ScaledSoftmax(), all_rows(case)
    ids, _ = router.select(router.logits(rows), None)
    live, start = [], 0
    for count, padded in zip(case.live, case.padded, strict=True):
        live.append(ids[start : start + count])
        start += padded
    return torch.bincount(torch.cat(live).flatten(), minlength=EXPERTS).tolist()


def cases() -> list[Case]:
    found: list[Case] = []
    for dp, tp, ep in ((1, 1, 1), (2, 1, 2), (1, 2, 2), (2, 1, 1), (2, 2, 4), (2, 2, 2)):
        ranks = dp * tp
        sizes = resolve_sizes(ranks=ranks, attn_dp_size=dp, attn_tp_size=tp, moe_ep_size=ep, moe_tp_size=ranks // ep)
        for live in {(5,) * dp, (0,) * (dp - 1) + (1,), (0,) * dp, (7,) + (0,) * (dp - 1)}:
            for dispatcher in ("allgatherv", "alltoallv") if ep == ranks else ("allgatherv",):
                redundant = {1: 3, 2: 2, 4: 6}[ep]
                found.append(Case(sizes=sizes, live=live, dispatcher=dispatcher, redundant=redundant))
                if dispatcher == "alltoallv":
                    found.append(attrs.evolve(found[-1], picker="static"))
    return found


@pytest.mark.parametrize("case", cases(), ids=str)
def test_each_row_gets_its_experts_scaled_once_and_is_counted_once(case: Case) -> None:
    """Redundant experts, idle replicas, padding and zero rows included."""
    for error, counts in OneProcessWorld(case.sizes).run(run_block, case):
        assert error <= TOLERANCE
        assert counts == router_counts(case)


@pytest.mark.parametrize("dispatcher", ["allgatherv", "alltoallv"])
def test_the_same_over_real_processes(dispatcher: str, rank_pool: Callable[[int], RankPool]) -> None:
    sizes = resolve_sizes(ranks=2, attn_dp_size=2)
    case = Case(sizes=sizes, live=(4, 0), dispatcher=dispatcher, redundant=2)
    for error, counts in rank_pool(2).run(run_block, case):
        assert error <= TOLERANCE
        assert counts == router_counts(case)


def wrong_layout(context: RankContext, case: Case) -> str:
    block, _ = build(context, case)
    hidden = Rows(torch.zeros(4, HIDDEN), FULL_ROWS, frozenset(), context.comms_of(case.sizes))
    with pytest.raises(RowsMisuse) as found:
        block.route(context_of(case, context.rank, LOCAL_ROWS), hidden)
    return str(found.value)


def test_rows_in_another_layout_than_the_dispatcher_takes_are_refused() -> None:
    case = Case(sizes=resolve_sizes(ranks=2, attn_dp_size=2), live=(1, 1), dispatcher="alltoallv")
    for message in OneProcessWorld(case.sizes).run(wrong_layout, case):
        assert "got rows in layout {}, its dispatcher takes {attn_dp}" in message


@pytest.mark.parametrize(
    ("layout", "rank", "ranges"),
    [
        (FULL_ROWS, 0, ((3, 4), (4, 6))),
        (ATTN_ROWS, 0, ((3, 4),)),
        (ATTN_ROWS, 2, ((0, 2),)),
        (LOCAL_ROWS, 0, ()),
        (LOCAL_ROWS, 1, ((1, 2),)),
        (LOCAL_ROWS, 3, ((0, 1),)),
    ],
)
def test_rows_without_a_token_are_found_in_every_layout(
    layout: Layout, rank: int, ranges: tuple[tuple[int, int], ...]
) -> None:
    """Two replicas of two ranks: 3 live of 4 rows, and 0 live of 2."""
    sizes = resolve_sizes(ranks=4, attn_dp_size=2, attn_tp_size=2)
    plan = attrs.evolve(Case(sizes=sizes, live=(3, 0), dispatcher="").plan, padded_tokens=(4, 2))
    case = Case(sizes=sizes, live=(3, 0), dispatcher="")
    batch = attrs.evolve(context_of(case, rank, layout).batch, step=plan)
    assert padded_rows(layout, batch, sizes, rank_place(sizes, rank)) == ranges
